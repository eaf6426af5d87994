"""Ways to train one step: each is run for what it leaves behind and for its peak, and then timed next to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import nn

from benchmarks.models.zoo import SEED
from remat.profiling.measure import Outcome, differences, forward_backward, outcome, peak_memory, seconds


class Steps:
    """The ways of one model and batch.

    Attributes:
        ways: by name, whose gradients and buffers a step leaves behind, and the step.
        first: what the way that was tried first left behind; the others are compared with it.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        self.inputs = inputs
        self.ways: dict[Hashable, tuple[nn.Module, Callable[[], torch.Tensor]]] = {}
        self.first: Outcome
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def tried(self, name: Hashable, owner: nn.Module, call: Callable[..., object]) -> tuple[Outcome, list[str], int]:
        """Enter a way: what a step of it leaves behind, what of that is not the first way's, and its peak in bytes.

        All begin with the same buffers and seed; the peak is of a second step, above what is there before.
        """
        step = forward_backward(call, (), self.inputs)
        with torch.no_grad():
            for key, buffer in owner.named_buffers():
                buffer.copy_(self._buffers[key])
        left = outcome(owner, step, SEED)
        if not self.ways:
            self.first = left
        owner.zero_grad(set_to_none=True)
        peak = peak_memory(step).peak_bytes
        owner.zero_grad(set_to_none=True)
        self.ways[name] = owner, step
        return left, differences(self.first, left), peak

    def seconds(self, name: Hashable) -> float:
        """Processor seconds of a step that begins without gradients."""
        owner, step = self.ways[name]
        owner.zero_grad(set_to_none=True)
        return seconds(step, clock=time.process_time)
