"""What an accelerator has to reserve for training by a plan: a few steps replayed through a model of its allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import fx, nn

from remat_ir import Plan, Problem

from ..capture.dataflow import device_of
from ..capture.operations import Kind, returned_gradients
from ..device import Accelerator, Device, of
from ..lowering.allocator import Allocator, Block, Bytes, Settings
from ..lowering.link import link_for
from ..lowering.peak import Instance, moments
from ..planning.coordinator import Coordinator
from ..planning.greedy import greedy_answer
from ..planning.options import SolveOptions
from ..profiling.fixed import all_gradients, existing_gradients
from ..profiling.optimizers import spread
from ..profiling.room import ATTEMPTS, STEPS, Room, lowered
from .job import Job
from .step import TrainingStep


def device_of_step(step: TrainingStep) -> Device:
    """Where a step's memory is counted: the device of its first parameter or input."""
    return of(device_of(step.operations.flow))


def linked(step: TrainingStep, options: SolveOptions, coordinator: Coordinator) -> TrainingStep:
    """The step with the link that options mean for its device, if they mean one."""
    link = link_for(options, device_of(step.operations.flow), coordinator)
    return step if link is None else replace(step, graph=replace(step.graph, link=link))


@dataclass(frozen=True, eq=False)
class Whole:
    """What a step that is planned by itself is a part of, and the bytes of an accelerator that this may take in all."""

    model: nn.Module
    job: Job
    budget_bytes: int

    def absent(self, step: TrainingStep) -> int:
        """Bytes of gradients of the other parts that are not there yet: in this one's backward pass they may be."""
        own = sum(step.operations.sizes[s] for s in returned_gradients(step.operations))
        return max(0, all_gradients(self.model) - existing_gradients(self.model) - own)


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
        start = Allocator.of_segments(self.segments, Settings.of_process())
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
            answer = greedy_answer(problem, time_limit_s=2.0, look_s=0.0)
            over = self.over(partial(self.reserved, answer.plan))
            if not over:
                return before if answer.plan is None else problem
            before = problem
            problem = lowered(problem, answer, over, attempt)
        return before


def fresh(step: TrainingStep, settings: Settings | None = None) -> Allocator:
    """An allocator that holds what a step reads from the start, and nothing else: of a device that is not at hand."""
    allocator = Allocator(settings)
    flow = step.operations.flow
    for storage in dict.fromkeys(s for primal in flow.primals for s in flow.storages_of[primal]):
        allocator.allocate(step.operations.sizes[storage])
    return allocator


def standing(device: Accelerator) -> Allocator:
    """An allocator that stands as that of a device does now, with nothing in its cache."""
    return Allocator.of_segments(device.segments(), Settings.of_process())


def reserved(step: TrainingStep, plan: Plan, start: Allocator, job: Job, absent: int = 0, steps: int = STEPS) -> Bytes:
    """The peaks of some training steps by a plan, in bytes, with all that was there before.

    Gradients are freed after each step (`zero_grad(set_to_none=True)`), and new ones are written in each.

    Args:
        start: the allocator before the first step; it is used up.
        job: what its optimizer lacks of its state is allocated after the first step, and what it copies in each.
        absent: bytes of gradients that stay from the first step on, and are not there yet.
    """
    ops = step.operations
    gradients = _gradients(step)
    plan_moments = moments(ops, plan, step.profiled.kernels)
    state, copies = job.blocks()
    for size in spread(absent, job.optimizer):
        start.allocate(size)
    for number in range(steps):
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


def _gradients(step: TrainingStep) -> frozenset[int]:
    """Storages of parameters' gradients: what stays of a step until they are zeroed."""
    ops = step.operations
    found = {s for op in ops.ops if op.kind is Kind.ACCUMULATE for s in op.makes}
    return frozenset(
        found | {s for n in ops.flow.backward_results if isinstance(n, fx.Node) for s in ops.flow.storages_of[n]}
    )
