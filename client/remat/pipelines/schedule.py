"""A pipeline's schedule as its own actions say: who runs which pass when, what is held meanwhile, how long it takes.

Nothing here goes by the name of a schedule. A schedule of `torch.distributed.pipelining` lists the actions of all ranks
(`pipeline_order_with_comms`, or `pipeline_order` where it has none); a stage's forward pass waits for that of the stage
before it, its backward pass for that of the stage after it, and each rank runs its actions in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class

from remat_ir import InvalidData

Pass: TypeAlias = Literal["forward", "backward", "weight"]

PASSES: dict[str, tuple[Pass, ...]] = {
    "F": ("forward",),
    "B": ("backward", "weight"),
    "I": ("backward",),
    "W": ("weight",),
}
"""What the computing actions of a schedule run; B is a whole backward pass, I and W are its halves."""


class Run(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Pass
    stage: int
    micro: int


class Times(NamedTuple):
    """How long a stage's passes take, in ns."""

    forward_ns: int
    backward_ns: int
    weight_ns: int

    @property
    def total_ns(self) -> int:
        """Of one micro-batch."""
        return sum(self)


def named(name: str, ranks: int, micros: int) -> Any:
    """A schedule of torch by its name, made for nothing but its actions: two stages a rank where it takes several.

    Raises:
        InvalidData: torch has none of that name, or it refuses so many ranks and micro-batches.
    """
    try:
        kind: Any = get_schedule_class(name)
    except ValueError as error:
        raise InvalidData(f"schedule: {error}") from None
    each = 1 if issubclass(kind, PipelineScheduleSingle) else 2
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=each * ranks,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == each * ranks - 1,
            has_backward=True,
            submod=None,
        )
        for index in range(0, each * ranks, ranks)
    ]
    try:
        return kind(stages[0] if each == 1 else stages, micros, loss_fn=lambda output, _: output)
    except (ValueError, TypeError, RuntimeError) as error:  # those without a list of actions are abstract
        raise InvalidData(f"schedule {name} with {ranks} ranks and {micros} micro-batches: {error}") from None


def actions_of(schedule: Any) -> list[list[Run]]:
    """What each rank of a schedule runs, in order.

    A whole backward pass is two runs, of which the second takes no time where a stage's is not in halves.

    Raises:
        InvalidData: it has no list of actions, or a stage does not run each micro-batch forward and backward once.
    """
    order = _order(schedule)
    if not order:
        raise InvalidData(
            f"{type(schedule).__name__} does not list its actions (pipeline_order), so what its ranks hold is not "
            "known: use a schedule of torch.distributed.pipelining"
        )
    found = [_numbered(_computing(order[rank])) for rank in sorted(order)]
    _check(found)
    return found


def in_halves(schedule: Any) -> frozenset[int]:
    """The stages whose backward passes a schedule runs in halves."""
    return frozenset(
        stage for actions in _order(schedule).values() for code, stage, _ in _computing(actions) if code == "I"
    )


def _order(schedule: Any) -> Mapping[int, Sequence[Any]]:
    """[ranks] a schedule's list of actions; empty where it has none."""
    return getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None) or {}


def _computing(actions: Iterable[Any]) -> list[tuple[str, int, int]]:
    """The actions that compute, those that overlap one after the other."""
    found: list[tuple[str, int, int]] = []
    for action in actions:
        if action is None:
            continue
        code = str(action.computation_type.value)
        if code in PASSES:
            found.append((code, action.stage_index, action.microbatch_index))
        elif getattr(action, "sub_actions", None):
            found += _computing(action.sub_actions)
    return found


def _numbered(actions: Sequence[tuple[str, int, int]]) -> list[Run]:
    """With micro-batches from 0: the last rank's forward passes of 1F1B are listed from 1 (torch 2.13)."""
    first: dict[int, int] = {}
    for code, stage, micro in actions:
        if code == "F":
            first[stage] = min(micro, first.get(stage, micro))
    return [
        Run(kind, stage, micro - first.get(stage, 0) * (code == "F"))
        for code, stage, micro in actions
        for kind in PASSES[code]
    ]


def _check(ranks: Sequence[Sequence[Run]]) -> None:
    times = Counter(run for runs in ranks for run in runs)
    stages = 1 + max((run.stage for run in times), default=-1)
    micros = 1 + max((run.micro for run in times), default=-1)
    for stage in range(stages):
        for micro in range(micros):
            for kind in ("forward", "backward", "weight"):
                if times[Run(kind, stage, micro)] != 1:
                    raise InvalidData(
                        f"the schedule runs the {kind} pass of micro-batch {micro} through stage {stage} "
                        f"{times[Run(kind, stage, micro)]} times, not once: only training schedules can be planned"
                    )


class Held(NamedTuple):
    """How many micro-batches each of a rank's stages holds, by their number on the rank.

    Attributes:
        forward: those between their forward and their backward pass.
        between: those between the halves of their backward pass.
    """

    forward: tuple[int, ...]
    between: tuple[int, ...]


class Moment(NamedTuple):
    """A run of a rank, or the time after it: what is held next to it, without the micro-batch that runs."""

    kind: Pass | None
    stage: int
    held: Held


def residency(runs: Sequence[Run], stages: Sequence[int]) -> list[Moment]:
    """[1 + 2 · runs] what a rank holds before its first run, during each and after it.

    Args:
        runs: the rank's own; where a stage's backward pass is not in halves, without the second ones.
        stages: the numbers of its stages; moments count in their order.
    """
    place = {stage: index for index, stage in enumerate(stages)}
    halved = {run.stage for run in runs if run.kind == "weight"}
    forward, between = [0] * len(stages), [0] * len(stages)
    found = [Moment(None, -1, Held(tuple(forward), tuple(between)))]
    for run in runs:
        index = place[run.stage]
        forward[index] -= run.kind == "backward"
        between[index] -= run.kind == "weight"
        found.append(Moment(run.kind, index, Held(tuple(forward), tuple(between))))
        forward[index] += run.kind == "forward"
        between[index] += run.kind == "backward" and run.stage in halved
        found.append(Moment(None, -1, Held(tuple(forward), tuple(between))))
    return found


class Timeline:
    """The actions of all ranks with what each waits for: how long a step takes for given times of the passes.

    Messages take no time, and nobody waits to send.

    Raises:
        InvalidData: the actions wait for each other.
    """

    def __init__(self, ranks: Sequence[Sequence[Run]]) -> None:
        self.stages = 1 + max(run.stage for runs in ranks for run in runs)
        number: dict[Run, int] = {}
        self._runs: list[tuple[int, int]] = []
        self._after: list[tuple[int, ...]] = []
        last: list[int | None] = [None] * len(ranks)
        position = [0] * len(ranks)
        moved = True
        while moved:
            moved = False
            for rank, runs in enumerate(ranks):
                while position[rank] < len(runs):
                    run = runs[position[rank]]
                    needed = [number.get(other) for other in self._needs(run)]
                    if None in needed:
                        break
                    before = [n for n in (*needed, last[rank]) if n is not None]
                    number[run] = last[rank] = len(self._runs)
                    self._runs.append((run.stage, ("forward", "backward", "weight").index(run.kind)))
                    self._after.append(tuple(dict.fromkeys(before)))
                    position[rank] += 1
                    moved = True
        stuck = [runs[at] for at, runs in zip(position, ranks, strict=True) if at < len(runs)]
        if stuck:
            raise InvalidData(f"the schedule's actions wait for each other: {stuck[0]} is never reached")

    @property
    def runs(self) -> int:
        """How many passes a step has."""
        return len(self._runs)

    def _needs(self, run: Run) -> list[Run]:
        kind, stage, micro = run
        if kind == "weight":
            return [Run("backward", stage, micro)]
        if kind == "forward":
            return [Run("forward", stage - 1, micro)] if stage else []
        later = [Run("backward", stage + 1, micro)] if stage + 1 < self.stages else []
        return [Run("forward", stage, micro), *later]

    def makespan_ns(self, times: Sequence[Times]) -> int:
        """[stages] the time from the first action's beginning to the last one's end."""
        ends: list[int] = []
        for (stage, kind), after in zip(self._runs, self._after, strict=True):
            start = 0
            for other in after:
                start = max(start, ends[other])
            ends.append(start + times[stage][kind])
        return max(ends)


class Actions:
    """What the ranks of a schedule do.

    Attributes:
        runs: [ranks] their passes, in order.
        halved: the stages whose backward passes are in halves.
        numbers: [ranks] their stages.
        last: the pipeline's last stage.
        micros: so many micro-batches.
        waits_at_end: what is sent is held until then.
        timeline: of all passes.

    Raises:
        InvalidData: as `actions_of` and `Timeline`.
    """

    def __init__(self, schedule: Any) -> None:
        self.runs, self.halved = actions_of(schedule), in_halves(schedule)
        self.numbers = [sorted({run.stage for run in own}) for own in self.runs]
        self.last = max(map(max, self.numbers))
        self.micros = 1 + max(run.micro for own in self.runs for run in own)
        self.waits_at_end = not isinstance(schedule, Schedule1F1B)
        self.timeline = Timeline(self.runs)

    def makespan_ns(self, ranks: Sequence[Sequence[Sequence[int]]]) -> int:
        """How long a step takes by the times of each rank's stages, [ranks, stages, passes]."""
        times: list[Times] = [Times(0, 0, 0)] * self.timeline.stages
        for numbers, found in zip(self.numbers, ranks, strict=True):
            for number, own in zip(numbers, found, strict=True):
                times[number] = Times(*own)
        return self.timeline.makespan_ns(times)
