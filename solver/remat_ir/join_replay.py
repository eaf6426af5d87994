"""What a join plan means: its steps run one by one in memory slots that F, B and the turn replace in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .errors import InvalidPlan
from .join import Join, JoinPlan, JoinVerb
from .replay import Moment


def replay_join(join: Join, plan: JoinPlan) -> Iterator[Moment]:
    """Run a join plan step by step, without a limit on slots (RR-9273, Table 3 and Definition 5).

    Memory is the filled slots times `slot_bytes`; at the start every x_0 fills one. Every backward step runs exactly
    once, the turn too, and at the end no x̄ is left but those that stay. `Moment.op` is None throughout.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.
    """
    forward: Counter[tuple[int, int]] = Counter((j, 0) for j in range(len(join.lengths)))
    gradient: dict[int, int] = {}  # branch -> the index of its x̄
    filled, cost, turned = len(join.lengths), 0, False
    for i, (verb, branch, index) in enumerate(plan.steps):
        before = filled
        if verb is not JoinVerb.TURN and not 0 <= branch < len(join.lengths):
            raise InvalidPlan(f"there is no branch {branch}", i)
        if verb is JoinVerb.TURN:
            if turned:
                raise InvalidPlan("the turn runs a second time", i)
            for j, length in enumerate(join.lengths):
                _take(forward, j, length, "the turn", i)
                gradient[j] = length
            turned = True
            cost += join.turn_ns
        elif verb is JoinVerb.F:
            if index >= join.lengths[branch]:
                raise InvalidPlan(f"there is no F {index} on branch {branch}", i)
            _take(forward, branch, index, f"F {index}", i)
            forward[branch, index + 1] += 1
            cost += join.forward_ns
        elif verb is JoinVerb.B:
            if gradient.get(branch) != index + 1:
                raise InvalidPlan(f"B {index} of branch {branch} reads x̄ {index + 1}, which is not in memory", i)
            _take(forward, branch, index, f"B {index}", i)
            gradient[branch] = index
            filled -= 1
            cost += join.backward_ns
        elif verb is JoinVerb.S:
            if not forward[branch, index]:
                raise InvalidPlan(f"S copies x {index} of branch {branch}, which is not in memory", i)
            forward[branch, index] += 1
            filled += 1
        elif verb is JoinVerb.D:
            _take(forward, branch, index, "D", i)
            filled -= 1
        else:
            if gradient.get(branch) != 0:
                raise InvalidPlan(f"D_bar discards x̄ 0 of branch {branch}, which is not in memory", i)
            gradient[branch] = -1
            filled -= 1
        yield Moment(i, None, max(before, filled) * join.slot_bytes, filled * join.slot_bytes, cost)
    if not turned:
        raise InvalidPlan("the turn is never computed")
    _check_end(join, forward, gradient, filled)


def _check_end(join: Join, forward: Counter[tuple[int, int]], gradient: dict[int, int], filled: int) -> None:
    """Nothing is left but the x̄ 0 that stay."""
    for j in range(len(join.lengths)):
        if gradient[j] > 0:
            raise InvalidPlan(f"x̄ 0 of branch {j} is never computed")
        if (gradient[j] == 0) != (j in join.keep):
            how = "is not in memory at the end" if gradient[j] else "is never discarded"
            raise InvalidPlan(f"x̄ 0 of branch {j} {how}")
    if filled > len(join.keep):
        left = min(key for key, copies in forward.items() if copies)
        raise InvalidPlan(f"x {left[1]} of branch {left[0]} is left in memory")


def _take(forward: Counter[tuple[int, int]], branch: int, index: int, who: str, i: int) -> None:
    if not forward[branch, index]:
        raise InvalidPlan(f"{who} reads x {index} of branch {branch}, which is not in memory", i)
    forward[branch, index] -= 1
