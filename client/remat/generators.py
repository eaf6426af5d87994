"""States of random generators: noted, put back, and kept over what draws from them in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .device import Device, of, with_generators


class Generators(NamedTuple):
    """The states of some devices' default generators when they were noted."""

    states: tuple[tuple[Device, torch.Tensor], ...]

    def restore(self) -> None:
        """Put them back."""
        for device, state in self.states:
            device.set_generator_state(state)


def noted(device: torch.device | None = None) -> Generators:
    """The states now: of the host and of one device, or of all devices that this process has used."""
    devices = with_generators() if device is None else [of(d) for d in dict.fromkeys((torch.device("cpu"), device))]
    return Generators(tuple((found, found.generator_state()) for found in devices))


@contextlib.contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    before = noted(device)
    try:
        yield
    finally:
        before.restore()
