"""Making a schedule fit tensor by tensor: more is moved where it does not fit, less where that is no loss."""

from __future__ import annotations

from dataclasses import replace

from remat_ir import Chain, ChainPlan, InvalidPlan, Problem, Verb, verify

from .schedule import Schedule
from .tensors import tensor_plan


def repaired_plan(problem: Problem, schedule: Schedule) -> ChainPlan:
    """The plan of a schedule, or of one that moves other values and fits the budget and the host's limit.

    Sizes that were rounded to the nearest slot may promise too much. Values that stay are moved too, the largest first,
    until the plan fits; then those are kept after all whose move turns out to be no gain.

    Raises:
        InvalidPlan: it does not fit even with everything moved that can be.
    """
    chain = problem.subject
    assert isinstance(chain, Chain)
    taped = {step.stage for step in schedule.forward if step.verb is Verb.F_ALL}

    def size(cut: int) -> int:
        return chain.tape_bytes[cut - 1] if cut in taped else chain.activation_bytes[cut]

    saved = {step.stage - 1 for step in schedule.forward if step.verb is not Verb.F_NONE}
    staying = sorted(saved.intersection(chain.movable) - schedule.moved, key=lambda cut: (-size(cut), cut))
    found = None
    for more in range(len(staying) + 1):
        wider = replace(schedule, moved=schedule.moved | frozenset(staying[:more]))
        try:
            found = wider, _judged(problem, wider)
            break
        except InvalidPlan:
            if more == len(staying):
                raise
    assert found is not None
    wider, (cost, plan) = found
    for cut in sorted(wider.moved, key=lambda cut: (-size(cut), cut)):
        less = replace(wider, moved=wider.moved - {cut})
        try:
            fewer = _judged(problem, less)
        except InvalidPlan:
            continue
        if fewer[0] <= cost:
            wider, (cost, plan) = less, fewer
    return plan


def _judged(problem: Problem, schedule: Schedule) -> tuple[int, ChainPlan]:
    chain = problem.subject
    assert isinstance(chain, Chain)
    plan = tensor_plan(chain, problem.budget_bytes, schedule)
    return verify(problem, plan).cost_ns, plan
