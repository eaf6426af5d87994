"""Auto: bounds, a plan at once, then search and proof side by side until the gap, the time or the caller says stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from remat_ir import Chain, Graph, InvalidData, Join, Plan, Problem, gap_of, plain_plan
from remat_ir.greedy import WEIGHTS, least_memory, peak_of
from remat_ir.proof import StageProof

from ..backends.engine import Engine
from ..baselines.heuristics import keep_everything
from ..blocks.plans import plans_by_blocks
from ..bounds import prove_by_pairs
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..join.method import join
from ..lift import LiftedIncumbent
from ..options import Options, flag, whole
from ..portfolio import Member, give_way
from ..search.every import MOST_VALUES, try_every_plan
from ..search.local import Search, Starts, least_plan, move_s
from ..staged.prove import Proof
from ..staged.windows import prove_by_windows
from ..transfers.method import TransferOptions, keep_recompute_offload
from .heuristics import first_plan, other_plans, polished
from .structured import AT_ONCE, offer_chain, offer_persistent, offload_program

_LOG = logging.getLogger("remat.auto")

_FIRST_MOVES = 20_000
"""Moves that the search may make before the slower ways to a first plan have their turn: about a tenth of a second."""
_DEEP = 500
"""Ops from which the program over blocks comes before greedy plans of ever less memory."""
_MOVES_BEFORE_BLOCKS = 100_000
"""Moves from a greedy plan before the program over blocks is tried: mostly they need no help from it."""
_MOVES_BEFORE_EVERY = 1_000_000
"""Moves in all before every plan of a tiny graph is looked at: nearly always the proof has ended by then."""
_RULES = (WEIGHTS, (2.0,), (1.5,), (3.0,))
"""Rules of greedy plans of little memory, one a round: each may lead elsewhere."""
_ROUND_S, _LONGER = 0.3, 1.5
"""Seconds of each way to a first plan in the first round, and how many times as long those of the next one are."""
_SEARCH_SHARE = 0.4
"""The share of what is left for the search before the proof, where they do not run side by side."""
_WIDE = 0.03
"""The gap from which windows are tried, after one linear program."""
_WINDOW_GAP, _WINDOW_MOVES = 0.01, 20_000
"""The gap at which the proof of a window may end, and the moves of the search before it."""


@dataclass(frozen=True)
class AutoOptions(Options):
    """Which of the two halves run side by side, the search's seed, and the memory that each engine may use.

    Without `proof` the search goes on until the time is up; without a time limit it never ends.

    `memory_bytes` 0 means half of what is free when an engine starts, but at least 1 GiB.

    `deterministic`, for research: search and proof run one after the other, and the seconds of the time limit are
    counted from moves and simplex iterations. The same seed gives the same plan and bound, however busy the machine is.
    """

    search: bool = flag()
    proof: bool = flag()
    seed: int = whole(0, 0, 2**32 - 1)
    memory_bytes: int = whole(0)
    deterministic: bool = flag(False)


def run_auto(incumbent: Incumbent, options: AutoOptions) -> None:
    """Combine the methods; anytime: every improvement is offered as soon as it is found.

    A join is solved by its program, which is optimal, and a chain by the persistent program first.
    """
    subject = incumbent.problem.subject
    if isinstance(subject, Join):
        join(incumbent)
    elif isinstance(subject, Chain):
        offer_persistent(incumbent)
        if not incumbent.stopped():
            _run_general(incumbent, options)
    elif not keep_everything(incumbent):
        _run_general(incumbent, options)


def _run_general(incumbent: Incumbent, options: AutoOptions) -> None:
    """Solve a graph or a chain, of which a plan may be known: a chain by way of its lift."""
    subject = incumbent.problem.subject
    assert isinstance(subject, (Graph, Chain))
    if subject.link is not None:
        if options.deterministic:
            raise InvalidData("deterministic takes graphs and chains without a link to the host", "/options")
        linked = TransferOptions(options.proof, options.seed, options.memory_bytes)
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


@dataclass
class _Run:
    """What the stages of one solve share: `starts` of the search; `least`, the plan of least memory so far; `rounds` of
    ways to a first plan.
    """

    incumbent: Incumbent
    options: AutoOptions
    starts: Starts
    least: Plan
    blocks_tried: bool = False
    rounds: int = 0

    @property
    def graph(self) -> Graph:
        """The problem's."""
        return self.incumbent.problem.graph

    @cached_property
    def search(self) -> Search:
        """The one search, made where it is first used."""
        return Search(self.graph, self.incumbent.problem.budget_bytes, self.options.seed)


class _Stage(NamedTuple):
    """A step of the solve: `run` is called where `when` holds, as the steps before it have left the incumbent."""

    name: str
    when: Callable[[_Run], bool]
    run: Callable[[_Run], object]


def _always(run: _Run) -> bool:
    return True


def _going(run: _Run) -> bool:
    return not run.incumbent.stopped()


def _without_plan(run: _Run) -> bool:
    return run.incumbent.plan is None and not run.incumbent.stopped()


def _with_plan(run: _Run) -> bool:
    return run.incumbent.plan is not None and not run.incumbent.stopped()


def _take(run: _Run, stages: tuple[_Stage, ...]) -> None:
    """The stages in turn, each where its condition holds."""
    for stage in stages:
        if stage.when(run):
            _LOG.debug("%s", stage.name)
            stage.run(run)


def _combine(incumbent: Incumbent, options: AutoOptions) -> None:
    """A first plan, then search and proof side by side."""
    run = _Run(incumbent, options, Starts(incumbent, options.seed), plain_plan(incumbent.problem.graph))
    # of a chain's lift the chain has been solved, by its blocks too
    run.blocks_tried = isinstance(incumbent, LiftedIncumbent) and incumbent.of_chain
    _take(run, _FIRST)
    if incumbent.stopped():
        return
    if options.deterministic:
        _in_turn(run)
        return
    search = Member(incumbent, "search", lambda: _search(run)) if options.search else None
    try:
        if options.proof:
            with Engine("highs", memory_bytes=options.memory_bytes) as engine:
                _prove(run, engine)
        if incumbent.exhausted or (options.proof and math.isinf(incumbent.deadline.remaining())):
            # the search looks nowhere else, or would never end
            incumbent.close()
    except BaseException:
        incumbent.close()
        raise
    finally:
        if search is not None:
            search.join()


def _in_turn(run: _Run) -> None:
    """Search, then proof, then the search again: side by side what they tell each other would depend on the clock."""
    incumbent, options = run.incumbent, run.options
    incumbent.note("Seconds were counted from the work that was done.")
    if options.search:
        _take(run, _SEARCH[:-1])
        left_s = (_SEARCH_SHARE if options.proof else 1.0) * incumbent.deadline.remaining()
        most = run.search.moves + int(left_s / move_s(run.graph))
        run.search.run(incumbent, most, between=run.starts.run)
    if options.proof and not incumbent.stopped():
        with Engine("highs", memory_bytes=options.memory_bytes) as engine:
            _prove(run, engine)
    if options.search and not (incumbent.stopped() or incumbent.exhausted):
        run.search.run(incumbent, between=run.starts.run)


def _prove(run: _Run, engine: Engine) -> None:
    incumbent, options = run.incumbent, run.options
    Proof(
        incumbent,
        polish=polished(incumbent),
        exceeding=run.starts.add,
        memory_bytes=options.memory_bytes,
        second=partial(_windows, incumbent, options.seed),
    ).run(engine)


def _windows(incumbent: Incumbent, seed: int, engine: Engine) -> None:
    """The bound by windows, where it may close much of the gap."""
    if incumbent.cost_ns is None or gap_of(incumbent.cost_ns, incumbent.bound_ns) > _WIDE:
        prove_by_windows(incumbent, partial(_window_bound, incumbent, seed, engine))


def _window_bound(
    incumbent: Incumbent, seed: int, engine: Engine, problem: Problem, until: Deadline
) -> tuple[int, StageProof] | None:
    """What the proof of one window comes to: a small problem, for which a short search has the plan to reach."""
    window = Incumbent(
        problem, until, _WINDOW_GAP, cancelled=incumbent.stopped, certify=True, dropped=incumbent.dropped
    )
    first_plan(window, brief=True)
    Search(problem.graph, problem.budget_bytes, seed).run(window, _WINDOW_MOVES)
    Proof(window, polish=polished(window)).run(engine)
    proof = window.known.proof
    return (window.bound_ns, proof) if isinstance(proof, StageProof) and not window.infeasible else None


def _search(run: _Run) -> None:
    """Look for cheaper plans; where there is none yet, first for one that needs little memory."""
    # where there is one core for both, the proof's programs get most of it
    give_way()
    _take(run, _SEARCH)


def _moves(run: _Run, most: int | None = None) -> None:
    """The search, for so many moves or until the end."""
    if most is None:
        run.search.run(run.incumbent, between=run.starts.run)
    else:
        run.search.run(run.incumbent, most)


def _blocks(run: _Run) -> None:
    run.blocks_tried = True
    plans_by_blocks(run.incumbent, polish=polished(run.incumbent, source="blocks"))


def _every_plan(run: _Run) -> None:
    """Look at every plan, where a second of moves has left the gap open: a claim of the optimum ends the proof."""
    if run.incumbent.plan is not None:
        _moves(run, _MOVES_BEFORE_EVERY)
    if _going(run):
        try_every_plan(run.incumbent)


def _three_ways(run: _Run) -> None:
    """Three ways to a first plan in turn, for longer than the last time: where one fails, another has it soon.

    Annealing from nothing finds plans of random graphs. Steps down from the plan of the least memory so far find those
    of networks, and a greedy plan of little memory is where these begin.
    """
    incumbent, graph, number = run.incumbent, run.graph, run.rounds
    seconds = _ROUND_S * _LONGER**number
    run.rounds += 1
    _moves(run, max(1, int(seconds / move_s(graph))))
    starts = [run.least]
    if _without_plan(run) and number < len(_RULES):
        stop = incumbent.deadline.within(seconds).passed
        starts.append(least_memory(graph, stop=stop, weights=_RULES[number]))
    for start in starts:
        if _without_plan(run) and incumbent.offer_or_suffices(start, "least-memory") > incumbent.problem.budget_bytes:
            found = _tightened(incumbent, start, run.options.seed + number, seconds)
            run.least = min(run.least, found, key=lambda plan: peak_of(graph, plan))


def _until_a_plan(run: _Run) -> None:
    """The three ways again and again; where the proof comes after the search, for a share of what is left."""
    in_turn = run.options.deterministic and run.options.proof
    watch = run.incumbent.deadline
    watch = watch.within(_SEARCH_SHARE * watch.remaining()) if in_turn else watch
    while _without_plan(run) and not watch.passed():
        _three_ways(run)


_FIRST = (
    _Stage("a short chain", _always, lambda run: offer_chain(run.incumbent, most=AT_ONCE)),
    _Stage("greedy", _always, lambda run: first_plan(run.incumbent, brief=run.options.search)),
    _Stage("a longer chain", _always, lambda run: offer_chain(run.incumbent, AT_ONCE + 1)),
    _Stage("pairs of values", lambda run: run.incumbent.plan is None, lambda run: prove_by_pairs(run.incumbent)),
)
"""Before anything competes for the cores."""

_SEARCH = (
    _Stage("first moves", _without_plan, lambda run: _moves(run, _FIRST_MOVES)),
    _Stage(
        "blocks of a deep network",
        lambda run: _without_plan(run) and not run.blocks_tried and run.graph.ops >= _DEEP,
        _blocks,
    ),
    _Stage("three ways to a first plan", _without_plan, _three_ways),
    _Stage(
        "moves before blocks",
        lambda run: _with_plan(run) and not run.blocks_tried,
        lambda run: _moves(run, _MOVES_BEFORE_BLOCKS),
    ),
    _Stage(
        "every plan of a tiny graph",
        lambda run: _going(run) and run.graph.values <= MOST_VALUES,
        _every_plan,
    ),
    _Stage("blocks", lambda run: _going(run) and not run.blocks_tried, _blocks),
    _Stage("three ways to a first plan, for ever longer", _without_plan, _until_a_plan),
    _Stage("moves", _going, _moves),
)
"""The search's side; most of it is for a budget at which there is no plan yet."""


def _tightened(incumbent: Incumbent, plan: Plan, seed: int, seconds: float) -> Plan:
    """From a plan above the budget to one within it, or of the least memory on the way: what the answer says is enough.

    It is left as soon as there is a plan from elsewhere.
    """
    problem = incumbent.problem

    def stopped() -> bool:
        return incumbent.stopped() or incumbent.plan is not None

    found = least_plan(problem.graph, problem.budget_bytes, plan, incumbent.deadline.within(seconds), stopped, seed)
    incumbent.offer_or_suffices(found, "search")
    return found
