"""Data parallel: the first rank asks, every rank runs the same plan and checks that it has the same graph."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from remat_ir import Answer, Chain, Problem, Progress, RematError, problem_digest

from ..device import of_messages
from ..planning.check import checked
from ..planning.planner import Planner, planner_for, profile_table
from ..planning.profiles import Profile

log = logging.getLogger("remat")

T = TypeVar("T")
U = TypeVar("U")

_MEASURED = ("forward_ns", "backward_ns", "forward_workspace_bytes", "backward_workspace_bytes")


class RanksDiffer(RematError):
    """The ranks of a job do not train the same step: their graphs or budgets are not equal."""


class RankPlanner:
    """A planner for one of several ranks that train the same step on different data.

    All ranks must call it for the same steps in the same order, which they do when they train in step. Costs come from
    the first rank's measurements, so that all ranks pose one problem; its digest is compared on every rank.

    Args:
        planner: who is asked by the first rank: as for `remat.optimize`.
        group: the process group; None is the default one.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """

    in_step = True

    def __init__(self, planner: Planner | str | None = None, group: Any = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("RankPlanner needs torch.distributed: call init_process_group first")
        self.group = group
        self.first = dist.get_rank(group) == 0
        self.asked = planner_for(planner)
        self.profiles = RankProfiles(self)

    def plan(
        self,
        problem: Problem,
        *,
        method: str = "auto",
        time_limit_s: float = 60.0,
        max_gap: float = 0.001,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        """The first rank's answer, on every rank.

        Raises:
            RanksDiffer: some rank poses another problem.
            RematError: the first rank got no answer; every rank hears why.
        """
        return self.agreed(
            problem,
            lambda: self.asked.plan(
                problem, method=method, time_limit_s=time_limit_s, max_gap=max_gap, on_progress=on_progress
            ),
        )

    def agreed(self, problem: Problem, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives on the first rank, on all of them, once all are seen to pose the same problem; checked.

        Raises:
            RanksDiffer, RematError: as `plan`.
        """
        digest = problem_digest(problem)

        def told() -> dict[str, Any]:
            try:
                answer = ask()
            except Exception as error:  # the others wait for a word, whatever happens here
                return {"digest": digest, "error": _reason(error)}
            return {"digest": digest, "answer": answer.to_json()}

        heard = self.share(told)
        if not self.all_equal(heard["digest"] == digest):
            raise RanksDiffer(
                f"rank {dist.get_rank(self.group)} has graph and budget {digest[:12]}, the first rank "
                f"{heard['digest'][:12]}: all ranks must train the same model on inputs of the same shape"
            )
        if "error" in heard:
            raise RematError(f"the first rank has no plan: {heard['error']}")
        return checked(problem, Answer.from_json(heard["answer"]))

    def later(self, problem: Problem, ask: Callable[[], Answer], make: Callable[[Answer], T | None]) -> RankLater[T]:
        """What `make` makes on each rank of the first rank's answer, all of them at the start of the same step.

        Args:
            ask: called on the first rank only, in a thread; it must not speak with the other ranks.
        """
        return RankLater(self, problem, ask, make)

    def agreed_chain(self, chain: Chain, graded: frozenset[int]) -> tuple[Chain, frozenset[int]]:
        """A chain with the times and workspaces that the first rank has measured; its sizes stay this rank's own.

        Where the ranks' stages are not the same, `plan` says so: their problems differ.
        """
        heard = self.share(
            lambda: {
                **{name: list(getattr(chain, name)) for name in _MEASURED},
                "link_bytes_per_s": chain.link_bytes_per_s,
                "graded": sorted(graded),
            }
        )
        if len(heard["forward_ns"]) != chain.stages:
            return chain, graded
        measured: dict[str, Any] = {name: tuple(heard[name]) for name in _MEASURED}
        if chain.link_bytes_per_s is not None and heard["link_bytes_per_s"] is not None:
            measured["link_bytes_per_s"] = heard["link_bytes_per_s"]
        return replace(chain, **measured), frozenset(heard["graded"])

    def all_equal(self, here: bool) -> bool:
        """Whether something holds on every rank."""
        return self.least(int(here)) == 1

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks have."""
        found = torch.tensor([number], device=of_messages(self.group))
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found.item())

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Of each of the numbers, the most that a rank has."""
        found = torch.tensor(list(numbers), device=of_messages(self.group))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in found.tolist()]

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, on all of them; JSON, so nothing received is ever code.

        Raises:
            RematError: `make` raised on the first rank, which raises that itself; every rank hears why.
        """
        failed: Exception | None = None
        text = b""
        if self.first:
            try:
                text = json.dumps({"made": make()}).encode()
            except Exception as error:  # the others wait for a word, whatever happens here
                failed = error
                text = json.dumps({"error": _reason(error)}).encode()
        heard = json.loads(self._broadcast(text))
        if failed is not None:
            raise failed
        if "error" in heard:
            raise RematError(f"the first rank failed: {heard['error']}")
        return heard["made"]

    def _broadcast(self, text: bytes) -> bytes:
        """The first rank's text."""
        device = of_messages(self.group)
        size = torch.tensor([len(text)], device=device)
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast(size, source, group=self.group)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        if self.first:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, source, group=self.group)
        return bytes(data.cpu().tolist())


class RankLater(Generic[T]):
    """Something that ranks look for beside the training and take up at the same step.

    The ranks agree at the start of each step, in two turns: the first has its answer and tells it, all have made what
    they need of it. Nothing is waited for but the word of the other ranks.
    """

    def __init__(
        self, ranks: RankPlanner, problem: Problem, ask: Callable[[], Answer], make: Callable[[Answer], T | None]
    ) -> None:
        self._ranks, self._problem, self._make = ranks, problem, make
        self._asked = _beside(ask) if ranks.first else None
        self._made: Future[T | None] | None = None
        self._ended = self._worth = False

    def done(self) -> bool:
        """Whether all ranks have it, or none will. Every rank must ask at the same step."""
        if self._ended:
            return True
        if self._made is None:
            if self._ranks.least(int(self._asked is None or self._asked.done())):
                told = self._ranks.share(self._told)
                self._made = _beside(lambda: self._use(told))
            return False
        # 0: still at work; 1: nothing that is better; 2: made
        state = 0 if not self._made.done() else 1 + int(self._made.result() is not None)
        least = self._ranks.least(state)
        self._ended, self._worth = least > 0, least == 2
        return self._ended

    def result(self) -> T | None:
        """What was made, or None on every rank."""
        return self._made.result() if self._worth and self._made is not None else None

    def _told(self) -> dict[str, Any]:
        assert self._asked is not None
        try:
            return {"answer": self._asked.result().to_json()}
        except Exception as error:  # the others wait for a word, whatever happens here
            return {"error": _reason(error)}

    def _use(self, told: dict[str, Any]) -> T | None:
        try:
            if "error" in told:
                raise RematError(told["error"])
            return self._make(checked(self._problem, Answer.from_json(told["answer"])))
        except Exception as error:  # the planner's trouble is no reason to stop training
            log.warning("no better plan came, training goes on by the quick one: %s", error)
            return None


def _beside(work: Callable[[], U]) -> Future[U]:
    """The result of work done in a thread that does not keep the process."""
    found: Future[U] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="remat-ranks", daemon=True).start()
    return found


class RankProfiles:
    """The first rank's table of measured costs, seen by all ranks."""

    def __init__(self, ranks: RankPlanner) -> None:
        self._ranks = ranks
        self._table = profile_table(ranks.asked)

    def get(self, device: str, signatures: Sequence[str]) -> dict[str, Profile]:
        """What the first rank knows; every rank then measures the same rest.

        Raises:
            RanksDiffer: the ranks ask for other kernels, so they do not train the same step.
        """
        asked = hashlib.sha256(json.dumps(sorted(signatures)).encode()).hexdigest()
        heard = self._ranks.share(
            lambda: {"asked": asked, "known": {s: list(p) for s, p in self._table.get(device, signatures).items()}}
        )
        if not self._ranks.all_equal(heard["asked"] == asked):
            raise RanksDiffer(
                f"rank {dist.get_rank(self._ranks.group)} or another one runs other kernels than the first rank: all "
                "ranks must train the same model on inputs of the same shape"
            )
        return {s: Profile(*p) for s, p in heard["known"].items()}

    def put(self, device: str, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """The first rank's measurements stand for all."""
        stands = self._ranks.share(lambda: {s: list(p) for s, p in self._table.put(device, profiles).items()})
        return {s: Profile(*p) for s, p in stands.items()}

    def agreed(self, profiles: Mapping[str, Profile]) -> dict[str, Profile]:
        """The first rank's, of kernels that were not all measured: nothing is written."""
        heard = self._ranks.share(lambda: {s: list(p) for s, p in profiles.items()})
        return {s: Profile(*p) for s, p in heard.items()}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
