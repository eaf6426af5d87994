"""What a stage's first run saw, so that later runs of it see the same: random numbers, buffers, its modules' own state.

That are their Python attributes, their train mode and random generators of their own. A later run gets them as they
were, and what it leaves there is thrown away. It costs time in each run of each stage, so all is looked at in one pass,
and put in its place only where something else is there.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import is_, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import generators
from .._compat import MODULES_OWN, buffers_of, parameters_of, version_counter
from ..errors import CaptureError

CONTAINERS = (list, dict, set, deque)
"""What code changes in place; anything else that is no tensor and no generator is taken for a value."""

VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size})
"""Types of values in which there is nothing to look for."""


Buffers: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Modules and all buffers of each, by name."""


def draws_apart(module: nn.Module, device: torch.device) -> bool:
    """Whether a module's dropout has a state of its own on a device: cuDNN's RNNs, between their layers.

    cuDNN's state is seeded from the generator once that has been set, and moves on by itself from then on
    (aten/src/ATen/native/cudnn/RNN.cpp, get_dropout_state).
    """
    rnns = (m for m in module.modules() if isinstance(m, nn.RNNBase))
    return device.type != "cpu" and any(m.training and m.dropout > 0 and m.num_layers > 1 for m in rnns)


class _Attributes(NamedTuple):
    """What a module's own code keeps on it, and how many things it has in all."""

    module: nn.Module
    names: tuple[str, ...]
    get: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    size: int

    @classmethod
    def of(cls, module: nn.Module, wrappers: tuple[type, ...]) -> _Attributes:
        there = vars(module)
        names, get = _own(() if isinstance(module, wrappers) else tuple(there))
        return cls(module, names, get, get(there), len(there))

    def there(self) -> bool:
        now = vars(self.module)
        try:
            return len(now) == self.size and all(map(is_, self.get(now), self.values))
        except KeyError:
            return False

    def again(self) -> _Attributes:
        return self.of(self.module, _wrappers())

    def put(self) -> None:
        for name in attributes_of(self.module).keys() - set(self.names):
            del self.module.__dict__[name]
        self.module.__dict__.update(zip(self.names, self.values, strict=True))


@lru_cache(maxsize=4096)
def _own(names: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Those of a module's names that are its own code's, and what gets the values of them all."""
    own = tuple(name for name in names if name not in MODULES_OWN)
    if len(own) > 1:
        return own, itemgetter(*own)
    return own, lambda there: tuple(there[name] for name in own)


@lru_cache(maxsize=4096)
def _open(kinds: tuple[type, ...]) -> tuple[int, ...]:
    """Which of some values, by their types, may hold what changes."""
    return tuple(i for i, kind in enumerate(kinds) if kind not in VALUES)


class _Contents(NamedTuple):
    """What is in a container, which itself stays the one that others may know."""

    container: Any
    items: Any

    @classmethod
    def of(cls, container: Any) -> _Contents:
        return cls(container, container.copy())

    def there(self) -> bool:
        now, items = self
        same = len(now) == len(items) and all(map(is_, now, items))
        return same and (type(now) is not dict or all(map(is_, now.values(), items.values())))

    def again(self) -> _Contents:
        return self.of(self.container)

    def put(self) -> None:
        self.container.clear()
        (self.container.extend if type(self.container) in (list, deque) else self.container.update)(self.items)


class _Own(NamedTuple):
    """The state of a random generator of a module's own: how it is read and set, and what it is."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any

    @classmethod
    def of(cls, generator: Any) -> _Own:
        get, put = getattr(generator, "get_state", None), getattr(generator, "set_state", None)
        if isinstance(generator, random.Random):
            get, put = generator.getstate, generator.setstate
        if get is None or put is None:  # numpy's newer ones
            bits = generator.bit_generator
            return cls(lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state)
        return cls(get, put, get())

    def there(self) -> bool:
        return False  # to compare it takes as long as to set it

    def again(self) -> _Own:
        return self._replace(state=self.get())

    def put(self) -> None:
        self.set(self.state)


class SavedState:
    """The generators' states, the buffers and the attributes of a stage's modules before it first runs.

    Where its dropout has a state of its own, the first run seeds that from the generator, as every later one does: the
    masks of all runs are the same, and other ones than without a plan.

    Args:
        measured: whether the runs are measured only, with generators of their own: the process's stay as they are.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, measured: bool = False) -> None:
        self.device, self._measured = device, measured
        self.generators = generators.noted(device)
        if draws_apart(module, device) and not measured:
            self.generators.restore()
        self._module = module
        self._copies: Buffers = []
        self._noted: list[_Attributes | _Contents | _Own] = []
        self._held: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        containers: set[int] = set()
        wrappers = _wrappers()
        for part in module.modules():
            self._copies.append((part, buffers_of(part).copy()))
            for name, parameter in parameters_of(part).items():
                if parameter is not None:
                    self._hold(part, name, parameter)
            found = _Attributes.of(part, wrappers)
            self._noted.append(found)
            for i in _open(tuple(map(type, found.values))):
                self._look(part, found.names[i], found.values[i], containers)
        self._copies = _cloned(self._copies)

    def _hold(self, part: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_inference():
            self._held.append((part, name, tensor, version_counter(tensor)))

    def _look(self, part: nn.Module, name: str, value: Any, containers: set[int]) -> None:
        """Note what may change of a value that stays the same thing, and of what is in it."""
        kind = type(value)
        if kind is tuple and VALUES.issuperset(map(type, value)):
            return
        if kind in CONTAINERS:
            if id(value) in containers:
                return
            containers.add(id(value))
            self._noted.append(_Contents.of(value))
        if isinstance(value, torch.Tensor):
            self._hold(part, name, value)
        elif isinstance(value, (*CONTAINERS, tuple, Mapping)):
            for item in value.values() if isinstance(value, (dict, Mapping)) else value:
                if type(item) not in VALUES:
                    self._look(part, name, item, containers)
        elif _keeps_a_state(value):
            self._noted.append(_Own.of(value))

    def check(self, what: str) -> None:
        """Look at what the first run has left. Of generators that it has not drawn from no later run sets the state.

        Raises:
            CaptureError: it has written to a tensor that no later run finds as it was.
        """
        self.generators = self.generators.drawn_from()
        for part, name, tensor, version in self._held:
            if version_counter(tensor) != version:
                path = next((path for path, m in self._module.named_modules() if m is part), "")
                raise CaptureError(
                    f"{what} writes in place to {f'{path}.{name}'.lstrip('.')}, which is no buffer, and the plan runs "
                    "it again: register it as a buffer"
                )

    @contextlib.contextmanager
    def restored(self, *, last: bool = False) -> Iterator[None]:
        """Everything as it was; afterwards, everything as it is now.

        Args:
            last: whether no run comes after this one, which may then have the saved buffers themselves.
        """
        drawn, first = generators.noted(self.device), self.generators
        drawn = drawn._replace(python=first.python and drawn.python, numpy=first.numpy and drawn.numpy)
        buffers: Buffers = [(part, buffers_of(part).copy()) for part, _ in self._copies]
        now = [noted if noted.there() else noted.again() for noted in self._noted]
        try:
            if not self._measured:
                self.generators.restore()
            _replace(self._copies if last else _cloned(self._copies))
            for noted, found in zip(self._noted, now, strict=True):
                if found is not noted:
                    noted.put()
            yield
        finally:
            for found in now:
                if not found.there():
                    found.put()
            _replace(buffers)
            if not self._measured:
                drawn.restore()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module's own code keeps on it, and its train mode; nothing of a wrapper that speaks with other ranks."""
    found = _Attributes.of(module, _wrappers())
    return dict(zip(found.names, found.values, strict=True))


def _wrappers() -> tuple[type, ...]:
    older_fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (DistributedDataParallel,) if older_fsdp is None else (DistributedDataParallel, older_fsdp)


def _cloned(buffers: Buffers) -> Buffers:
    """Clones of buffers; one that has several names has one clone."""
    clones: dict[int, torch.Tensor] = {}
    found: Buffers = []
    for part, own in buffers:
        new = own.copy()
        for name, buffer in own.items():
            if buffer is not None:
                clone = clones.get(id(buffer))
                new[name] = clones[id(buffer)] = buffer.clone() if clone is None else clone
        found.append((part, new))
    return found


def _replace(buffers: Buffers) -> None:
    """Give modules these buffers and no others."""
    for part, own in buffers:
        there = buffers_of(part)
        if there or own:
            there.clear()
            there.update(own)


def _keeps_a_state(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def saved_state_bytes(module: nn.Module, device: torch.device) -> int:
    """The bytes on a device that the saved state of a module take; states of generators lie in the host's memory."""
    generator = torch.get_rng_state().numel() if device.type == "cpu" else 0
    return generator + sum(b.numel() * b.element_size() for b in module.buffers())
