"""A step's peak by the lifetimes of its storages, whichever thread ends them."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from .. import _compat
from ..capture.dataflow import tensors
from .measure import Peak


class Lifetimes(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A window as `Window`, in which storages are counted until they are gone, and not what an allocator tells.

    A CPU's allocator tells a thread of what that thread frees alone, and a backend's threads free what collectives have
    used. What a kernel allocates for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._start = self._peak = 0

    def open(self) -> None:
        """From now on."""
        self._start = self._peak = self._bytes()
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> Peak:
        """Until now: the peak and what is left, in bytes above the beginning."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        most = self._peak - self._start
        return Peak(most, self._bytes() - self._start, most)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {_compat.storage_key(t) for t in tensors((args, kwargs))}
        for tensor in tensors(results):
            key = _compat.storage_key(tensor)
            if key not in given:
                storage = tensor.untyped_storage()
                self._live[key] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._peak = max(self._peak, self._bytes())
        return results

    def _bytes(self) -> int:
        gone = [key for key, (storage, _) in self._live.items() if storage.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._live[key]
        return sum(size for _, size in self._live.values())
