"""Gradients of parameters: which a backward pass accumulates, hooks on them, and what stands where one was.

For gradients that are released in the backward pass (`remat.training`), and for stages (`remat.chains`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .autograd import backward_task

_BY_HAND = "remat: accumulated by hand in this task"


class _UsedUp(torch.Tensor):
    """What stands where a gradient was that has been used up: any use of it raises, by an operator or by autograd."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, text: str) -> _UsedUp:
        made: _UsedUp = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.text = text
        return made

    text: str

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = [*args, *(kwargs or {}).values()]
        given += [item for each in given if isinstance(each, (list, tuple)) for item in each]
        raise RuntimeError(next(each.text for each in given if isinstance(each, _UsedUp)))


def used_up(like: torch.Tensor, text: str) -> torch.Tensor:
    """A gradient without memory that raises an error with a text whenever somebody reads it or adds to it."""
    return _UsedUp(like, text)


def is_used_up(gradient: Any) -> bool:
    """Whether it is one of `used_up`."""
    return isinstance(gradient, _UsedUp)


def gives_all_gradients() -> bool:
    """Whether the backward pass that runs in this thread accumulates the gradients of all leaves; `torch.autograd.grad`
    and `backward(inputs=…)` want some alone."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


class _Held:
    """Held by a backward pass alone: it goes when that has ended, by an exception too."""


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call something once when the backward pass that runs has ended, its accumulation of gradients included.

    Where it has raised, autograd drops its callbacks uncalled: this one is then called as it goes.
    """
    held = _Held()
    ended = weakref.finalize(held, call)
    ended.atexit = False

    def callback(_: _Held = held) -> None:
        ended()

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks of a parameter's own run on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks) or _node_has_hooks(parameter)


def _node_has_hooks(parameter: torch.Tensor) -> bool:
    """Whether Python's hooks run around the node that accumulates a parameter's gradient, which tells nobody of them:
    those that are there share a dict with one that is added."""
    if not (parameter.is_leaf and parameter.requires_grad):
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    found = False
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(lambda *_: None)
        found |= len(handle.hooks_dict_ref() or ()) > 1
        handle.remove()
    return found


def has_hooks_after_accumulation_alone(parameter: torch.Tensor) -> bool:
    """Whether hooks of a parameter's own run on its gradient, all of them once that has been accumulated."""
    return bool(parameter._post_accumulate_grad_hooks) and not parameter._backward_hooks


def run_hooks_after_accumulation(parameter: torch.Tensor) -> None:
    """What autograd does once it has added to a parameter's gradient."""
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that runs adds to a parameter's gradient, before which no hook looks at it."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        hooked = bool(parameter._backward_hooks) or _node_has_hooks(parameter)
        return not hooked and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which accumulates nothing
        return False


def accumulate_by_hand(parameter: torch.Tensor, error: str) -> Callable[[], None] | None:
    """Let autograd leave a parameter's gradient and hooks alone in the backward pass that runs; None: it does already.

    Where something else of the same loss gives it a part of the gradient after all, a RuntimeError says so.

    Returns:
        What undoes it, to be called when the pass has ended: one that raises may not come to the parameter.
    """
    node, task = torch.autograd.graph.get_gradient_edge(parameter).node, backward_task()
    notes: Any = node.metadata  # a dict, which torch's stub calls a method
    if notes.get(_BY_HAND) == task:
        return None
    notes[_BY_HAND] = task
    hooks, aside = parameter._post_accumulate_grad_hooks, dict[Any, Any]()

    def before(gradients: Iterable[torch.Tensor | None]) -> None:
        if any(gradient is not None for gradient in gradients):
            raise RuntimeError(error)
        if hooks:  # autograd runs them without a gradient too
            aside.update(hooks)
            hooks.clear()

    def after(*_: Any) -> None:
        if hooks is not None:
            hooks.update(aside)
            aside.clear()
        for handle in handles:
            handle.remove()

    handles = node.register_prehook(before), node.register_hook(after)
    return after
