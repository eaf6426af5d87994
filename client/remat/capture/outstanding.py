"""Calls whose backward pass is still to come, where torch may run them again and needs the same plan for that."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from .. import _compat
from ..device import capturing
from .dataflow import tensors


class _Call:
    """One call, held by autograd's node of its output alone."""

    over = False


class Outstanding:
    """The calls under hooks of saved tensors that have not ended: in a checkpoint's region, which runs twice.

    The second run must save what the first one saved, which another plan does not.
    """

    def __init__(self) -> None:
        self._calls: list[weakref.ref[_Call]] = []

    def note(self, output: Any) -> None:
        """A call has run forward, with this output."""
        if not _compat.saved_tensors_have_hooks() or _compat.backward_task() != -1:
            return
        for node in {t.grad_fn for t in tensors(output) if t.grad_fn is not None}:
            call = _Call()
            node.metadata[self] = call  # type: ignore[index]  # a dict, which torch's stub calls a method
            self._calls.append(weakref.ref(call))
            node.register_prehook(partial(_end, self._calls[-1]))

    def may_change(self) -> bool:
        """Whether a call that begins now may run by another plan than the last one: in a new step."""
        if capturing() or (_compat.backward_task() != -1 and _compat.saved_tensors_have_hooks()):
            return False
        self._calls = [call for call in self._calls if (found := call()) is not None and not found.over]
        return not self._calls


def _end(call: weakref.ref[_Call], _: Any) -> None:
    found = call()
    if found is not None and not _compat.keeps_graph():
        found.over = True
