"""Bytes of the storages that operators make while something runs, on fake tensors as on real ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import _compat
from ..capture.dataflow import tensors
from ..device import storage_bytes


class NeedsNumbers(Exception):
    """Something that runs on fake tensors asks which way to go."""


class Allocations(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages from their making to their end, while it is entered.

    Args:
        device: the kind of device that counts, such as "cuda".
        read_as: what a number that is read from a tensor is taken for, where that has none; a bool cannot be.

    Attributes:
        now: bytes that are there of what has been made so far.
    """

    def __init__(self, device: str, read_as: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._device, self._read_as = device, read_as
        self._peak = 0
        self._held: dict[int, int] = {}

    def most(self, run: Callable[[], object]) -> int:
        """The most bytes of what has been made so far, while something runs."""
        self._peak = self.now
        run()
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._read_as is not None and func is _compat.READ_NUMBER:
            if args[0].dtype is torch.bool:
                raise NeedsNumbers
            return self._read_as if args[0].dtype.is_floating_point else int(self._read_as)
        made = func(*args, **(kwargs or {}))
        for tensor in tensors(made):
            self._see(tensor)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        key = _compat.storage_key(tensor)
        if tensor.device.type == self._device and key not in self._held:
            size = storage_bytes(tensor)
            self._held[key] = size
            self.now += size
            self._peak = max(self._peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._held.pop(key)
