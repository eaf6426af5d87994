"""States of random generators: noted, put back, and kept over what draws from them in between.

Besides those of torch's devices these are Python's own and numpy's, from which the code of a module may draw as well.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .device import Device, of, with_generators


class Generators(NamedTuple):
    """The states of some devices' default generators when they were noted, and of the global ones of Python and numpy.

    Attributes:
        numpy: None where numpy has not been imported.
    """

    states: tuple[tuple[Device, torch.Tensor], ...]
    python: Any
    numpy: Any

    def restore(self) -> None:
        """Put them back."""
        for device, state in self.states:
            device.set_generator_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def noted(device: torch.device | None = None) -> Generators:
    """The states now: of the host and of one device, or of all devices that this process has used."""
    numpy = sys.modules.get("numpy")
    devices = with_generators() if device is None else [of(d) for d in dict.fromkeys((torch.device("cpu"), device))]
    states = tuple((found, found.generator_state()) for found in devices)
    return Generators(states, random.getstate(), None if numpy is None else numpy.random.get_state())


@contextlib.contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    before = noted(device)
    try:
        yield
    finally:
        before.restore()
