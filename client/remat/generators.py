"""States of random generators: noted, put back, and own ones for what is measured.

The default generators are the process's: what is put back after a while is wound back under every other thread, whose
numbers then come twice. So planning draws from generators of its own, and puts back only after a single kernel, or a
single call of Python's `random`, that can be given none.

Besides those of torch's devices these are Python's own and numpy's, from which the code of a module may draw as well.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import _compat
from .device import KINDS, Device, of, with_generators

_HOST = of("cpu")

_DRAWING = ("cpu", *KINDS)
"""Kinds of devices that have generators."""


def _numpy_state() -> Any:
    """Numpy's global state, whatever its bit generator; None where numpy has not been imported."""
    return sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None


def _same(one: Any, other: Any) -> bool:
    """Whether two states of numpy's are one: dictionaries of numbers and of arrays."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    found: Any = one == other
    return bool(found.all() if hasattr(found, "all") else found)


class Generators(NamedTuple):
    """The states of some devices' default generators when they were noted, and of the global ones of Python and numpy.

    Attributes:
        python, numpy: None where they are not put back: numpy has not been imported, or see `drawn_from`.
    """

    states: tuple[tuple[Device, torch.Tensor], ...]
    python: Any
    numpy: Any

    def restore(self) -> None:
        """Put them back."""
        self.restore_torch()
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def drawn_from(self) -> Generators:
        """Without Python's and numpy's where nothing has drawn from them since."""
        python = None if self.python == random.getstate() else self.python
        numpy = None if self.numpy is None or _same(_numpy_state(), self.numpy) else self.numpy
        return self._replace(python=python, numpy=numpy)

    def restore_torch(self) -> None:
        """Put back those of torch's devices alone."""
        for device, state in self.states:
            device.set_generator_state(state)


def noted(device: torch.device | None = None) -> Generators:
    """The states now: of the host and of one device, or of all devices that this process has used."""
    devices = with_generators() if device is None else [_HOST] if device.type == "cpu" else [_HOST, of(device)]
    states = tuple((found, found.generator_state()) for found in devices)
    return Generators(states, random.getstate(), _numpy_state())


@contextlib.contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    before = noted(device)
    try:
        yield
    finally:
        before.restore()


def draws(target: Any) -> bool:
    """Whether an operator draws from a generator."""
    return isinstance(target, _compat.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


class Own(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the kernels that this thread calls draw from generators of its own.

    Attributes:
        drew: whether one has.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[torch.device, torch.Generator] = {}
        self.drew = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs as it is."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not draws(func):
            return func(*args, **(kwargs or {}))
        self.drew = True
        return self.call(func, args, kwargs or {})()

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | Restoring:
        """A random operator's call with a generator of its own.

        Where it takes none, the state of its device's default generator is put back after each call.
        """
        found = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        device = found[0].device if found else torch.device(kwargs.get("device") or "cpu")
        if kwargs.get("generator") is not None or device.type not in _DRAWING:
            return lambda: target(*args, **kwargs)
        taking = _compat.taking_generator(target)
        if taking is not None and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in found):
            run, given = _compat.raw_call(taking), {**kwargs, "generator": self.on(device)}
            return lambda: run(*args, **given)
        return Restoring(lambda: target(*args, **kwargs), of(device))

    def on(self, device: torch.device) -> torch.Generator:
        """Its generator on a device."""
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(0)
        return self._made[device]


class Restoring:
    """A kernel that can be given no generator: after it the default ones are as they were before.

    Attributes:
        kernel: what runs it.
        device: whose generator it draws from; None where it may draw from any, Python's and numpy's too.
    """

    def __init__(self, kernel: Callable[[], Any], device: Device | None) -> None:
        self.kernel, self.device = kernel, device

    def __call__(self) -> Any:
        """Run it."""
        with self.around():
            return self.kernel()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Put back the states afterwards."""
        if self.device is None:
            with kept():
                yield
            return
        before = self.device.generator_state()
        try:
            yield
        finally:
            self.device.set_generator_state(before)


_MEASURED = Own()


def own(device: torch.device) -> torch.Generator | None:
    """The generator on a device for what is measured; None on one that has no numbers, such as "meta"."""
    return _MEASURED.on(device) if device.type in _DRAWING else None


def call(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], anything: bool = False
) -> Callable[[], Any] | Restoring:
    """A kernel's call, by the operator's own entry, that leaves the default generators as they are.

    Args:
        anything: whether it is an operator of which nothing is known, and may draw from any generator.
    """
    run = _compat.raw_call(target)
    if anything:
        return Restoring(lambda: run(*args, **kwargs), None)
    return _MEASURED.call(target, args, kwargs) if draws(target) else lambda: run(*args, **kwargs)
