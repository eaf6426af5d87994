"""Every schedule that the offload-and-recompute program may choose (POFO supplement, Appendix B), one by one."""

from __future__ import annotations

from collections.abc import Iterator

from remat_ir import Chain, ChainPlan, ChainStep, Verb
from remat_solver.offload.table import Schedule
from remat_solver.placement import moved_plan, place, saved, stored

Steps = tuple[ChainStep, ...]


def tensor_plan(chain: Chain, budget_bytes: int, schedule: Schedule) -> ChainPlan:
    """The plan of a schedule that fits the budget tensor by tensor; `InvalidPlan` where a step does not fit."""
    steps, table = stored(chain, (*schedule.forward, *schedule.backward))
    moved = [gap for gap in saved(table) if steps[gap.value].stage in schedule.moved]
    return moved_plan(steps, place(table, budget_bytes, moved).plan)


def tails(i: int, j: int) -> Iterator[Steps]:
    """Every persistent way to process stages i … j in the backward phase, from what is saved at i − 1."""
    if i == j:
        yield (ChainStep(Verb.F_ALL, i), ChainStep(Verb.B, i))
        return
    for inner in tails(i + 1, j):
        yield (ChainStep(Verb.F_ALL, i), *inner, ChainStep(Verb.B, i))
    for k in range(i, j):
        start = (ChainStep(Verb.F_CK, i), *(ChainStep(Verb.F_NONE, stage) for stage in range(i + 1, k + 1)))
        for inner in tails(k + 1, j):
            for rest in tails(i, k):
                yield (*start, *inner, *rest)


def schedules(chain: Chain, i: int = 1) -> Iterator[tuple[Steps, Steps, frozenset[int]]]:
    """Every forward phase from stage i on, its backward phase, and the inputs that it moves."""
    count = chain.stages
    moves = (frozenset[int](), frozenset((i - 1,))) if i - 1 in chain.movable else (frozenset[int](),)
    if i == count:
        yield (ChainStep(Verb.F_ALL, i),), (ChainStep(Verb.B, i),), frozenset()
        return
    for forward, backward, moved in schedules(chain, i + 1):
        for more in moves:
            yield (ChainStep(Verb.F_ALL, i), *forward), (*backward, ChainStep(Verb.B, i)), moved | more
    for j in range(i, count):
        start = (ChainStep(Verb.F_CK, i), *(ChainStep(Verb.F_NONE, stage) for stage in range(i + 1, j + 1)))
        for forward, backward, moved in schedules(chain, j + 1):
            for tail in tails(i, j):
                for more in moves:
                    yield (*start, *forward), (*backward, *tail), moved | more


def all_schedules(chain: Chain) -> Iterator[Schedule]:
    """Every schedule of a chain."""
    for forward, backward, moved in schedules(chain):
        yield Schedule(forward, backward, moved)
