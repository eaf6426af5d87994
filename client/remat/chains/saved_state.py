"""What a stage's first run saw, random numbers and buffers, so that every later run of it sees the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .. import generators
from .._compat import buffers_of


def draws_apart(module: nn.Module, device: torch.device) -> bool:
    """Whether a module's dropout has a state of its own on a device: cuDNN's RNNs, between their layers.

    cuDNN's state is seeded from the generator once that has been set, and moves on by itself from then on
    (aten/src/ATen/native/cudnn/RNN.cpp, get_dropout_state).
    """
    rnns = (m for m in module.modules() if isinstance(m, nn.RNNBase))
    return device.type != "cpu" and any(m.training and m.dropout > 0 and m.num_layers > 1 for m in rnns)


class SavedState:
    """The generators' states and the buffers before a stage first runs.

    Where its dropout has a state of its own, the first run seeds that from the generator, as every later one does: the
    masks of all runs are the same, and other ones than without a plan.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.generators = generators.noted(device)
        if draws_apart(module, device):
            self.generators.restore()
        self.buffers = [(m, n, b.clone()) for m in module.modules() for n, b in buffers_of(m).items() if b is not None]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was; afterwards, everything as it is now."""
        now = [(m, n, buffers_of(m)[n]) for m, n, _ in self.buffers]
        with generators.kept(self.device):
            try:
                self.generators.restore()
                for module, name, value in self.buffers:
                    buffers_of(module)[name] = value.clone()
                yield
            finally:
                for module, name, buffer in now:
                    buffers_of(module)[name] = buffer


def saved_state_bytes(module: nn.Module, device: torch.device) -> int:
    """The bytes on a device that the saved state of a module take; states of generators lie in the host's memory."""
    generator = torch.get_rng_state().numel() if device.type == "cpu" else 0
    return generator + sum(b.numel() * b.element_size() for b in module.buffers())
