"""Which of its plans each stage takes: what each rank can hold, then the least makespan of the whole pipeline, exactly.

Memory ties the stages of one rank together, time those of all ranks. So each rank lists the times that its stages can
have together inside its budget, those alone that no other is at least as quick as, and a search over the ranks with
bounds from the quickest of each finds the least makespan: it never falls when a time rises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..planning.division import Option
from .schedule import Held, Moment, Pass, Timeline, Times

MOST_RUNS = 20_000_000
"""Runs of passes in simulations of the schedule, after which the best choice so far is taken, and its bound is told."""


class Place(NamedTuple):
    """A moment of a rank's step, and the bytes that are there then besides what its stages' plans account for."""

    kind: Pass | None
    stage: int
    held: Held
    rest_bytes: int

    def bytes(self, options: Sequence[Option]) -> int:
        """With these plans of the rank's stages."""
        found = self.rest_bytes + self._running(options[self.stage] if self.kind else None)
        for option, forward, between in zip(options, *self.held, strict=True):
            found += forward * option.held_bytes + between * option.between_bytes
        return found

    def _running(self, option: Option | None) -> int:
        if option is None:
            return 0
        running = {
            "forward": option.forward_bytes,
            "backward": option.backward_bytes,
            "weight": option.weight_bytes,
        }
        return running[self.kind]  # type: ignore[index]


def places_of(moments: Sequence[Moment], peaks: Sequence[int], options: Sequence[Option]) -> list[Place]:
    """The distinct moments of a step that was watched while the stages ran by these plans, with the most seen in each.

    Args:
        peaks: [moments] bytes above what was there before the step.
    """
    rest: dict[Moment, int] = {}
    for moment, peak in zip(moments, peaks, strict=True):
        left = peak - Place(*moment, 0).bytes(options)
        rest[moment] = max(left, rest.get(moment, left))
    return [Place(*moment, left) for moment, left in rest.items()]


def peak_of(places: Sequence[Place], options: Sequence[Option]) -> int:
    """The peak of a rank by these plans of its stages."""
    return max(place.bytes(options) for place in places)


def times_of(option: Option) -> Times:
    """The times of a stage's passes by a plan."""
    backward = option.cost_ns - option.forward_ns - option.weight_ns
    return Times(option.forward_ns, backward, option.weight_ns)


class Combination(NamedTuple):
    """Plans of a rank's stages that fit together: their times, and which ones they are."""

    times: tuple[Times, ...]
    chosen: tuple[int, ...]

    @property
    def total_ns(self) -> int:
        """Of one micro-batch through all of them."""
        return sum(times.total_ns for times in self.times)


def combinations(places: Sequence[Place], options: Sequence[Sequence[Option]], budget_bytes: int) -> list[Combination]:
    """What a rank can do inside its budget: of plans that are at least as quick in every pass, one."""
    found: list[Combination] = []
    for chosen in _fitting(places, options, budget_bytes):
        picked = [ways[index] for ways, index in zip(options, chosen, strict=True)]
        found.append(Combination(tuple(map(times_of, picked)), chosen))
    kept: list[Combination] = []
    for one in sorted(found, key=lambda c: (c.total_ns, c.chosen)):
        if not any(_no_slower(other, one) for other in kept):
            kept.append(one)
    return kept


def room(places: Sequence[Place], options: Sequence[Option], index: int, budget_bytes: int) -> int:
    """What one of a rank's stages may take while it runs, next to these plans of the others."""
    idle = options[index]._replace(forward_bytes=0, backward_bytes=0, weight_bytes=0)
    others = [*options[:index], idle, *options[index + 1 :]]
    return budget_bytes - max(place.bytes(others) for place in places if place.kind and place.stage == index)


def least_budget(places: Sequence[Place], options: Sequence[Sequence[Option]]) -> int:
    """The least budget that some choice fits, to within a thousandth."""
    low, high = 0, peak_of(places, [min(ways) for ways in options])
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        fits = next(_fitting(places, options, middle), None) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high


def _fitting(
    places: Sequence[Place], options: Sequence[Sequence[Option]], budget_bytes: int
) -> Iterator[tuple[int, ...]]:
    """The choices that fit, one stage after the other; stages to come hold what the least of their plans does."""
    least = [Option(*map(min, zip(*ways, strict=True))) for ways in options]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        stage = len(chosen)
        picked = [options[i][index] for i, index in enumerate(chosen)] + least[stage:]
        if peak_of(places, picked) > budget_bytes:
            return
        if stage == len(options):
            yield chosen
            return
        for index in range(len(options[stage])):
            yield from extend((*chosen, index))

    return extend(())


def _no_slower(one: Combination, other: Combination) -> bool:
    return all(a <= b for x, y in zip(one.times, other.times, strict=True) for a, b in zip(x, y, strict=True))


class Choice(NamedTuple):
    """What each rank takes.

    Attributes:
        taken: [ranks] which of its combinations.
        makespan_ns: of a step by them.
        bound_ns: no choice has a shorter one; the same, unless the search was cut short.
    """

    taken: tuple[int, ...]
    makespan_ns: int
    bound_ns: int


def choose(
    timeline: Timeline, stages: Sequence[Sequence[int]], ranks: Sequence[Sequence[Combination]], most: int = MOST_RUNS
) -> Choice:
    """The combination of each rank at the least makespan; among those, at the least total time.

    Args:
        stages: [ranks] the numbers of its stages.
        ranks: [ranks] its combinations, at least one each.
    """
    return _Search(timeline, stages, ranks, most).run()


class _Search:
    def __init__(
        self, timeline: Timeline, stages: Sequence[Sequence[int]], ranks: Sequence[Sequence[Combination]], most: int
    ) -> None:
        self.timeline, self.stages, self.ranks, self.left = timeline, stages, ranks, most
        self.quickest = [tuple(Times(*map(min, zip(*times, strict=True))) for times in _by_stage(c)) for c in ranks]
        self.best: tuple[int, int] | None = None
        self.taken: tuple[int, ...] = ()

    def run(self) -> Choice:
        bound = self._value(())
        self._extend((), bound)
        assert self.best is not None
        return Choice(self.taken, self.best[0], self.best[0] if self.left > 0 else bound[0])

    def _value(self, taken: tuple[int, ...]) -> tuple[int, int]:
        """Makespan and total time where the other ranks are as quick as they can be in each pass by itself."""
        times: list[Times] = [Times(0, 0, 0)] * self.timeline.stages
        for rank, stages in enumerate(self.stages):
            own = self.ranks[rank][taken[rank]].times if rank < len(taken) else self.quickest[rank]
            for stage, found in zip(stages, own, strict=True):
                times[stage] = found
        self.left -= self.timeline.runs
        return self.timeline.makespan_ns(times), sum(t.total_ns for t in times)

    def _extend(self, taken: tuple[int, ...], bound: tuple[int, int]) -> None:
        if self.best is not None and (bound >= self.best or self.left <= 0):
            return
        if len(taken) == len(self.ranks):
            self.best, self.taken = bound, taken
            return
        found = [(*taken, index) for index in range(len(self.ranks[len(taken)]))]
        for value, longer in sorted((self._value(longer), longer) for longer in found):
            self._extend(longer, value)


def _by_stage(combinations: Sequence[Combination]) -> list[tuple[Times, ...]]:
    return list(zip(*(c.times for c in combinations), strict=True))
