"""A plan to start on at once, while a better one is looked for next to the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from remat_ir import Answer, Problem, RematError, Status

from .coordinator import Pending
from .greedy import greedy_answer
from .options import SolveOptions
from .planner import CoordinatedPlanner, FallbackPlanner, Planner
from .sizes import Known, plan_of_another_size
from .sources import OnProgress, ServicePlanner

log = logging.getLogger("remat")

Made = TypeVar("Made")

GREEDY_S = 2.0
"""Seconds for the greedy walks; the first one is ended whatever it takes."""

FIRST_S, FACTOR = 1.0, 4.0
"""Seconds of the first solve where no greedy walk fits, and how much longer each further one is."""


def quick_answer(problem: Problem, planner: Planner, options: SolveOptions, known: Sequence[Known] = ()) -> Answer:
    """An answer without waiting for the solver, if there is any way to have one.

    In this order: what the planner remembers on this machine; the plan of another size, verified on this one; the
    client's greedy plan. Where none fits, the first plan that a service finds, or the plan of the shortest local solve
    that has one: these solves grow up to the time limit, so that all of them take at most a third longer than the last.
    What the last one says where there is no plan is returned.

    Args:
        known: what was planned for other sizes, the latest last.

    Raises:
        RematError: as `planner`.
    """
    remembered = planner.remembered(problem, options) if isinstance(planner, FallbackPlanner) else None
    if remembered is not None and remembered.plan is not None:
        return remembered
    other = plan_of_another_size(problem, known)
    if other is not None:
        return other
    greedy = greedy_answer(problem, time_limit_s=GREEDY_S, max_gap=options.max_gap, look_s=GREEDY_S)
    return greedy if greedy.plan is not None else _first_answer(problem, planner, options)


def start_and_improve(
    problem: Problem,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    known: Sequence[Known],
    make: Callable[[Answer], Made | None],
    on_progress: OnProgress | None = None,
) -> tuple[Answer, Pending[Made] | None]:
    """A quick answer for all processes of a job, and what `make` makes of a cheaper one once the planner has it.

    Raises:
        RematError: as `planner`.
    """
    quick = planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, options, known))
    if quick.plan is None or (quick.gap or 0) <= options.max_gap:
        return quick, None
    return quick, improved(problem, planner, options, quick, make, on_progress)


def improved(
    problem: Problem,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    quick: Answer,
    make: Callable[[Answer], Made | None],
    on_progress: OnProgress | None = None,
) -> Pending[Made]:
    """What `make` makes of the planner's answer, asked for while training goes on; None where it costs no less."""
    most = quick.cost_ns or 0

    def ask() -> Answer:
        return planner.asked.plan(problem, options, on_progress=on_progress)

    def better(answer: Answer) -> Made | None:
        return make(answer) if answer.plan is not None and (answer.cost_ns or 0) < most else None

    return planner.coordinator.later(problem, ask, better)


def _first_answer(problem: Problem, planner: Planner, options: SolveOptions) -> Answer:
    """The first answer with a plan, or what says that there is none."""
    first = planner.planners[0] if isinstance(planner, FallbackPlanner) and planner.planners else planner
    if isinstance(first, ServicePlanner):
        try:
            return first.first_plan(problem, options)
        except RematError as error:
            if not isinstance(planner, FallbackPlanner) or planner.strict:
                raise
            log.info("no first plan from the service, the others are asked: %s", error)
    seconds = 0.0
    while True:
        seconds = min(options.time_limit_s, max(FIRST_S, FACTOR * seconds))
        answer = planner.plan(problem, replace(options, time_limit_s=seconds))
        if answer.plan is not None or answer.status is Status.INFEASIBLE or seconds >= options.time_limit_s:
            return answer
