"""What a planned step takes: reserved, by a model of the accelerator's allocator; its peak, as a first step shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from remat_ir import Plan, Problem, duration, readable

from .. import _compat
from ..capture.dataflow import device_of
from ..capture.operations import Kind, returned_gradients
from ..device import Device, clock_ns, of
from ..lowering.allocator import Allocator, Block, Bytes, Settings
from ..lowering.peak import Instance, moments
from ..planning.coordinator import Coordinator
from ..planning.greedy import greedy_answer
from ..profiling.measure import Lifetimes, Window
from ..profiling.optimizers import spread
from ..profiling.room import ATTEMPTS, STEPS, Room, lowered
from .job import Job
from .step import Planned, TrainingStep

log = logging.getLogger("remat")


def device_of_step(step: TrainingStep) -> Device:
    """Where a step's memory is counted: the device of its first parameter or input."""
    return of(device_of(step.operations.flow))


class StepRoom(Room):
    """The memory of a step's device, and what training by a plan of the step reserves there, by a model.

    Args:
        budget, slack: as for `Room`.
        absent: as for `reserved`.
    """

    def __init__(
        self, step: TrainingStep, budget: object, slack: float, job: Job, absent: int, coordinator: Coordinator
    ) -> None:
        super().__init__(device_of(step.operations.flow), budget, slack, coordinator)
        self._step, self._job, self._absent = step, job, absent

    def peaks(self, plan: Plan) -> Bytes | None:
        """The peaks of training by a plan, with all that this process has on the device."""
        if self.device is None:
            return None
        start = Allocator(Settings.of_process(), self.segments)
        return reserved(self._step, plan, start, self._job, self._absent)

    def reserved(self, plan: object) -> int:
        """The reserved bytes of training by a plan; without one 0."""
        found = self.peaks(plan) if isinstance(plan, Plan) else None
        return 0 if found is None else found.reserved

    def planned(self, problem: Problem) -> Problem:
        """The problem with what is left of the budget: what others take is not there, nor what segments waste.

        How much they waste is seen on a quick plan; what the final one wastes is seen when it is there.
        """
        if self.budget is None:
            return problem
        missing = sum(self._job.blocks().state) + self._absent
        problem = replace(problem, budget_bytes=self.left(self.budget, problem.graph.fixed_bytes - missing))

        before = problem
        for attempt in range(ATTEMPTS - 1):
            # by the first rank's clock, which may cut it short: all ranks must come to one budget
            quick = partial(greedy_answer, problem, time_limit_s=2.0, look_s=0.0)
            answer = self._coordinator.answer(problem, quick)
            over = self.over(partial(self.reserved, answer.plan))
            if not over:
                return before if answer.plan is None else problem
            before = problem
            problem = lowered(problem, answer, over, attempt)
        return before


def fresh(step: TrainingStep) -> Allocator:
    """An allocator that holds what a step reads from the start, and nothing else: of a device that is not at hand."""
    allocator = Allocator()
    flow = step.operations.flow
    for storage in dict.fromkeys(s for primal in flow.primals for s in flow.storages_of[primal]):
        allocator.allocate(step.operations.sizes[storage])
    return allocator


def reserved(step: TrainingStep, plan: Plan, start: Allocator, job: Job, absent: int = 0) -> Bytes:
    """The peaks of some training steps by a plan, in bytes, with all that was there before.

    Gradients are freed after each step (`zero_grad(set_to_none=True)`), and new ones are written in each.

    Args:
        start: the allocator before the first step; it is used up.
        job: what its optimizer lacks of its state is allocated after the first step, and what it copies in each.
        absent: bytes of gradients that stay from the first step on, and are not there yet.
    """
    ops = step.operations
    gradients = returned_gradients(ops)
    plan_moments = moments(ops, plan, step.profiled.kernels)
    state, copies = job.blocks()
    for size in spread(absent, job.optimizer):
        start.allocate(size)
    for number in range(STEPS):
        held: dict[Instance, Block] = {}
        for moment in plan_moments:
            for instance in moment.makes:
                held[instance] = start.allocate(ops.sizes[instance[0]])
            if moment.workspace:
                start.free(start.allocate(moment.workspace))
            for instance in moment.frees:
                start.free(held.pop(instance))
        for instance in [instance for instance in held if instance[0] not in gradients]:
            start.free(held.pop(instance))
        if number == 0:
            for size in state:
                start.allocate(size)
        for block in [start.allocate(size) for size in copies]:
            start.free(block)
        for block in held.values():
            start.free(block)
    return start.peak


TOLERANCE = 0.03
SMALLEST_BYTES = 16 * 1024
"""Differences below this are no news, however small the step."""

MEASUREMENTS = 2
"""Libraries allocate once what they use ever after: a first step that is off is measured once more."""

TIMED_STEPS = 3
"""The shortest of so many is how long a step takes: other work on the machine only makes steps longer."""
TIME_TOLERANCE, SHORTEST_NS = 1.3, 5_000_000
"""The factor by which kernels may be slower than the step; shorter steps are mostly calls, and say nothing of them."""


class StepPeak(NamedTuple):
    """A step's peak as predicted and as measured, in bytes above the fixed ones, and its time in ns where it was."""

    predicted_bytes: int
    measured_bytes: int
    predicted_ns: int | None = None
    measured_ns: int | None = None

    @property
    def off(self) -> float:
        """measured / predicted − 1."""
        return self.measured_bytes / max(1, self.predicted_bytes) - 1

    @property
    def as_predicted(self) -> bool:
        """Whether the two differ by no more than 3 %, or by next to nothing."""
        difference = abs(self.measured_bytes - self.predicted_bytes)
        return difference <= max(TOLERANCE * self.predicted_bytes, SMALLEST_BYTES)

    @property
    def contradicts_profile(self) -> bool:
        """Whether the step is shorter than its kernels were measured to be, by more than 30 %.

        A longer one says nothing of them: other work on the machine makes steps longer, and never shorter.
        """
        if self.measured_ns is None or self.predicted_ns is None:
            return False
        return self.measured_ns >= SHORTEST_NS and self.predicted_ns > TIME_TOLERANCE * self.measured_ns


class SelfCheck:
    """Which plans have still to show their peak and their time, and what those that have came to.

    A step is watched while its own forward and its own backward function run, from this thread, and not in between:
    what the caller's loss allocates is the caller's. A step that never runs backward says nothing. Steps on an
    accelerator are not timed: their kernels run after the call that issues them.

    Args:
        on_measured: called once a plan has shown both.
    """

    def __init__(self, on_measured: Callable[[Planned, StepPeak], None] = lambda planned, peak: None) -> None:
        self._on_measured = on_measured
        # weakly: a plan that `most_plans` drops takes its traced graph with it
        self.due: MutableMapping[Planned, int] = WeakKeyDictionary()
        self.untimed: MutableMapping[Planned, int] = WeakKeyDictionary()
        self.found: MutableMapping[Planned, StepPeak] = WeakKeyDictionary()

    def expect(self, planned: Planned) -> None:
        """A plan is about to be run for the first time."""
        self.due[planned] = MEASUREMENTS

    def forget(self, planned: Planned) -> None:
        """A plan will not be run again."""
        for known in (self.due, self.untimed, self.found):
            known.pop(planned, None)

    def time(self, planned: Planned, run: Callable[..., Any]) -> Any:
        """What a call by a plan gives; how long it and the backward pass to come take is measured."""
        ahead_ns = 0

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            began = clock_ns()
            output = function(args)
            self._note_time(planned, ahead_ns + clock_ns() - began)
            return output

        began = clock_ns()
        output = run(around=backward)
        ahead_ns = clock_ns() - began
        return output

    def _note_time(self, planned: Planned, took_ns: int) -> None:
        left, known = self.untimed.pop(planned, 0) - 1, self.found.get(planned)
        if left < 0 or known is None:
            return
        known = known._replace(measured_ns=min(took_ns, known.measured_ns or took_ns))
        self.found[planned] = known
        if left:
            self.untimed[planned] = left
            return
        if known.contradicts_profile:
            log.warning(
                "a step by the plan takes %s, and its kernels were measured to take %s in all: other work ran on the "
                "machine then. They are measured again for the next plan",
                duration(known.measured_ns or 0),
                duration(known.predicted_ns or 0),
            )
        self._on_measured(planned, known)

    def watch(self, planned: Planned, run: Callable[..., Any]) -> Any:
        """What a call by a plan gives; its peak, and that of the backward pass to come, are measured.

        Args:
            run: makes the call; with `around`, as for `StepFunction`.
        """
        if _compat.recording():  # the caller's own profiler; a later step is enough
            return run()
        window = Lifetimes() if _freed_elsewhere(planned) else Window(device_of_step(planned.step).device)
        tangents = len(planned.step.operations.flow.tangents)

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            given = (a for a in args[len(args) - tangents :] if isinstance(a, torch.Tensor))
            if _compat.recording() or any(map(_compat.is_batched, given)):
                return function(args)
            arrived = _taken_in(args, tangents, window)
            window.open()
            try:
                return function(args)
            finally:
                after = window.close()
                start = before.left_bytes + arrived
                copied = start + after.left_bytes + _largest_copy(planned)
                self._tell(planned, max(before.peak_bytes, start + after.peak_bytes, copied))

        window.open()
        try:
            return run(around=backward)
        finally:
            before = window.close()

    def _tell(self, planned: Planned, measured: int) -> None:
        left = self.due.pop(planned, 0) - 1
        if left < 0:
            return
        peak = StepPeak(planned.activation_bytes, measured, planned.answer.cost_ns)
        self.found[planned] = peak
        said = (readable(measured), readable(peak.predicted_bytes), 100 * peak.off)
        if peak.as_predicted:
            log.info("the first step peaked at %s above what is there throughout, as planned (%s)", *said[:2])
        elif left:
            self.due[planned] = left
        else:
            log.warning(
                "a step by the plan peaks at %s above what is there throughout, and %s was predicted (%+.1f %%): the "
                "budget may not hold. Look for hooks that keep tensors, and for profiles from another machine; a "
                "larger slack= leaves room",
                *said,
            )
        if planned not in self.due:
            if device_of_step(planned.step).device.type == "cpu":
                self.untimed[planned] = TIMED_STEPS
            else:
                self._on_measured(planned, peak)


def _freed_elsewhere(planned: Planned) -> bool:
    """Whether threads of a backend free what the step's collectives have used, of which a CPU's allocator tells others
    nothing."""
    kernels = planned.step.operations.flow.kernels
    on_cpu = device_of_step(planned.step).device.type == "cpu"
    return on_cpu and any(_compat.is_collective(node.target) for node in kernels)


def _taken_in(args: list[Any], tangents: int, window: Window | Lifetimes) -> int:
    """The bytes of the incoming gradients.

    The CPU's allocator tells when a block is freed only if it was told when the block was made: each gradient is
    replaced by a copy made in a window.
    """
    found: dict[int, int] = {}
    for position in range(len(args) - tangents, len(args)):
        if not isinstance(args[position], torch.Tensor):  # the mesh of a DTensor
            continue
        if args[position].device.type == "cpu":
            window.open()
            args[position] = args[position].clone()
            window.close()
        found[_compat.storage_key(args[position])] = args[position].untyped_storage().nbytes()
    return sum(found.values())


def _largest_copy(planned: Planned) -> int:
    """Autograd copies some gradients, one at a time, after the backward function has returned."""
    ops = planned.step.operations
    return max((ops.sizes[s] for op in ops.ops if op.kind is Kind.ACCUMULATE for s in op.makes), default=0)


def summary(found: Mapping[Planned, StepPeak], planned: Planned) -> str:
    """What a plan's first step came to, in a line; empty before it has run."""
    peak = found.get(planned)
    if peak is None:
        return ""
    took = "" if peak.measured_ns is None else f"; {duration(peak.measured_ns)} measured"
    said = f"first step: peak {readable(peak.measured_bytes)} above the fixed bytes"
    return f"{said}, {100 * peak.off:+.1f} % measured{took}"
