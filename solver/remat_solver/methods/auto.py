"""Auto: bounds, a plan at once, then search and proof side by side until the gap, the time or the caller says stop."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial

from remat_ir import Chain, Graph, Plan, Problem, gap_of, plain_peak, plain_plan
from remat_ir.greedy import WEIGHTS, least_memory, peak_of
from remat_ir.proof import StageProof

from ..backends import Engine, check_memory
from ..beside import Beside, give_way
from ..blocks import plans_by_blocks
from ..certify.pairs import prove_by_pairs
from ..certify.windows import prove_by_windows
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..join import offer_homogenized
from ..lift import LiftedIncumbent
from ..search import Search, Starts, least_plan
from ..staged.prove import Proof
from ..transfers import TransferOptions, keep_recompute_offload
from .greedy import first_plan, other_plans
from .staged import polished
from .structured import AT_ONCE, offer_chain, offload_program, run_structured

_FIRST_MOVES = 20_000
"""Moves that the search may make before the slower ways to a first plan have their turn: about a tenth of a second."""
_DEEP = 500
"""Ops from which the program over blocks comes before greedy plans of ever less memory."""
_MOVES_BEFORE_BLOCKS = 100_000
"""Moves from a greedy plan before the program over blocks is tried: mostly they need no help from it."""
_OTHER_WEIGHTS = ((2.0,), (1.5,), (3.0,))
"""Rules of further greedy plans of little memory, where the usual ones lead to none: each may lead elsewhere."""
_GREEDY_SHARE = 0.1
"""The share of what is left for each of these."""
_TIGHTEN_S, _TIGHTEN_SHARE_FIRST, _TIGHTEN_SHARE = 10.0, 0.1, 0.2
"""Seconds at most, and the share of what is left at first and later, for plans of ever less memory where none fits."""
_WIDE = 0.03
"""The gap from which windows are tried, after one linear program."""
_WINDOW_GAP, _WINDOW_MOVES = 0.01, 20_000
"""The gap at which the proof of a window may end, and the moves of the search before it."""


@dataclass(frozen=True)
class AutoOptions:
    """Which of the two halves run side by side, the search's seed, and the memory that each engine may use.

    Without `proof` the search goes on until the time is up; without a time limit it never ends.

    `memory_bytes` 0 means half of what is free when an engine starts, but at least 1 GiB.
    """

    search: bool = True
    proof: bool = True
    seed: int = 0
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        if type(self.search) is not bool or type(self.proof) is not bool:
            raise ValueError("search and proof must be true or false")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2^32 − 1, not {self.seed}")
        check_memory(self.memory_bytes)


def run_auto(incumbent: Incumbent, options: AutoOptions) -> None:
    """Combine the methods; anytime: every improvement is offered as soon as it is found."""
    if not isinstance(incumbent.problem.subject, Graph):
        run_structured(incumbent, lambda chain: _run_general(chain, options))
    elif not _keep_everything(incumbent):
        _run_general(incumbent, options)


def _run_general(incumbent: Incumbent, options: AutoOptions) -> None:
    """Solve a graph or a chain, of which a plan may be known: a chain by way of its lift."""
    subject = incumbent.problem.subject
    assert isinstance(subject, (Graph, Chain))
    if subject.link is not None:
        linked = TransferOptions(proof=options.proof, seed=options.seed)
        program = offload_program if isinstance(subject, Chain) else None
        # with its proof, whose relaxations have plans in them; it ends where no plan without transfers is better
        keep_recompute_offload(incumbent, linked, lambda lifted: run_auto(lifted, options), program)
        return
    if isinstance(subject, Chain):
        run_auto(LiftedIncumbent(incumbent), options)
        return
    _combine(incumbent, options)
    if options.search:
        other_plans(incumbent)


def _combine(incumbent: Incumbent, options: AutoOptions) -> None:
    """Search and proof side by side, after a first plan."""
    offer_chain(incumbent, most=AT_ONCE)
    with contextlib.ExitStack() as stack:
        # before anything that competes for the cores
        first_plan(incumbent, brief=options.search)
        offer_chain(incumbent, AT_ONCE + 1)
        if incumbent.plan is None:
            prove_by_pairs(incumbent)
        if incumbent.stopped():
            return
        memory = options.memory_bytes
        engine = stack.enter_context(Engine("highs", memory_bytes=memory)) if options.proof else None
        seed, starts = options.seed, Starts(incumbent, options.seed)
        search = Beside(incumbent, "search", lambda: _search(incumbent, seed, starts)) if options.search else None
        try:
            if engine is not None:
                polish, second = polished(incumbent), partial(_windows, incumbent, options.seed)
                proof = Proof(incumbent, polish=polish, exceeding=starts.add, memory_bytes=memory, second=second)
                proof.run(engine)
            if incumbent.exhausted or (engine is not None and math.isinf(incumbent.deadline.remaining())):
                # the search looks nowhere else, or would never end
                incumbent.close()
        except BaseException:
            incumbent.close()
            raise
        finally:
            if search is not None:
                search.join()


def _windows(incumbent: Incumbent, seed: int, engine: Engine) -> None:
    """The bound by windows, where it may close much of the gap."""
    if incumbent.cost_ns is None or gap_of(incumbent.cost_ns, incumbent.bound_ns) > _WIDE:
        prove_by_windows(incumbent, partial(_window_bound, incumbent, seed, engine))


def _window_bound(
    incumbent: Incumbent, seed: int, engine: Engine, problem: Problem, until: Deadline
) -> tuple[int, StageProof] | None:
    """What the proof of one window comes to: a small problem, for which a short search has the plan to reach."""
    window = Incumbent(problem, until, _WINDOW_GAP, cancelled=incumbent.stopped, certify=True)
    window.dropped = incumbent.dropped
    first_plan(window, brief=True)
    Search(problem.graph, problem.budget_bytes, seed).run(window, _WINDOW_MOVES)
    Proof(window, polish=polished(window)).run(engine)
    proof = window.known.proof
    return (window.bound_ns, proof) if isinstance(proof, StageProof) and not window.infeasible else None


def _keep_everything(incumbent: Incumbent) -> bool:
    """Whether the plain plan fits: then it is optimal, since every plan runs every op at least once."""
    graph = incumbent.problem.graph
    peak = plain_peak(graph)
    incumbent.suffices(peak)
    if peak > incumbent.problem.budget_bytes:
        return False
    incumbent.offer(plain_plan(graph), "checkpoint-all")
    return True


def _search(incumbent: Incumbent, seed: int, starts: Starts) -> None:
    """Look for cheaper plans; where there is none yet, first for one that needs little memory."""
    # where there is one core for both, the proof's programs get most of it
    give_way()
    problem = incumbent.problem
    searching, least = None, plain_plan(problem.graph)
    if incumbent.plan is None:
        searching = Search(problem.graph, problem.budget_bytes, seed)
        searching.run(incumbent, _FIRST_MOVES)
    structured = isinstance(incumbent, LiftedIncumbent) and incumbent.of_chain
    if not structured:
        offer_homogenized(incumbent)
    if incumbent.plan is None and not structured and problem.graph.ops >= _DEEP:
        structured = True
        plans_by_blocks(incumbent, polish=polished(incumbent, source="blocks"))
    if incumbent.plan is None:
        # before the greedy plans of little memory, each of which takes seconds on a dense graph
        least = _tightened(incumbent, least, seed, _TIGHTEN_SHARE_FIRST)
    if incumbent.plan is None:
        for weights in (WEIGHTS, *_OTHER_WEIGHTS):
            if incumbent.plan is None and not incumbent.stopped():
                stop = incumbent.deadline.within(_GREEDY_SHARE * _spare(incumbent)).passed
                least = _less(incumbent, least, least_memory(problem.graph, stop=stop, weights=weights), seed)
    if not incumbent.stopped():
        searching = searching or Search(problem.graph, problem.budget_bytes, seed)
        if not structured:
            if incumbent.plan is not None:
                searching.run(incumbent, _MOVES_BEFORE_BLOCKS)
            if not incumbent.stopped():
                plans_by_blocks(incumbent, polish=polished(incumbent, source="blocks"))
        if incumbent.plan is None:
            _tightened(incumbent, least, seed + 1, _TIGHTEN_SHARE)
        searching.run(incumbent, between=starts.run)


def _less(incumbent: Incumbent, known: Plan, start: Plan, seed: int) -> Plan:
    """The plan of less memory: the known one, or what the search makes of another start."""
    if incumbent.offer_or_suffices(start, "least-memory") > incumbent.problem.budget_bytes:
        start = _tightened(incumbent, start, seed, _TIGHTEN_SHARE_FIRST)
    return min(known, start, key=lambda plan: peak_of(incumbent.problem.graph, plan))


def _tightened(incumbent: Incumbent, plan: Plan, seed: int, share: float) -> Plan:
    """From a plan above the budget to one within it, or of the least memory on the way: what the answer says is enough.

    It is left as soon as there is a plan from elsewhere.
    """
    problem = incumbent.problem
    watch = incumbent.deadline.within(min(_TIGHTEN_S, share * _spare(incumbent)))
    found = least_plan(
        problem.graph,
        problem.budget_bytes,
        plan,
        watch,
        lambda: incumbent.stopped() or incumbent.plan is not None,
        seed,
    )
    incumbent.offer_or_suffices(found, "search")
    return found


def _spare(incumbent: Incumbent) -> float:
    return min(incumbent.deadline.remaining(), 600.0)
