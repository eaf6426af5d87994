"""Branches that meet in a head, trained inside a budget: profile the stages, ask, verify, execute."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from remat_ir import (
    Answer,
    Graph,
    InvalidPlan,
    Join,
    JoinPlan,
    Plan,
    Problem,
    Status,
    backward_order,
    branches_of,
    verify,
)

from ..errors import CaptureError, RanksDiffer, RematError
from ..planning.budget import Budget
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner, Planner, plan_or_raise
from .join_profile import ProfiledJoin, agreed_join, join_of
from .joined import JoinedModule
from .rehearsal import StagesRoom

log = logging.getLogger("remat")


def plan_join(
    branches: Iterable[Iterable[nn.Module]],
    head: nn.Module,
    inputs: Sequence[torch.Tensor],
    budget: Budget,
    asked: CoordinatedPlanner,
    asking: SolveOptions,
    optimizer: Any = None,
    ema: Any = None,
) -> JoinedModule:
    """Measure and plan branches that meet in a head; the budget is as `stages_budget` gives it.

    Raises:
        CaptureError, BudgetTooSmall, NothingFound, RanksDiffer: as `optimize_chain`.
    """
    lists = [list(branch) for branch in branches]
    if len(lists) < 2 or not all(lists) or len(lists) != len(inputs):
        raise CaptureError(f"a join is two or more branches of stages, with an input each, not {len(lists)}")
    profiled = agreed_join(join_of(lists, head, inputs), asked.coordinator)
    room = StagesRoom([*(m for b in lists for m in b), head], inputs, budget, asked.coordinator, optimizer, ema)
    order = plain = [j for j in reversed(range(len(lists))) for _ in lists[j]]

    def ask(problem: Problem) -> Answer:
        nonlocal order
        asked.coordinator.same(problem)  # the search depends on it
        order, answer = _best(profiled, plain, problem.budget_bytes, asked, asking)
        return answer

    def carried_out(problem: Problem, answer: Answer) -> JoinedModule:
        problem = Problem(profiled.graph(order), problem.budget_bytes)
        return carry_out_join(lists, head, profiled, order, problem, answer)

    def over(problem: Problem, answer: Answer) -> int:
        return room.over(lambda: room.reserved(carried_out(problem, answer)))

    made = carried_out(*room.settled(room.problem(profiled.graph(plain)), ask, over))
    made.reserved_bytes = room.seen
    return made


def _best(
    profiled: ProfiledJoin, plain: list[int], budget_bytes: int, planner: CoordinatedPlanner, asking: SolveOptions
) -> tuple[list[int], Answer]:
    """An order of the backward steps, by branch, and the best plan that is found in it.

    Raises:
        BudgetTooSmall, NothingFound: there is none.
    """
    joined = _join_plan(profiled, budget_bytes, planner, asking)
    order, answer = (plain, None) if joined is None else joined
    if asking.method != "join":
        found = planner.plan(Problem(profiled.graph(order), budget_bytes), asking)
        if answer is None or (found.cost_ns is not None and found.cost_ns <= (answer.cost_ns or 0)):
            answer = plan_or_raise(found)
    if answer is None:
        answer = plan_or_raise(Answer(Status.NOTHING_FOUND, asking.method, budget_bytes, message="No join plan fits."))
    return order, answer


def carry_out_join(
    branches: Sequence[Sequence[nn.Module]],
    head: nn.Module,
    profiled: ProfiledJoin,
    backward: Sequence[int],
    problem: Problem,
    answer: Answer,
) -> JoinedModule:
    """Branches and a head with an answer's plan, verified.

    Raises:
        InvalidPlan: the plan is not one of this graph, or not what the answer claims.
    """
    if not isinstance(answer.plan, Plan):
        raise InvalidPlan(f"branches need a plan of their graph, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return JoinedModule(branches, head, profiled, backward, answer.plan, answer)


def _join_plan(
    profiled: ProfiledJoin, budget_bytes: int, planner: Planner, asking: SolveOptions
) -> tuple[list[int], Answer] | None:
    """The optimal plan of the homogenized join in as many slots as fit the budget in bytes, and its backward order."""
    lengths = profiled.lengths
    low, high = len(lengths), sum(lengths) + len(lengths) + 1
    best: tuple[list[int], Answer] | None = None
    while low <= high:
        slots = (low + high) // 2
        found = _in_slots(profiled, slots, planner, asking)
        answer = None if found is None else _verified(*found[1:], budget_bytes)
        if found is not None and answer is not None:
            best, low = (found[0], answer), slots + 1
        elif found is None:
            low = slots + 1
        else:
            high = slots - 1
    return best


def _in_slots(
    profiled: ProfiledJoin, slots: int, planner: Planner, asking: SolveOptions
) -> tuple[list[int], Graph, Plan] | None:
    """The join's plan in so many slots as a backward order, the graph in that order and its plan; None if none fits."""
    plain = [j for j in reversed(range(len(profiled.lengths))) for _ in range(profiled.lengths[j])]
    found = branches_of(profiled.graph(plain))
    assert found is not None, "the graph of branches is one"
    join: Join = found.homogenized(slots)
    problem = Problem(join, join.slots * join.slot_bytes)
    try:
        steps = planner.plan(problem, replace(asking, method="join")).plan
    except RanksDiffer:
        raise
    except RematError as error:
        log.debug("no join plan in %d slots: %s", slots, error)
        return None
    if not isinstance(steps, JoinPlan):
        return None
    order = backward_order(steps)
    graph = profiled.graph(order)
    again = branches_of(graph)
    assert again is not None
    return order, graph, again.plan(steps)


def _verified(graph: Graph, plan: Plan, budget_bytes: int) -> Answer | None:
    """The plan as an answer, or None where it is over the budget."""
    message = "The optimal plan of the join of equal steps, in as many slots as fit in bytes."
    try:
        return Answer.of_plan(Problem(graph, budget_bytes), plan, method="join", message=message)
    except InvalidPlan:
        return None
