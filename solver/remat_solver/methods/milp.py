"""Branch and bound on the stage programs: the paper's, the tight one, and forward recomputation only.

For small graphs there is also the program that chooses the op order too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remat_ir import InvalidPlan, Plan, duration, readable, verify
from remat_ir.read import LARGEST_INTEGER
from remat_ir.restrictions import FORWARD_OPS, ONE_PER_STAGE, contains, described, recomputations_per_stage

from ..array_view import ArrayView, view_of
from ..backends.engine import ENGINES, Engine, free_memory
from ..backends.outcome import Outcome
from ..deadline import TimeUp, never
from ..formulate.checkmate import checkmate
from ..formulate.formulation import SECONDS_PER_ENTRY, Formulation, engine_bytes, entries
from ..formulate.tight import any_order, collapsed_stages, forward, reordered, tight
from ..incumbent import Incumbent
from ..options import Options, whole, word
from ..program import Floats
from .structured import Spare

_MOST_TIGHTENINGS = 6


@dataclass(frozen=True)
class MilpOptions(Options):
    """How to solve the paper's program, or the tight one.

    Attributes:
        engine: "highs" or "cbc".
        recomputations: how often an op may be recomputed in a stage (Checkmate, Section 4.10), 1 to 8.
        threads: of the engine, 1 to 64.
        seed: of the engine.
        memory_bytes: what the engine may use; 0 means half of what is free, but at least 1 GiB.
    """

    engine: str = word("highs", ENGINES)
    recomputations: int = whole(1, 1, 8)
    threads: int = whole(1, 1, 64)
    seed: int = whole(0, 0, 2**31 - 2)
    memory_bytes: int = whole(0)


@dataclass(frozen=True)
class OrderOptions(MilpOptions):
    """As for the paper's program; the stages of each op are one.

    Attributes:
        most_ops: larger graphs are refused: the program has a symmetry that engines do not see through.
    """

    most_ops: int = whole(40, 1, 1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recomputations != 1:
            raise ValueError("recomputations must be 1: an op may run in any stage, once in each")


def formulation_of(method: str, view: ArrayView, options: MilpOptions, stop: Callable[[], bool] = never) -> Formulation:
    """The program that a method solves: "milp", "milp-tight" or "milp-forward". `TimeUp` is raised by `stop`."""
    if method == "milp-forward":
        return forward(view, stop=stop)
    return (checkmate if method == "milp" else tight)(view, options.recomputations, stop=stop)


def program_entries(method: str, view: ArrayView, sweeps: int = 1) -> int:
    """An estimate of the coefficients of the program of a method with so many recomputations in a stage."""
    if method == "milp":
        return entries(view, sweeps=sweeps, pairs=True)
    return entries(view, sweeps=sweeps, first=collapsed_stages(view))


def has_room(incumbent: Incumbent, coefficients: int, memory_bytes: int) -> bool:
    """Whether memory and the time left hold a program of so many coefficients; else the answer will say why not."""
    need_bytes, allowed = engine_bytes(coefficients), memory_bytes or free_memory()
    if need_bytes > allowed:
        incumbent.stop_for("memory")
        incumbent.because(
            f"The program would need about {readable(need_bytes)} of memory, more than the {readable(allowed)} for it."
        )
        return False
    need_s = coefficients * SECONDS_PER_ENTRY
    if need_s > incumbent.deadline.remaining():
        incumbent.stop_for("time")
        incumbent.because(f"Writing the program would take about {need_s:.1f} s, more than was left.")
        return False
    return True


def run_milp(incumbent: Incumbent, options: MilpOptions, spare: Spare | None = None, *, source: str = "milp") -> None:
    """Checkmate's program as in the paper, equations 1 to 8: its own optimum, bound or want of a plan.

    As `source` "milp-tight", the same space with disaggregated rows and exact reductions.
    """
    _solve(incumbent, options, spare, source, (recomputations_per_stage(options.recomputations),))


ONCE_A_STAGE = "milp-forward recomputes an op once per stage; use milp-tight for more"


def run_forward(incumbent: Incumbent, options: MilpOptions, spare: Spare | None = None) -> None:
    """The tight program where only forward ops are recomputed, and only in backward stages: a restriction."""
    within = (FORWARD_OPS, ONE_PER_STAGE)
    if incumbent.problem.graph.backward_from is None:
        incumbent.ends_without_plan("The graph does not say where its backward pass begins.", within)
        return
    if options.recomputations != 1:
        incumbent.ends_without_plan(f"{ONCE_A_STAGE}.", within)
        return
    _solve(incumbent, options, spare, "milp-forward", within)


def _solve(
    incumbent: Incumbent, options: MilpOptions, spare: Spare | None, source: str, within: tuple[str, ...]
) -> None:
    """Solve a stage program; where its optimum misses the budget by an engine's tolerance, with a little less budget.

    Bounds come from the first program only: those of a smaller budget are none of this problem. The engine starts from
    the plan that is known, or else from the spare one, where the program's space holds it; no other plan is offered.
    """
    problem = incumbent.problem
    view = view_of(problem)
    start = _starting_plan(incumbent, spare)
    if not has_room(incumbent, program_entries(source, view, options.recomputations), options.memory_bytes):
        return
    with Engine(options.engine, memory_bytes=options.memory_bytes) as engine:
        budget = problem.budget_bytes
        for attempt in range(_MOST_TIGHTENINGS):
            try:
                formulation = formulation_of(source, view.within(budget), options, incumbent.stopped)
                listener = _Listener(incumbent, formulation, source, within, proves=attempt == 0)
                outcome = _run(engine, listener, options, start)
            except TimeUp:
                return
            if outcome.status != "optimal" or not listener.excess or incumbent.stopped():
                break
            # the optimum lies over the budget by a tolerance: ask for that much less
            budget -= listener.excess * 2**attempt
    _conclude(incumbent, outcome, within, spare, tightened=attempt > 0)


def run_order(incumbent: Incumbent, options: OrderOptions, spare: Spare | None = None) -> None:
    """Find the best op order and plan together; what is proved holds for the graph's own order too.

    A plan in the graph's own order is offered. A cheaper one in another order is replayed by the verifier as a plan of
    the ops in that order, and only told: the graph's order is a promise to the training step, and no plan breaks it.
    """
    problem = incumbent.problem
    graph = problem.graph
    if graph.ops > options.most_ops:
        incumbent.because(
            f"milp-order takes graphs of up to {options.most_ops} ops (option most_ops), not {graph.ops}."
        )
        return
    # every op may run in every stage: twice the triangle
    if not has_room(incumbent, 2 * entries(view_of(problem)), options.memory_bytes):
        return
    try:
        formulation = any_order(problem, incumbent.stopped)
        # the fixed order is one of the orders, so what no order beats, it does not beat
        listener = _OrderListener(incumbent, formulation, "milp-order", (ONE_PER_STAGE,))
        with Engine(options.engine, memory_bytes=options.memory_bytes) as engine:
            outcome = _run(engine, listener, options, _starting_plan(incumbent, spare))
    except TimeUp:
        return
    if outcome.status == "infeasible" and incumbent.cost_ns is None:
        incumbent.ends_without_plan(
            "The engine finds no op order with a plan that fits the budget; in floating point that proves nothing.",
            (ONE_PER_STAGE,),
        )
    else:
        end_of_engine(incumbent, outcome)
    listener.tell()


def _starting_plan(incumbent: Incumbent, spare: Spare | None) -> Plan | None:
    """The incumbent's plan for an engine to start from, or the spare one where there is none."""
    if isinstance(incumbent.plan, Plan):
        return incumbent.plan
    return None if spare is None else spare.plan


def _run(engine: Engine, listener: _Listener, options: MilpOptions, start: Plan | None) -> Outcome:
    """Solve the listener's program, which hears of all that is found.

    Raises:
        TimeUp: no time was left to write the start.
    """
    incumbent, formulation = listener.incumbent, listener.formulation
    outcome = engine.run(
        formulation.program,
        deadline=incumbent.deadline,
        start=None if start is None else formulation.start(start.computes, incumbent.stopped),
        on_improvement=listener.note,
        stopped=incumbent.stopped,
        relative_gap=incumbent.max_gap,
        threads=options.threads,
        seed=options.seed,
    )
    listener.note(outcome.x, outcome.bound)
    return outcome


class _Listener:
    """Takes an engine's news to the incumbent; `excess` is how many bytes its last plan was over the budget."""

    def __init__(
        self, incumbent: Incumbent, formulation: Formulation, source: str, within: tuple[str, ...], proves: bool = True
    ) -> None:
        self.incumbent = incumbent
        self.formulation = formulation
        self._source = source
        self._within = within
        self._proves = proves
        self.excess = 0

    def note(self, x: Floats | None, bound: float) -> None:
        """A solution within the engine's tolerances, or None, and a bound."""
        if x is not None:
            self._offer(x)
        if self._proves:
            proved = self.formulation.bound_ns(bound)
            if proved > self.incumbent.problem.graph.total_cost_ns:
                self.incumbent.raise_bound(proved, self._source, self._within)

    def _offer(self, x: Floats) -> None:
        budget = self.incumbent.problem.budget_bytes
        peak = self.incumbent.offer_or_suffices(self.formulation.plan(x), self._source)
        self.excess = peak - budget if budget < peak < LARGEST_INTEGER else 0


class _OrderListener(_Listener):
    """Offers the plans in the graph's order, and remembers the best of another."""

    _best: tuple[int, tuple[int, ...]] | None = None

    def _offer(self, x: Floats) -> None:
        problem, plan, order = reordered(self.incumbent.problem, self.formulation.sequence(x))
        try:
            cost_ns = verify(problem, plan).cost_ns
        except InvalidPlan:  # over the budget by the engine's tolerance
            return
        if order == tuple(range(len(order))):
            self.incumbent.offer(plan, self._source)
        elif self._best is None or cost_ns < self._best[0]:
            self._best = (cost_ns, order)

    def tell(self) -> None:
        """Say what another order would cost, if that is less."""
        cost = self.incumbent.cost_ns
        if self._best is not None and (cost is None or self._best[0] < cost):
            self.incumbent.note(
                f"In the op order {', '.join(map(str, self._best[1]))} there is a plan of {duration(self._best[0])}; "
                "it is not executed, because the graph's own order is kept."
            )


def _conclude(
    incumbent: Incumbent, outcome: Outcome, within: tuple[str, ...], spare: Spare | None, tightened: bool
) -> None:
    plan = incumbent.plan
    # a space that holds the plan that is known is not empty, whatever an engine says
    holds_plan = plan is not None and contains(incumbent.problem.subject, plan, within)
    if outcome.status == "infeasible" and not tightened and not holds_plan:
        reason = (
            f"The engine finds no {described(within)} that fits the budget; in floating point that proves nothing, and "
            "other plans may fit."
        )
        incumbent.ends_without_plan(reason, within)
        if plan is not None:
            incumbent.note(reason)
        elif spare is not None:
            cost = verify(incumbent.problem, spare.plan).cost_ns
            incumbent.note(f"The method {spare.source} has one, of {duration(cost)}.")
    else:
        end_of_engine(incumbent, outcome)


def end_of_engine(incumbent: Incumbent, outcome: Outcome) -> None:
    """Record what ended a solve by an engine, other than a result."""
    if outcome.status == "failed":
        if outcome.out_of_memory:
            incumbent.stop_for("memory")
        incumbent.because(f"The engine broke: {outcome.message}.")
    elif outcome.status not in ("optimal", "infeasible") and not incumbent.stopped():
        incumbent.stop_for("time")  # an engine is stopped a little ahead of the deadline
