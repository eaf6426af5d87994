"""States of random generators: noted, put back, and own ones for what is measured.

The default generators are the process's: what is put back after a while is wound back under every other thread, whose
numbers then come twice. So planning draws from generators of its own, and puts back only after a single kernel, or a
single call of Python's `random`, that can be given none.

Besides those of torch's devices these are Python's own and numpy's, from which the code of a module may draw as well.
To read and to set one of these two takes up to 50 µs, 625 numbers one by one, though mostly nothing has been drawn
since the last time. Whether anything has is seen in the memory in which a generator keeps its state, in 2 µs.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch

from . import _compat
from .device import KINDS, Device, of, with_generators

_HOST = of("cpu")

_DRAWING = ("cpu", *KINDS)
"""Kinds of devices that have generators."""


class Watched:
    """The state of a random generator, which is read and set only where that tells or changes anything.

    Args:
        things: gives the objects of C in whose structs the state is; none where it is elsewhere.
        read, write: read and set the state.
        beside: gives what else the state consists of.
    """

    def __init__(
        self,
        things: Callable[[], tuple[object, ...]],
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        beside: Callable[[], object],
    ) -> None:
        self._things, self._read, self._write, self._beside = things, read, write, beside
        self._holders: tuple[object, ...] = ()
        self._views: list[memoryview] = []
        self._seen: list[memoryview] = []
        self._rest: object = None
        self._state: Any = None

    def state(self) -> Any:
        """The state now: the same object as before where it has not changed."""
        if self.moved():
            self._note(self._read())
        return self._state

    def set(self, state: Any) -> None:
        """Set the state."""
        if state is not self._state or self.moved():
            self._write(state)
            self._note(state)

    def moved(self) -> bool:
        """Whether the state may differ from the one that was last read or set here."""
        return not self._same(self._things()) or self._views != self._seen or self._beside() != self._rest

    def _same(self, things: tuple[object, ...]) -> bool:
        return bool(things) and len(things) == len(self._holders) and all(map(is_, things, self._holders))

    def _note(self, state: Any) -> None:
        things = self._things()
        if not self._same(things):
            self._holders, self._views = things, [_memory(thing) for thing in things]
        self._seen = [memoryview(view.tobytes()).cast("Q") for view in self._views]
        self._rest, self._state = self._beside(), state


def _memory(thing: object) -> memoryview:
    """The words of the struct of an object of C, which lies where CPython's identities say."""
    view = ctypes.pythonapi.PyMemoryView_FromMemory
    view.restype, view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    head = object.__basicsize__
    found: memoryview = view(id(thing) + head, type(thing).__basicsize__ - head, 0x100)  # PyBUF_READ
    return found.cast("Q")


def python_watched(generator: random.Random) -> Watched:
    """A generator of Python's: its struct holds the words and which is next, an attribute half of a pair of normals."""
    beside = vars(generator)
    return Watched(lambda: (generator,), generator.getstate, generator.setstate, lambda: beside["gauss_next"])


def numpy_watched(generator: Any, bits: Callable[[], Any]) -> Watched:
    """A `numpy.random.RandomState`, which holds half of a pair of normals, over a bit generator, which holds the words.

    Of bit generators only a Mersenne Twister is known to have them in its own struct.
    """
    twister = sys.modules["numpy"].random.MT19937

    def things() -> tuple[object, ...]:
        now = bits()
        return (generator, now) if type(now) is twister else ()

    # the older form of a state is one of a Twister only
    return Watched(things, lambda: generator.get_state(legacy=False), generator.set_state, lambda: None)


def _tells(trial: Watched, draws: Sequence[Callable[[], Any]], words: Callable[[], Any], holder: object) -> bool:
    """Whether memory holds the words of a state, and shows each number that is drawn, be it the second of a pair.

    So it is with CPython 3.11 to 3.14 and numpy 2. Anywhere else states are read and set each time.
    """
    if sys.implementation.name != "cpython":
        return False
    for draw in draws:
        trial.state()
        still = not trial.moved()
        draw()
        if not (still and trial.moved()):
            return False
    return struct.pack("=624I", *words()) in _memory(holder).tobytes()


@cache
def _python() -> Watched:
    trial = random.Random(3)
    draws = (trial.random, trial.random, lambda: trial.gauss(0, 1), lambda: trial.gauss(0, 1))
    told = _tells(python_watched(trial), draws, lambda: trial.getstate()[1][:-1], trial)
    own: Any = random.random.__self__  # type: ignore[attr-defined]
    return python_watched(own) if told else Watched(tuple, random.getstate, random.setstate, lambda: None)


@cache
def _numpy() -> Watched:
    numpy = sys.modules["numpy"].random
    bits = numpy.MT19937(3)
    trial = numpy.RandomState(bits)
    draws = (trial.random_sample, trial.random_sample, trial.standard_normal, trial.standard_normal)
    told = _tells(numpy_watched(trial, lambda: bits), draws, lambda: trial.get_state()[1], bits)
    return numpy_watched(numpy.get_state.__self__, numpy.get_bit_generator if told else lambda: None)


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
            _python().set(self.python)
        if self.numpy is not None:
            _numpy().set(self.numpy)

    def drawn_from(self) -> Generators:
        """Without Python's and numpy's where nothing has drawn from them since."""
        python = None if self.python is None or _python().state() is self.python else self.python
        numpy = None if self.numpy is None or _numpy().state() is self.numpy else self.numpy
        return self._replace(python=python, numpy=numpy)

    def restore_torch(self) -> None:
        """Put back those of torch's devices alone."""
        for device, state in self.states:
            device.set_generator_state(state)


def noted(device: torch.device | None = None) -> Generators:
    """The states now: of the host and of one device, or of all devices that this process has used."""
    devices = with_generators() if device is None else [_HOST] if device.type == "cpu" else [_HOST, of(device)]
    states = tuple((found, found.generator_state()) for found in devices)
    return Generators(states, _python().state(), _numpy().state() if "numpy" in sys.modules else None)


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

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
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
            self._made[device] = torch.Generator(device).manual_seed(self._seed)
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
