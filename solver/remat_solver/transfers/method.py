"""The method for graphs with a link: plans without transfers, relaxations and the search side by side."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from remat_ir import InvalidPlan, plain_peak, plain_plan, verify

from ..deadline import Deadline
from ..incumbent import Incumbent
from ..lift import LiftedIncumbent
from ..program import Floats
from ..search import await_compiled, compiling
from .baselines import fractions_plan
from .bound import Relaxed, prove, prove_whole
from .search import TransferSearch

_WITHOUT_SHARE, _PROOF_SHARE = 0.3, 0.9
"""Shares of the time for plans without transfers, and for linear relaxations."""
_UNLIMITED_S = 60.0


@dataclass(frozen=True)
class TransferOptions:
    """Whether plans without transfers come first, whether a bound is sought, and the search's seed."""

    without: bool = True
    proof: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.without) is not bool or type(self.proof) is not bool:
            raise ValueError("without and proof must be true or false")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2^32 − 1, not {self.seed}")


def keep_recompute_offload(
    incumbent: Incumbent, options: TransferOptions, general: Callable[[Incumbent], None] | None = None
) -> None:
    """Plan a graph with a link; `general` solves it without transfers for a share of the time."""
    problem = incumbent.problem
    peak = plain_peak(problem.graph)
    incumbent.suffices(peak)
    if peak <= problem.budget_bytes:
        incumbent.offer(plain_plan(problem.graph), "checkpoint-all")
        return
    compiling()
    search = TransferSearch(incumbent, options.seed)
    search.offload_only()
    if (fractions := fractions_plan(incumbent)) is not None:
        with contextlib.suppress(InvalidPlan):  # a baseline, which knows nothing of what is consumed
            verify(problem, fractions)
            search.adopt(fractions)
    relaxations = _Relaxations(incumbent) if options.proof else None
    try:
        if general is not None and options.without and not incumbent.stopped():
            lifted = LiftedIncumbent(incumbent, plans_only=True)
            lifted.deadline = within(incumbent.deadline, _WITHOUT_SHARE)
            general(lifted)
            if lifted.plan is not None and await_compiled(incumbent):
                search.solve(frozenset(), 4096, tuple(lifted.plan.computes))  # type: ignore[union-attr]
        search.run(relaxations.take if relaxations is not None else lambda: None)
    finally:
        if relaxations is not None:
            relaxations.join()


def within(deadline: Deadline, share: float) -> Deadline:
    """A deadline after a share of what is left of another."""
    return deadline.within(share * min(deadline.remaining(), _UNLIMITED_S))


class _Relaxations:
    """A thread that solves relaxations and raises bounds, and hands on what they would move."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self._found: list[Relaxed] = []
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="transfer-bound", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        incumbent = self.incumbent
        try:
            best: Relaxed | None = None
            for relaxed in prove(incumbent, within(incumbent.deadline, _PROOF_SHARE)):
                with self._lock:
                    self._found.append(relaxed)
                if best is None or relaxed.bound_ns > best.bound_ns:
                    best = relaxed
            if best is not None and not incumbent.stopped():
                prove_whole(incumbent, best, incumbent.deadline)
        except BaseException as error:
            self._failure = error
            incumbent.close()

    def take(self) -> Floats | None:
        """What the next relaxation would move, or None where there is no other yet."""
        with self._lock:
            return self._found.pop().moved if self._found else None

    def join(self) -> None:
        """Wait for the end, and raise what the thread raised."""
        while self._thread.is_alive() and not self.incumbent.stopped():
            self._thread.join(0.05)
        self._thread.join(2.0)
        if self._failure is not None:
            raise self._failure
