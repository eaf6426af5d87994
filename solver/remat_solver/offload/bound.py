"""A lower bound on the makespan of every plan of a chain with a link, transfers and recomputations of any kind.

When B^l starts, each earlier stage either has its tape somewhere, on the device or on the host, or is computed again
afterwards. What is on the host has been carried out before, and is carried back after. Fractions of a tape are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from remat_ir import Chain

from ..deadline import never


def makespan_bound(chain: Chain, budget_bytes: int, stop: Callable[[], bool] = never) -> int:
    """The largest bound in ns of any backward step of the chain; where `stop` says so, of those looked at so far."""
    stages = chain.stages
    step = max(1, stages // 60)
    bound = chain.total_cost_ns
    for stage in range(stages, 0, -step):
        if stop():
            break
        bound = max(bound, _at_backward(chain, budget_bytes, stage))
    return bound


def _at_backward(chain: Chain, budget_bytes: int, stage: int) -> int:
    """The bound by what must be in memory when the backward step of a stage starts.

    X bytes on the host take X / β out before, while all forward steps and the later backward steps run, and X / β back
    after, while the other backward steps and the recomputations run. The sum of the two is convex in X, and linear
    between the points at which another tape begins to be held or one of the transfers begins to be what takes longer.
    """
    assert chain.link_bytes_per_s is not None
    seconds = Fraction(1_000_000_000, chain.link_bytes_per_s)  # ns per byte
    held = chain.tape_bytes[stage - 1] + chain.gradient_bytes[stage] + chain.gradient_bytes[stage - 1]
    room = budget_bytes - chain.fixed_bytes - held - chain.backward_workspace_bytes[stage - 1]
    before = sum(chain.forward_ns) + sum(chain.backward_ns[stage:])
    after = sum(chain.backward_ns[:stage])
    # what saves most time a byte is held first
    order = sorted(
        zip(chain.tape_bytes[: stage - 1], chain.forward_ns[: stage - 1], strict=True),
        key=lambda tape: (Fraction(tape[1], tape[0]) if tape[0] else math.inf, tape[1]),
        reverse=True,
    )
    again = sum(time for _, time in order)
    best: Fraction | None = None
    capacity, known = Fraction(0), Fraction(again)
    for size, time in [(0, 0), *order]:
        rate = Fraction(time, size) if size else Fraction(0)
        start, again_start = capacity, known
        capacity, known = capacity + size, known - time
        # within this tape: held = start + y, recomputed = again_start − rate·y, on the host X = held − room
        points = [Fraction(0), Fraction(size)]
        points += [room - start, Fraction(before) / seconds + room - start]
        if seconds + rate:
            points.append((after + again_start - seconds * (start - room)) / (seconds + rate))
        for y in points:
            if 0 <= y <= size:
                carried = max(Fraction(0), start + y - room) * seconds
                left = after + (again_start - rate * y if size else known)
                total = max(Fraction(before), carried) + max(left, carried)
                best = total if best is None else min(best, total)
    assert best is not None
    return math.ceil(best)
