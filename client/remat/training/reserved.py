"""What an accelerator has to reserve for training by a plan: a few steps replayed through a model of its allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from remat_ir import Plan, Problem

from ..capture.dataflow import device_of
from ..capture.operations import Kind
from ..device import Accelerator, Device, of, storage_bytes
from ..lowering.allocator import Allocator, Block, Bytes, Settings
from ..lowering.link_profile import link_for
from ..lowering.peak import Instance, moments
from ..planning.budget import UnitBytes
from ..planning.coordinator import Coordinator
from ..planning.greedy import greedy_answer
from ..planning.options import SolveOptions
from ..profiling.fixed import here
from .job import Job
from .step import TrainingStep

STEPS = 3
"""The first has no state of the optimizer, the second fits that in; a third one is as all that follow."""


ATTEMPTS = 3
"""So often a budget is lowered by what the allocator would reserve beyond it, and planned for again."""


def device_of_step(step: TrainingStep) -> Device:
    """Where a step's memory is counted: the device of its first parameter or input."""
    return of(device_of(step.operations.flow))


def linked(step: TrainingStep, options: SolveOptions, coordinator: Coordinator) -> TrainingStep:
    """The step with the link that options mean for its device, if they mean one."""
    link = link_for(options, device_of(step.operations.flow), coordinator)
    return step if link is None else replace(step, graph=replace(step.graph, link=link))


class Room:
    """The memory of a device as a step that is planned for it finds it; of the CPU, which reserves nothing, a blank.

    Attributes:
        device: the accelerator, or None.
        budget: bytes of the device that training may take in all; None: a budget of another kind.
        outside: bytes that the driver, libraries and other processes have taken besides the allocator.
    """

    def __init__(
        self,
        step: TrainingStep,
        device: Accelerator | None,
        budget: int | None,
        job: Job,
        absent: int,
        coordinator: Coordinator,
    ) -> None:
        self._step, self._job, self._absent, self._coordinator = step, job, absent, coordinator
        self.device, self.budget = device, budget
        self._segments = []
        if device is not None:
            device.take_workspaces()
            self._segments = device.segments()
        self.outside = 0 if device is None else device.outside_bytes()

    def peaks(self, plan: Plan) -> Bytes | None:
        """The peaks of training by a plan, with all that this process has on the device."""
        if self.device is None:
            return None
        start = Allocator.of_segments(self._segments, Settings.of_process())
        return reserved(self._step, plan, start, self._job, self._absent)

    def over(self, plan: Any) -> int:
        """By how many bytes a plan is over the budget, on the rank where it is most; without a plan by 0."""
        if self.budget is None:
            return 0
        (most,) = self._coordinator.most([self.over_here(plan)])
        return most

    def over_here(self, plan: Any) -> int:
        """By how many bytes a plan is over the budget on this rank; without a plan by 0."""
        found = self.peaks(plan) if isinstance(plan, Plan) else None
        return 0 if found is None or self.budget is None else max(0, self.outside + found.reserved - self.budget)

    def planned(self, problem: Problem) -> Problem:
        """The problem with what is left of the budget: what others take is not there, nor what segments waste.

        How much they waste is seen on a quick plan; what the final one wastes is seen when it is there.
        """
        if self.budget is None:
            return problem
        graph = problem.graph
        now = Allocator.of_segments(self._segments).now.allocated
        others = max(0, now - (graph.fixed_bytes - sum(missing_state(self._job)) - self._absent))
        (size,) = self._coordinator.least([max(0, self.budget - self.outside - others)])
        problem = replace(problem, budget_bytes=size)
        for _ in range(ATTEMPTS):
            over = self.over(greedy_answer(problem, time_limit_s=2.0, look_s=0.0).plan)
            if not over:
                break
            problem = self.lowered(problem, over)
        return problem

    def lowered(self, problem: Problem, over: int) -> Problem:
        """The problem with as much less as a plan of it reserved more, in proportion: waste goes with what is cut."""
        assert self.budget is not None
        whole = max(1, self.budget - self.outside)
        return replace(problem, budget_bytes=problem.budget_bytes * whole // (whole + over))


def room_for(step: TrainingStep, budget: object, slack: float, job: Job, absent: int, coordinator: Coordinator) -> Room:
    """The room for a step on its device; a budget in bytes of an accelerator is one of all that is reserved there."""
    there = device_of_step(step)
    if not isinstance(there, Accelerator) or isinstance(budget, UnitBytes):
        return Room(step, None, None, job, absent, coordinator)
    return Room(step, there, int(budget / slack) if isinstance(budget, int) else None, job, absent, coordinator)


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
    state, copies = missing_state(job), _spread(job.update().temporaries_bytes, job)
    for size in _spread(absent, job):
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


def missing_state(job: Job) -> list[int]:
    """The sizes in bytes of what the first step of an optimizer will make as its state."""
    return [] if job.optimizer is None or job.optimizer.state else _spread(job.update().state_bytes, job)


def _spread(size: int, job: Job) -> list[int]:
    """Bytes as copies of each parameter that is trained, one after the other, and what is left of them in one piece."""
    groups = [] if job.optimizer is None else job.optimizer.param_groups
    trained = [here(p) for group in groups for p in group["params"] if p.requires_grad]
    sizes = [storage_bytes(p) for p in trained]
    count, rest = divmod(size, sum(sizes)) if sizes else (0, size)
    return [size for size in sizes for _ in range(count)] + [rest] * (rest > 0)


def _gradients(step: TrainingStep) -> frozenset[int]:
    """Storages of parameters' gradients: what stays of a step until they are zeroed."""
    ops = step.operations
    found = {s for op in ops.ops if op.kind is Kind.ACCUMULATE for s in op.makes}
    return frozenset(
        found | {s for n in ops.flow.backward_results if isinstance(n, fx.Node) for s in ops.flow.storages_of[n]}
    )
