"""The calls of a backend whose backward pass may still come: what they hold is there while others run."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import _compat
from ..capture.dataflow import tensors
from ..device import capturing
from ..planning.division import Option, Stack

if TYPE_CHECKING:
    from .plans import PlannedSizes, Point


NO_SECOND = (
    "a second derivative is asked for through a step that runs by a plan, and a plan has the first alone: call "
    "remat.disable(model) for such steps, or take the derivative by torch.autograd.grad(…, create_graph=True) inside "
    "the model's forward, which is then planned with it"
)


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One call.

    Attributes:
        stack: the calls that were outstanding when it began, and itself at the end.
        planned: the graph at its sizes.
        point: the plan by which it runs, to its end; None: its graph's own.
    """

    stack: Stack
    planned: PlannedSizes
    point: Point | None

    @property
    def option(self) -> Option:
        """What its plan comes to."""
        return (self.point or self.planned.own).option


_ENDS: dict[tuple[int, int], Callable[[], None]] = {}
"""What is called when the backward function that runs next in a thread's backward pass has ended."""


def _pass() -> tuple[int, int]:
    return threading.get_ident(), _compat.backward_task()


def noting_end(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A backward function after which `Calls` knows that it has run. A hook behind autograd's node says so, too, but
    with one autograd keeps the gradients that arrive until the pass has ended."""

    def run(args: list[Any]) -> Any:
        ended = _ENDS.pop(_pass(), None)
        results = function(args)
        if ended is not None:
            ended()
        return results

    return _compat.boxed(run)


class _Token:
    """Held by autograd's node of a call alone: it goes when no backward pass can come any more; `over`: one has run."""

    over = False


class Calls:
    """Those that are outstanding, the oldest first, and whether a backward pass has run since a step began.

    A call is outstanding until its backward pass has run without the graph being kept, or its node in autograd's graph
    is gone. Nothing is a thread's own: the backward passes of an accelerator run in a thread of its own.

    Args:
        before, after: called when the backward pass of a call begins, and when it has run.

    Attributes:
        passed: whether a backward pass has run: the next forward call begins a step.
    """

    def __init__(self, before: Callable[[Call], None], after: Callable[[Call], None]) -> None:
        self._before, self._after = before, after
        self._numbers = itertools.count()
        self._found: dict[int, Call] = {}
        self.passed = False

    def outstanding(self) -> tuple[Call, ...]:
        """Those that are, the oldest first."""
        return tuple(self._found.copy().values())

    def stack(self, planned: PlannedSizes) -> Stack:
        """Of a call that is about to run."""
        return *(call.planned.number for call in self.outstanding()), planned.number

    def note(self, call: Call, inputs: Sequence[object], results: object) -> None:
        """A call has run forward; where gradients come back to it, it is outstanding from now on."""
        node = _compat.compiled_node(tensors(results), tensors(inputs), self)
        if node is None:
            return
        number, found = next(self._numbers), self._found
        token, reference = _Token(), weakref.ref(node)  # a hook that held its own node would keep it for good
        node.metadata[self] = token
        found[number] = call
        weakref.finalize(token, found.pop, number, None).atexit = False

        def before(_: object) -> None:
            if torch.is_grad_enabled():
                _compat.when_differentiated(reference(), NO_SECOND)
            self._before(call)
            _ENDS[_pass()] = after

        def after() -> None:
            self.passed = True
            if not _compat.keeps_graph():
                found.pop(number, None)
            self._after(call)

        node.register_prehook(before)


class Outstanding:
    """The calls under hooks of saved tensors that have not ended: in a checkpoint's region, which runs twice.

    The second run must save what the first one saved, which another plan does not.
    """

    def __init__(self) -> None:
        self._calls: list[weakref.ref[_Token]] = []

    def note(self, output: object) -> None:
        """A call has run forward, with this output."""
        if not _compat.saved_tensors_have_hooks() or _compat.backward_task() != -1:
            return
        for node in {t.grad_fn for t in tensors(output) if t.grad_fn is not None}:
            token = _Token()
            node.metadata[self] = token  # type: ignore[index]  # a dict, which torch's stub calls a method
            self._calls.append(weakref.ref(token))
            node.register_prehook(partial(_end, self._calls[-1]))

    def may_change(self) -> bool:
        """Whether a call that begins now may run by another plan than the last one: in a new step."""
        if capturing() or (_compat.backward_task() != -1 and _compat.saved_tensors_have_hooks()):
            return False
        self._calls = [call for call in self._calls if (found := call()) is not None and not found.over]
        return not self._calls


def _end(call: weakref.ref[_Token], _: object) -> None:
    found = call()
    if found is not None and not _compat.keeps_graph():
        found.over = True
