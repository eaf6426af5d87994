"""What a stage's first run saw, so that later runs of it see the same: random numbers, buffers, its modules' own state.

That are their Python attributes, their train mode and random generators of their own. A later run gets them as they
were, and what it leaves there is thrown away.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import generators
from .._compat import MODULES_OWN, buffers_of, version_counter
from ..capture.dataflow import tensors
from ..errors import CaptureError

Noted: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Modules with attributes of theirs."""

CONTAINERS = (list, dict, set, deque)
"""What code changes in place; anything else that is no tensor and no generator is taken for a value."""


def draws_apart(module: nn.Module, device: torch.device) -> bool:
    """Whether a module's dropout has a state of its own on a device: cuDNN's RNNs, between their layers.

    cuDNN's state is seeded from the generator once that has been set, and moves on by itself from then on
    (aten/src/ATen/native/cudnn/RNN.cpp, get_dropout_state).
    """
    rnns = (m for m in module.modules() if isinstance(m, nn.RNNBase))
    return device.type != "cpu" and any(m.training and m.dropout > 0 and m.num_layers > 1 for m in rnns)


class SavedState:
    """The generators' states, the buffers and the attributes of a stage's modules before it first runs.

    Where its dropout has a state of its own, the first run seeds that from the generator, as every later one does: the
    masks of all runs are the same, and other ones than without a plan.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.generators = generators.noted(device)
        if draws_apart(module, device):
            self.generators.restore()
        self.buffers = [(m, n, b.clone()) for m in module.modules() for n, b in buffers_of(m).items() if b is not None]
        found = [(m, attributes_of(m)) for m in module.modules()]
        self.attributes: Noted = [(m, {n: _copied(value) for n, value in own.items()}) for m, own in found]
        self._own = [_state_of(value) for _, own in found for value in own.values() if _keeps_a_state(value)]
        kept = [(n, t) for _, own in found for n, value in own.items() for t in tensors(value)]
        held = [(n, t) for n, t in (*module.named_parameters(), *kept) if not t.is_inference()]
        self._held = [(n, t, version_counter(t)) for n, t in held]

    def check(self, what: str) -> None:
        """Look at what the first run has left.

        Raises:
            CaptureError: it has written to a tensor that no later run finds as it was.
        """
        for name, tensor, version in self._held:
            if version_counter(tensor) != version:
                raise CaptureError(
                    f"{what} writes in place to {name}, which is no buffer, and the plan runs it again: register it as "
                    "a buffer"
                )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was; afterwards, everything as it is now."""
        now = [(m, n, buffers_of(m)[n]) for m, n, _ in self.buffers]
        attributes: Noted = [(m, attributes_of(m)) for m, _ in self.attributes]
        own = [(put, get()) for get, put, _ in self._own]
        with generators.kept(self.device):
            try:
                self.generators.restore()
                for _, put, state in self._own:
                    put(state)
                for module, name, value in self.buffers:
                    buffers_of(module)[name] = value.clone()
                _put([(m, {n: _copied(value) for n, value in saved.items()}) for m, saved in self.attributes])
                yield
            finally:
                for module, name, buffer in now:
                    buffers_of(module)[name] = buffer
                _put(attributes)
                for put, state in own:
                    put(state)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module's own code keeps on it, and its train mode; nothing of a wrapper that speaks with other ranks."""
    if isinstance(module, (DistributedDataParallel, *_older_fsdp())):
        return {}
    return {name: value for name, value in vars(module).items() if name not in MODULES_OWN}


def _older_fsdp() -> tuple[type, ...]:
    found = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return () if found is None else (found,)


def _put(wanted: Noted) -> None:
    for module, own in wanted:
        for name in attributes_of(module).keys() - own.keys():
            del module.__dict__[name]
        module.__dict__.update(own)


def _copied(value: Any) -> Any:
    """A container of its own with the same things in it; anything else is what it is."""
    return type(value)(value) if type(value) in CONTAINERS else value


def _keeps_a_state(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any], Any]:
    """How the state of a random generator is read and set, and what it is now."""
    get, put = getattr(generator, "get_state", None), getattr(generator, "set_state", None)
    if isinstance(generator, random.Random):
        get, put = generator.getstate, generator.setstate
    if get is None or put is None:  # numpy's newer ones
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state
    return get, put, get()


def saved_state_bytes(module: nn.Module, device: torch.device) -> int:
    """The bytes on a device that the saved state of a module take; states of generators lie in the host's memory."""
    generator = torch.get_rng_state().numel() if device.type == "cpu" else 0
    return generator + sum(b.numel() * b.element_size() for b in module.buffers())
