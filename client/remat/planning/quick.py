"""A plan to start on at once, while a better one is looked for next to the training."""

from __future__ import annotations

from dataclasses import replace

from remat_ir import Answer, Problem, Status

from .greedy import greedy_answer
from .options import SolveOptions
from .planner import Planner

GREEDY_S = 2.0
"""Seconds for the greedy walks; the first one is ended whatever it takes."""

FIRST_S, FACTOR = 1.0, 4.0
"""Seconds of the first solve where no greedy walk fits, and how much longer each further one is."""


def quick_answer(problem: Problem, planner: Planner, options: SolveOptions) -> Answer:
    """The client's greedy plan; where none fits, the plan of the shortest solve that has one.

    The solves grow up to the time limit, so that all of them take at most a third longer than the last. What the last
    one says where there is no plan is returned.

    Raises:
        RematError: as `planner`.
    """
    answer = greedy_answer(problem, time_limit_s=GREEDY_S, max_gap=options.max_gap, look_s=GREEDY_S)
    seconds = 0.0
    while answer.plan is None and seconds < options.time_limit_s:
        seconds = min(options.time_limit_s, max(FIRST_S, FACTOR * seconds))
        answer = planner.plan(problem, replace(options, time_limit_s=seconds))
        if answer.status is Status.INFEASIBLE:
            break
    return answer
