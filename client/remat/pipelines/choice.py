"""What each rank of a pipeline holds, which plans its stages can have together, and the least makespan of all, exactly.

Memory ties the stages of one rank together, time those of all ranks. So each rank lists the times that its stages can
have together inside its budget, those alone that no other is at least as quick as, and a search over the ranks with
bounds from the quickest of each finds the least makespan: it never falls when a time rises.

What a rank holds besides what its stages' plans count follows from the schedule's actions and bytes alone. The rules
are those of `torch.distributed.pipelining`, at the same moments at which `optimize_pipeline` watches a step: a stage
receives into buffers of its own, one for each micro-batch, that stay; what one stage gives to the next on the same rank
takes the place of such a buffer; what is sent is held until the schedule waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ..capture.operations import Operations
from ..planning.division import Option, least_that_fits
from .schedule import Held, Moment, Pass, Run, Timeline, Times, residency

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
        found = self.rest_bytes
        if self.kind is not None:
            own = options[self.stage]
            running = {"forward": own.forward_bytes, "backward": own.backward_bytes, "weight": own.weight_bytes}
            found += running[self.kind]
        for option, forward, between in zip(options, *self.held, strict=True):
            found += forward * option.held_bytes + between * option.between_bytes
        return found


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
    enough = peak_of(places, [min(ways) for ways in options])
    return least_that_fits(0, enough, lambda budget: next(_fitting(places, options, budget), None) is not None)


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
    search = _Search(timeline, stages, ranks, most)
    bound = search.value(())
    search.extend((), bound)
    assert search.best is not None
    return Choice(search.taken, search.best[0], search.best[0] if search.left > 0 else bound[0])


class _Search:
    def __init__(
        self, timeline: Timeline, stages: Sequence[Sequence[int]], ranks: Sequence[Sequence[Combination]], most: int
    ) -> None:
        self.timeline, self.stages, self.ranks, self.left = timeline, stages, ranks, most
        by_stage = [zip(*(combination.times for combination in own), strict=True) for own in ranks]
        self.quickest = [tuple(Times(*map(min, zip(*times, strict=True))) for times in own) for own in by_stage]
        self.best: tuple[int, int] | None = None
        self.taken: tuple[int, ...] = ()

    def value(self, taken: tuple[int, ...]) -> tuple[int, int]:
        """Makespan and total time where the other ranks are as quick as they can be in each pass by itself."""
        times: list[Times] = [Times(0, 0, 0)] * self.timeline.stages
        for rank, stages in enumerate(self.stages):
            own = self.ranks[rank][taken[rank]].times if rank < len(taken) else self.quickest[rank]
            for stage, found in zip(stages, own, strict=True):
                times[stage] = found
        self.left -= self.timeline.runs
        return self.timeline.makespan_ns(times), sum(t.total_ns for t in times)

    def extend(self, taken: tuple[int, ...], bound: tuple[int, int]) -> None:
        if self.best is not None and (bound >= self.best or self.left <= 0):
            return
        if len(taken) == len(self.ranks):
            self.best, self.taken = bound, taken
            return
        found = [(*taken, index) for index in range(len(self.ranks[len(taken)]))]
        for value, longer in sorted((self.value(longer), longer) for longer in found):
            self.extend(longer, value)


class Passed(NamedTuple):
    """Bytes of a stage's tensors that come and go.

    Attributes:
        inputs: of one micro-batch.
        input_gradients: of those inputs that have one.
        outputs: that it returns, and that its plans count from the forward pass on.
        tangents: gradients of the outputs, which its plans count in the backward pass.
        late: those of them that the second half of a backward pass still reads.
        gradients: of its parameters.
    """

    inputs: int
    input_gradients: int
    outputs: int
    tangents: int
    late: int
    gradients: int


def passed(step: Operations, inputs: int, gradients: int, parameters: Collection[int]) -> Passed:
    """The bytes that a captured stage is given and gives.

    Args:
        parameters: the positions of its parameters among the tensors that it is given.
    """
    flow, turn = step.flow, step.ops[step.turn]
    made = {storage for op in step.ops for storage in op.makes}
    own = {flow.given[n] for n in parameters}

    def size(nodes: Sequence[Any]) -> int:
        found = {s for node in nodes for s in flow.storages_of.get(node, ())}
        return sum(step.sizes[s] for s in found & made)

    second = step.ops[step.halfway + 1 :] if step.halfway is not None else ()
    late = set(turn.makes) & {s for op in second for s in op.reads}
    return Passed(
        inputs,
        size([r for p, r in zip(flow.primals, flow.backward_results, strict=False) if p not in own]),
        size([r for r in flow.forward_results if r not in flow.mutated.values()]),
        sum(step.sizes[s] for s in turn.makes),
        sum(step.sizes[s] for s in late),
        gradients,
    )


def buffers_bytes(stages: Mapping[int, Passed], micros: int, last: int) -> int:
    """What a rank's stages receive into, and the batch that is given to them: there throughout."""
    return micros * sum(s.inputs + (s.outputs if stage < last else 0) for stage, s in stages.items())


def places_by_actions(runs: Sequence[Run], stages: Mapping[int, Passed], last: int, waits_at_end: bool) -> list[Place]:
    """The distinct moments of a rank's step, and what there is then besides its stages' plans and the fixed bytes.

    Args:
        runs: of the rank, without second halves where a stage's backward pass is whole.
        stages: of the rank, in the order of `runs`' numbers.
        last: the number of the pipeline's last stage, which computes the loss.
        waits_at_end: what is sent is held until then; else the last message of each kind is.
    """
    book = _Book(stages, {run.stage for run in runs if run.kind == "weight"}, last, waits_at_end)
    rest: dict[Moment, int] = {}
    for at, moment in enumerate(residency(runs, list(stages))):
        book.now(moment, rest)
        if moment.kind is not None:
            book.after(runs[at // 2])
    return [Place(*moment, left) for moment, left in rest.items()]


class _Book:
    def __init__(self, stages: Mapping[int, Passed], halved: Set[int], last: int, waits_at_end: bool) -> None:
        self.stages, self.halved, self.last, self.waits_at_end = stages, halved, last, waits_at_end
        self.numbers = list(stages)
        self.gradients: dict[int, int] = {}
        self.messages: dict[int, int] = {}

    def now(self, moment: Moment, rest: dict[Moment, int]) -> None:
        """Enter what there is at a moment."""
        found = sum(self.gradients.values()) + sum(self.messages.values()) - self._counted_twice(moment.held)
        if moment.kind in ("backward", "weight"):
            number = self.numbers[moment.stage]
            own = self.stages[number]
            if number < self.last:
                found -= own.tangents if moment.kind == "backward" else own.late
            if moment.kind == "weight" or self._stays(number):
                found -= own.outputs
        rest[moment] = max(found, rest.get(moment, found))

    def after(self, run: Run) -> None:
        """A pass has ended."""
        own = self.stages[run.stage]
        if run.kind == "backward":
            sent = own.input_gradients if run.stage and run.stage - 1 not in self.stages else 0
            sent += own.outputs if run.stage < self.last and not self._stays(run.stage) else 0
            self.messages[run.stage] = sent + (self.messages.get(run.stage, 0) if self.waits_at_end else 0)
        if run.kind == "weight" or (run.kind == "backward" and run.stage not in self.halved):
            self.gradients[run.stage] = own.gradients

    def _stays(self, number: int) -> bool:
        """Whether a stage's outputs lie in the buffers of the next stage, which is on this rank."""
        return number + 1 in self.stages

    def _counted_twice(self, held: Held) -> int:
        """What the plans of micro-batches that wait count, and buffers and messages do too."""
        found = 0
        for number, forward, between in zip(self.numbers, *held, strict=True):
            own = self.stages[number]
            found += forward * own.outputs if self._stays(number) else 0
            found += between * (own.outputs + (own.late if number < self.last else 0))
        return found
