"""The plan of one size of a step, tried on another: the same ops or stages in the same order, other bytes and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from remat_ir import Answer, Chain, Graph, InvalidPlan, Problem, Subject

MOST_TRIED = 8
"""Of the plans that a module has, the latest."""

Known: TypeAlias = tuple[Subject, Answer]
"""A graph or chain that was planned, and the answer that it has."""


def same_structure(one: Subject, other: Subject) -> bool:
    """Whether two subjects have the same ops and values, whatever they cost and weigh: a plan of one is one of both."""
    return _structure(one) == _structure(other)


def plan_of_another_size(problem: Problem, known: Sequence[Known]) -> Answer | None:
    """The cheapest known plan of the same structure that the verifier passes on this problem, as an answer to it.

    Args:
        known: the latest last.
    """
    best: Answer | None = None
    for subject, answer in list(reversed(known))[:MOST_TRIED]:
        if answer.plan is None or not same_structure(problem.subject, subject):
            continue
        try:
            found = Answer.of_plan(
                problem,
                answer.plan,
                method=answer.method,
                cache="near",
                message="The plan of another size of this step, verified on this one.",
            )
        except InvalidPlan:  # over the budget at this size
            continue
        if best is None or (found.cost_ns or 0) < (best.cost_ns or 0):
            best = found
    return best


def _structure(subject: Subject) -> tuple[object, ...]:
    if isinstance(subject, Chain):
        return ("chain", subject.stages, subject.link_bytes_per_s is None)
    if not isinstance(subject, Graph):
        return (subject,)
    sets = (subject.optional, subject.once, subject.keep, subject.consumes)
    return (subject.op_inputs, subject.value_op, *sets, subject.backward_from)
