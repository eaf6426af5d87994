"""From a schedule to a plan: each copy gets its place, whole tensors count until their copy has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection

from remat_ir import Chain, ChainPlan, InvalidPlan, Problem, Verb

from ..deadline import look, never
from ..placement import INPUT, Gap, moved_plan, place, placed, pruned, stored_graph, timetable
from .schedule import Schedule


class _Stored:
    """The steps of a schedule, each of which stores a value; what is moved is away between the phases."""

    def __init__(self, chain: Chain, schedule: Schedule) -> None:
        forward = (*((INPUT,) if chain.input_may_leave else ()), *schedule.forward)
        self.border = len(forward)
        self.steps = (*forward, *schedule.backward)
        self.table = timetable(stored_graph(chain, self.steps), range(len(self.steps)))

    def gaps(self, moved: Collection[int]) -> list[Gap]:
        """The gap of each cut that moves: from the last forward step that reads it to the first backward one."""
        return [
            gap
            for gap in self.table.gaps
            if gap.last < self.border <= gap.next and self.steps[gap.value].stage in moved
        ]


def tensor_plan(chain: Chain, budget_bytes: int, schedule: Schedule) -> ChainPlan:
    """The plan that fits the budget tensor by tensor, with as little idle time as one pass finds.

    Raises:
        InvalidPlan: a step does not fit even with everything that is moved on the host.
    """
    stored = _Stored(chain, schedule)
    return moved_plan(stored.steps, place(stored.table, budget_bytes, stored.gaps(schedule.moved)).plan)


def repaired_plan(problem: Problem, schedule: Schedule, stop: Callable[[], bool] = never) -> ChainPlan:
    """The plan of a schedule, or of one that moves other values and fits the budget and the host's limit.

    Sizes that were rounded to the nearest slot may promise too much. Values that stay are moved too, the largest first,
    until the plan fits; then those are kept after all whose move turns out to be no gain, until `stop` says so.

    Raises:
        InvalidPlan: it does not fit even with everything moved that can be.
        TimeUp: `stop` said so before there was a plan that fits.
    """
    chain = problem.subject
    assert isinstance(chain, Chain)
    taped = {step.stage for step in schedule.forward if step.verb is Verb.F_ALL}

    def size(cut: int) -> int:
        return chain.tape_bytes[cut - 1] if cut in taped else chain.activation_bytes[cut]

    saved = {step.stage - 1 for step in schedule.forward if step.verb is not Verb.F_NONE}
    staying = sorted(saved.intersection(chain.movable) - schedule.moved, key=lambda cut: (-size(cut), cut))
    stored = _Stored(chain, schedule)
    for more in range(len(staying) + 1):
        if more:
            look(stop)
        moved = stored.gaps(schedule.moved | frozenset(staying[:more]))
        found = placed(problem, stored.table, moved)
        if found is not None:
            better, _ = pruned(problem, stored.table, moved, found, stop)
            return moved_plan(stored.steps, better.plan)
    raise InvalidPlan("it does not fit even with everything moved that can be")
