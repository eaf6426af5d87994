"""Gradients for the caller's own hooks: given to each parameter inside the backward pass, as soon as they are complete.

A hook that runs after a gradient has been accumulated may step an optimizer and free the gradient. Autograd would run
it when the whole planned backward pass has returned, with all gradients there at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _compat

log = logging.getLogger("remat")

IN_PART = (
    "a parameter's hooks have run inside the planned backward pass, and the same loss reads the parameter outside of "
    "the module, so that they saw a part of its gradient: compute all of the loss in the module that is planned"
)

MOST_WAITED_S = 60.0
"""For a pass of another thread; longer, and it has ended by an exception."""


class _Pass(threading.local):
    """The backward pass that a thread runs."""

    def __init__(self) -> None:
        self.state: Sequence[torch.Tensor] = ()
        self.averaged = self.delivers = False
        self.whole_task = -1
        self.returned: dict[int, torch.Tensor] = {}


class Delivery:
    """What gives gradients to parameters whose hooks free them: `register_post_accumulate_grad_hook`, and no others.

    A backward pass in which a gradient may be in parts, or not be wanted, returns all gradients at its end as autograd
    expects them: another forward pass waits for its own, another thread runs one, `torch.autograd.grad`, hooks on the
    gradient itself, DDP. Where one gives gradients itself, those of other threads begin after it: autograd's own
    accumulation is safe against itself alone.

    Attributes:
        together: it takes the gradients of all parameters, or returns all of them.
        kept: whether a hook has been seen to leave a gradient there; plans count it from then on.
    """

    together = True

    def __init__(self) -> None:
        self.kept = False
        self._pass = _Pass()
        self._changed = threading.Condition()
        self._waiting: list[weakref.ref[Any]] = []
        self._running: dict[threading.Thread, tuple[int, bool]] = {}

    def workspace(self, parameter: torch.Tensor) -> int | None:
        """Bytes that a hook is known to take while it runs: none. None where gradients are returned at the end."""
        alone = _compat.has_hooks_after_accumulation_alone(parameter) and parameter.grad is None
        return 0 if alone and parameter.is_leaf and parameter.requires_grad and not self.kept else None

    def outdated(self) -> str:
        """Why plans made until now count too little, for the log; empty: they do not."""
        return "gradients that their hooks leave there" if self.kept else ""

    def before_forward(self, parameters: Sequence[torch.Tensor]) -> None:
        """Every forward pass is taken."""

    def after_forward(self, node: Any, state: Sequence[torch.Tensor]) -> None:
        """A step has begun that ends where autograd runs a node; `state` are the tensors that it took first."""
        waiting, averaged = weakref.ref(node), _compat.active_ddp() is not None
        with self._changed:
            self._waiting.append(waiting)
        node.register_prehook(lambda _: self._reached(waiting, state, averaged))

    def _reached(self, node: weakref.ref[Any], state: Sequence[torch.Tensor], averaged: bool) -> None:
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not node and other() is not None]
        self._pass.state, self._pass.averaged = state, averaged

    def begin(self, positions: Sequence[int]) -> None:
        """The backward pass of the step begins, with gradients for the parameters at these positions.

        Raises:
            RuntimeError: hooks of one of them have run in this very pass, in another planned module.
        """
        task, mine = _compat.backward_task(), self._pass
        parameters = [mine.state[position] for position in positions]
        thread = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: not any(self._others(thread)), MOST_WAITED_S)
            whole = self._waiting or task == mine.whole_task or mine.averaged or self._others(thread)
            mine.delivers = not whole and all(map(_compat.will_accumulate, parameters))
            delivers = mine.delivers or self._running.get(thread) == (task, True)  # several planned calls in one pass
            self._running[thread] = task, delivers
        _compat.when_backward_ends(lambda: self._ended(thread))
        if not mine.delivers:
            mine.whole_task = task
        elif not all(_compat.accumulate_by_hand(parameter, IN_PART) for parameter in parameters):
            raise RuntimeError(IN_PART)

    def _others(self, thread: threading.Thread) -> list[bool]:
        """For each backward pass of another thread: whether it gives gradients itself."""
        return [gives for other, (_, gives) in self._running.items() if other is not thread and other.is_alive()]

    def _ended(self, thread: threading.Thread) -> None:
        with self._changed:
            self._running.pop(thread, None)
            self._changed.notify_all()

    @torch.no_grad()
    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Give one parameter its gradient as autograd does, and run its hooks."""
        if not self._pass.delivers:
            self._pass.returned[position] = gradient
            return
        parameter = self._pass.state[position]
        if parameter.grad is not None:
            parameter.grad += gradient
        else:
            parameter.grad = owned(gradient, parameter)
        _compat.run_hooks_after_accumulation(parameter)
        if parameter.grad is not None and not self.kept:
            log.info("a hook leaves its gradient there: the next step is planned with all gradients at its end")
            self.kept = True

    def end(self, results: Sequence[Any], places: Mapping[int, int]) -> Sequence[Any]:
        """What the backward function returns, with the gradients that were not given away.

        Args:
            places: where the gradient of the parameter at a position stands in the results.
        """
        left, self._pass.returned = self._pass.returned, {}
        if not left:
            return results
        found = list(results)
        for position, gradient in left.items():
            found[places[position]] = gradient
        return tuple(found)


def owned(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient as it may stay with a parameter: in its layout, with nothing else in its storage."""
    alone = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if alone and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
