"""Sequential: equal segments of which only the inputs are kept, as `checkpoint_sequential` does it (RR-9302, 5.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat_ir import Chain, ChainPlan, ChainStep, Problem, Verb, plain_peak, readable, verify

from ..incumbent import Incumbent


@dataclass(frozen=True)
class SequentialOptions:
    """`segments`: how many; None tries every number from 2 to 2√L and offers each plan that fits."""

    segments: int | None = None

    def __post_init__(self) -> None:
        if self.segments is not None and (type(self.segments) is not int or self.segments < 1):
            raise ValueError(f"segments must be a positive integer, not {self.segments!r}")


def sequential(incumbent: Incumbent, options: SequentialOptions) -> None:
    """Offer the periodic plans that fit: a baseline.

    In the forward phase each segment but the last keeps its input only; each is run again with its tapes when its
    backward steps come.
    """
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    most = max(2, math.floor(2 * math.sqrt(chain.stages)))
    counts = range(2, most + 1) if options.segments is None else (options.segments,)
    roomy = Problem(chain, 2**53)
    least = plain_peak(chain)
    for segments in counts:
        plan = segmented_plan(chain, min(segments, chain.stages))
        peak = verify(roomy, plan).peak_bytes
        least = min(least, peak)
        incumbent.suffices(peak)
        if peak <= incumbent.problem.budget_bytes:
            incumbent.offer(plan, f"sequential, {segments} segments")
    if incumbent.cost_ns is None:
        incumbent.ends_without_plan(f"No number of segments fits; the least peak is {readable(least)}.")


def segmented_plan(chain: Chain, segments: int) -> ChainPlan:
    """The plan with so many segments of L // segments stages each, the last one taking the rest."""
    size = chain.stages // segments
    starts = [1 + i * size for i in range(segments)]
    ends = [*(start - 1 for start in starts[1:]), chain.stages]
    steps: list[ChainStep] = []
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        steps.append(ChainStep(Verb.F_CK, start))
        steps += (ChainStep(Verb.F_NONE, stage) for stage in range(start + 1, end + 1))
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        steps += (ChainStep(Verb.F_ALL, stage) for stage in range(start, end + 1))
        steps += (ChainStep(Verb.B, stage) for stage in range(end, start - 1, -1))
    return ChainPlan(tuple(steps))
