"""Branch and bound on the stage programs: the paper's, the tight one, and forward recomputation only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from remat_ir import Plan, duration, readable
from remat_ir.read import LARGEST_INTEGER
from remat_ir.restrictions import FORWARD_OPS, ONE_PER_STAGE, contains, described, recomputations_per_stage

from ..array_view import ArrayView, view_of
from ..backends import Engine, Improvement, Outcome, check_engine, free_memory
from ..deadline import TimeUp, never
from ..formulate import (
    SECONDS_PER_ENTRY,
    Formulation,
    Reductions,
    checkmate,
    engine_bytes,
    entries,
    forward,
    tight,
)
from ..formulate.tight import collapsed_stages
from ..incumbent import Incumbent
from .fallback import Spare, cost_of

_MOST_TIGHTENINGS = 6


@dataclass(frozen=True)
class MilpOptions:
    """How to solve the paper's program.

    Attributes:
        engine: "highs" or "cbc".
        recomputations: how often an op may be recomputed in a stage (Checkmate, Section 4.10), 1 to 8.
        threads: of the engine, 1 to 64.
        seed: of the engine.
        memory_bytes: what the engine may use; 0 means half of what is free, but at least 1 GiB.
    """

    engine: str = "highs"
    recomputations: int = 1
    threads: int = 1
    seed: int = 0
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        check_engine(self.engine)
        for name, least, most in (
            ("recomputations", 1, 8),
            ("threads", 1, 64),
            ("seed", 0, 2**31 - 2),
            ("memory_bytes", 0, 2**53),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, not {value!r}")


@dataclass(frozen=True)
class TightOptions(MilpOptions):
    """How to solve the tight program: the paper's options, and a switch for each of `Reductions`."""

    collapse: bool = Reductions.collapse
    reach: bool = Reductions.reach
    exclusive: bool = Reductions.exclusive
    pinned: bool = Reductions.pinned
    frontier: bool = Reductions.frontier

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")

    @property
    def reductions(self) -> Reductions:
        """The switches."""
        return Reductions(**{name: getattr(self, name) for name in _SWITCHES})


_SWITCHES = tuple(field.name for field in dataclasses.fields(Reductions))


def formulation_of(method: str, view: ArrayView, options: MilpOptions, stop: Callable[[], bool] = never) -> Formulation:
    """The program that a method solves: "milp", "milp-tight" or "milp-forward". `TimeUp` is raised by `stop`."""
    if isinstance(options, TightOptions):
        if method == "milp-forward":
            return forward(view, reductions=options.reductions, stop=stop)
        return tight(view, sweeps=options.recomputations, reductions=options.reductions, stop=stop)
    return checkmate(view, options.recomputations, stop=stop)


def program_entries(view: ArrayView, options: MilpOptions) -> int:
    """An estimate of the coefficients of the program of a method with these options."""
    if isinstance(options, TightOptions):
        first = collapsed_stages(view) if options.collapse else 0
        return entries(view, sweeps=options.recomputations, first=first)
    return entries(view, sweeps=options.recomputations, pairs=True)


def has_room(incumbent: Incumbent, coefficients: int, memory_bytes: int) -> bool:
    """Whether memory and the time left hold a program of so many coefficients; else the answer will say why not."""
    need_bytes, allowed = engine_bytes(coefficients), memory_bytes or free_memory()
    if need_bytes > allowed:
        incumbent.stop_for("memory")
        incumbent.reason = (
            f"The program would need about {readable(need_bytes)} of memory, more than the {readable(allowed)} for it."
        )
        return False
    need_s = coefficients * SECONDS_PER_ENTRY
    if need_s > incumbent.deadline.remaining():
        incumbent.stop_for("time")
        incumbent.reason = f"Writing the program would take about {need_s:.1f} s, more than was left."
        return False
    return True


def run_milp(incumbent: Incumbent, options: MilpOptions, spare: Spare | None = None) -> None:
    """Checkmate's program as in the paper, equations 1 to 8: its own optimum, bound or want of a plan."""
    _solve(incumbent, options, spare, "milp", (recomputations_per_stage(options.recomputations),))


def run_tight(incumbent: Incumbent, options: TightOptions, spare: Spare | None = None) -> None:
    """The same space with disaggregated rows and exact reductions."""
    _solve(incumbent, options, spare, "milp-tight", (recomputations_per_stage(options.recomputations),))


def run_forward(incumbent: Incumbent, options: TightOptions, spare: Spare | None = None) -> None:
    """The tight program where only forward ops are recomputed, and only in backward stages: a restriction."""
    within = (FORWARD_OPS, ONE_PER_STAGE)
    if incumbent.problem.graph.backward_from is None:
        incumbent.ends_without_plan("The graph does not say where its backward pass begins.", within)
        return
    if options.recomputations != 1:
        incumbent.ends_without_plan("milp-forward recomputes an op once per stage; use milp-tight for more.", within)
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
    start = starting_plan(incumbent, spare)
    if not has_room(incumbent, program_entries(view, options), options.memory_bytes):
        return
    with Engine(options.engine, memory_bytes=options.memory_bytes) as engine:
        budget = problem.budget_bytes
        for attempt in range(_MOST_TIGHTENINGS):
            try:
                formulation = formulation_of(source, view.within(budget), options, incumbent.stopped)
                first = None if start is None else formulation.start(start.computes, incumbent.stopped)
            except TimeUp:
                return
            listener = _Listener(incumbent, formulation, source, within, proves=attempt == 0)
            outcome = engine.run(
                formulation.program,
                deadline=incumbent.deadline,
                start=first,
                on_improvement=listener,
                stopped=incumbent.stopped,
                relative_gap=incumbent.max_gap,
                threads=options.threads,
                seed=options.seed,
            )
            if outcome.x is not None or outcome.bound > -float("inf"):
                listener.note(outcome.x, outcome.bound)
            if outcome.status != "optimal" or not listener.excess or incumbent.stopped():
                break
            # the optimum lies over the budget by a tolerance: ask for that much less
            budget -= listener.excess * 2**attempt
    _conclude(incumbent, outcome, within, spare, tightened=attempt > 0)


def starting_plan(incumbent: Incumbent, spare: Spare | None) -> Plan | None:
    """The incumbent's plan for an engine to start from, or the spare one where there is none."""
    if isinstance(incumbent.plan, Plan):
        return incumbent.plan
    return None if spare is None else spare.plan


class _Listener:
    """Takes an engine's news to the incumbent; `excess` is how many bytes its last plan was over the budget."""

    def __init__(
        self, incumbent: Incumbent, formulation: Formulation, source: str, within: tuple[str, ...], proves: bool
    ) -> None:
        self._incumbent = incumbent
        self._formulation = formulation
        self._source = source
        self._within = within
        self._proves = proves
        self.excess = 0

    def __call__(self, news: Improvement) -> None:
        self.note(news.x, news.bound)

    def note(self, x: object, bound: float) -> None:
        """A solution within the engine's tolerances, or None, and a bound."""
        if x is not None:
            self.excess = self._offer(self._formulation.plan(x))  # type: ignore[arg-type]
        if self._proves:
            proved = self._formulation.bound_ns(bound)
            if proved > self._incumbent.problem.graph.total_cost_ns:
                self._incumbent.raise_bound(proved, self._source, self._within)

    def _offer(self, plan: Plan) -> int:
        budget, peak = self._incumbent.problem.budget_bytes, self._incumbent.offer_or_suffices(plan, self._source)
        return peak - budget if budget < peak < LARGEST_INTEGER else 0


def _conclude(
    incumbent: Incumbent, outcome: Outcome, within: tuple[str, ...], spare: Spare | None, tightened: bool
) -> None:
    if outcome.status == "infeasible" and not tightened and not _holds_plan(incumbent, within):
        reason = (
            f"The engine finds no {described(within)} that fits the budget; in floating point that proves nothing, and "
            "other plans may fit."
        )
        incumbent.ends_without_plan(reason, within)
        if incumbent.plan is not None:
            incumbent.note(reason)
        elif spare is not None:
            incumbent.note(f"The method {spare.source} has one, of {duration(cost_of(incumbent, spare.plan))}.")
    else:
        end_of_engine(incumbent, outcome)


def _holds_plan(incumbent: Incumbent, within: tuple[str, ...]) -> bool:
    """Whether the plan that is known lies in a space, which is then not empty, whatever an engine says."""
    return incumbent.plan is not None and contains(incumbent.problem.subject, incumbent.plan, within)


def end_of_engine(incumbent: Incumbent, outcome: Outcome) -> None:
    """Record what ended a solve by an engine, other than a result."""
    if outcome.status == "failed":
        if outcome.out_of_memory:
            incumbent.stop_for("memory")
        incumbent.reason = f"The engine broke: {outcome.message}."
    elif outcome.status not in ("optimal", "infeasible") and not incumbent.stopped():
        incumbent.stop_for("time")  # an engine is stopped a little ahead of the deadline
