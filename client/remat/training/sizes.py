"""The plan of one size of a training step, tried on another: the same ops in the same order, other bytes and times."""

from __future__ import annotations

from collections.abc import Sequence

from remat_ir import Answer, Graph, InvalidPlan, Plan, Problem

from .planned import Planned

MOST_TRIED = 8
"""Of the plans that a module has, the latest."""


def same_structure(one: Graph, other: Graph) -> bool:
    """Whether two graphs have the same ops and values, whatever they cost and weigh: a plan of one is one of both."""
    return _structure(one) == _structure(other)


def plan_of_another_size(problem: Problem, known: Sequence[Planned]) -> Answer | None:
    """The cheapest plan of a graph of the same structure that the verifier passes on this problem, as an answer to it.

    Args:
        known: plans of other kinds of calls, the latest last.
    """
    graph = problem.graph
    best: Answer | None = None
    for planned in list(reversed(known))[:MOST_TRIED]:
        plan = planned.answer.plan
        if not isinstance(plan, Plan) or not same_structure(graph, planned.step.graph):
            continue
        try:
            found = Answer.of_plan(
                problem,
                plan,
                method=planned.answer.method,
                cache="near",
                message="The plan of another size of this step, verified on this one.",
            )
        except InvalidPlan:  # over the budget at this size
            continue
        if best is None or (found.cost_ns or 0) < (best.cost_ns or 0):
            best = found
    return best


def _structure(graph: Graph) -> tuple[object, ...]:
    sets = (graph.optional, graph.once, graph.keep, graph.consumes)
    return (graph.op_inputs, graph.value_op, *sets, graph.backward_from)
