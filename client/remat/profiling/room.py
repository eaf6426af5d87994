"""The room that a budget in bytes leaves on an accelerator, where it is one of all that the driver has to give.

What a plan's segments come to is told by a model of the allocator (`remat.training.memory`), or by a rehearsal: some
real steps, with blocks in the places of what the optimizer's steps will make.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from remat_ir import Answer, Problem, readable

from ..device import Accelerator, of
from ..device_flags import out_of_memory
from ..errors import BudgetTooSmall, NothingFound
from ..planning.budget import UnitBytes
from ..planning.coordinator import Coordinator
from .optimizers import UpdateBlocks

log = logging.getLogger("remat")

STEPS = 3
"""The first has no state of the optimizer, the second fits that in; a third one is as all that follow."""

ATTEMPTS = 6
"""So many plans are tried, each for less by what the one before reserves beyond the budget: see `lowered`."""

UNKNOWN = 16
"""A rehearsal that ends for want of memory counts as one that needs such a part of what the budget leaves more."""


class Room:
    """The memory of a device as what is planned for it finds it; of the CPU, which reserves nothing, a blank.

    Args:
        budget: as `read_budget` gives it, or a plan file; only bytes of the device are a budget here.
        slack: as in `remat.SolveOptions`.

    Attributes:
        device: the accelerator, or None: nothing is watched.
        budget: bytes of the device that training may take in all; None: a budget of another kind.
        outside: bytes that the driver, libraries and other processes have taken besides the allocator.
        seen: the reserved bytes of what was looked at last, `outside` left out; None: of nothing yet.
    """

    def __init__(self, device: torch.device, budget: object, slack: float, coordinator: Coordinator) -> None:
        there = of(device)
        self.device = there if isinstance(there, Accelerator) and not isinstance(budget, UnitBytes) else None
        self.budget = int(budget / slack) if self.device is not None and isinstance(budget, int) else None
        self.outside = self._allocated = 0
        self.seen: int | None = None
        self._coordinator = coordinator
        if self.device is not None:
            gc.collect()  # what only awaits collection is not there when training runs out of memory, or is rehearsed
            self.device.take_workspaces()
            self.segments = self.device.segments()
            self.outside = self.device.outside_bytes()
            self._allocated = self.device.memory().allocated

    def left(self, size: int, present: int) -> int:
        """Of so many bytes those that are left next to what others take.

        Args:
            present: bytes that are there now and that `size` counts; what is allocated besides is another's.
        """
        if self.budget is None:
            return size
        (least,) = self._coordinator.least([max(0, size - self.outside - max(0, self._allocated - present))])
        return least

    def over(self, reserved: Callable[[], int]) -> int:
        """By how many bytes what is reserved is over the budget, on the rank where it is most."""
        if self.budget is None:
            return 0
        (most,) = self._coordinator.most([self.over_here(reserved)])
        return most

    def over_here(self, reserved: Callable[[], int]) -> int:
        """By how many bytes what is reserved is over the budget, on this rank."""
        if self.budget is None:
            return 0
        try:
            self.seen = reserved()
            return max(0, self.outside + self.seen - self.budget)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        return max(1, (self.budget - self.outside) // UNKNOWN)

    def settled(
        self, problem: Problem, ask: Callable[[Problem], Answer], over: Callable[[Problem, Answer], int]
    ) -> tuple[Problem, Answer]:
        """An answer whose segments are within the budget, and the problem that it is of, with less bytes if need be.

        Args:
            over: by how many bytes an answer's plan is over the budget.
        """
        known = None  # bytes for which there was a plan, with too large segments
        for attempt in range(ATTEMPTS):
            last, answer = attempt == ATTEMPTS - 1, None
            try:
                answer = ask(problem)
            except (BudgetTooSmall, NothingFound):
                if known is None or last:
                    raise
            if known is not None and not last and (answer is None or answer.plan is None):
                problem = replace(problem, budget_bytes=(problem.budget_bytes + known) // 2)
                continue
            assert answer is not None, "without an answer it was raised why"
            more = 0 if answer.plan is None else over(problem, answer)
            if not more:
                break
            if last:
                log.warning("the allocator may reserve up to %s more than the budget", readable(more))
                break
            log.info("segments of the allocator take %s more than the budget: planning for less", readable(more))
            known = min(problem.budget_bytes, answer.peak_bytes or problem.budget_bytes)
            problem = lowered(problem, answer, more, attempt)
        assert answer is not None
        return problem, answer


def lowered(problem: Problem, answer: Answer, over: int, attempt: int) -> Problem:
    """The problem with less bytes than an answer's plan takes, which is so many over.

    Segments are coarse: a little less may be no segment less, so each time twice what is over is taken off.
    """
    size = min(problem.budget_bytes, answer.peak_bytes or problem.budget_bytes)
    return replace(problem, budget_bytes=max(0, size - (over << attempt)))


def rehearsed(
    device: Accelerator, step: Callable[[], object], update: UpdateBlocks, clear: Callable[[], object] | None = None
) -> int:
    """The reserved bytes of some real steps, from an empty cache, with all that this process has on the device.

    Args:
        step: a forward and a backward pass.
        update: blocks of these sizes stand for what the optimizer's steps will make.
        clear: frees gradients after each step; None: they stay.
    """

    def blocks(sizes: list[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device.device) for size in sizes]

    gc.collect()
    device.synchronize()
    device.module.empty_cache()
    device.reset_peaks()
    try:
        state: list[torch.Tensor] = []
        for _ in range(STEPS):
            step()
            state = state or blocks(update.state)
            blocks(update.copies)
            if clear is not None:
                clear()
        return int(device.memory().peak_reserved)
    finally:
        state = []
        device.synchronize()
        device.module.empty_cache()
