"""Autograd: how often a tensor was written to, what comes in a list, and the node that runs a backward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

__all__ = [
    "OpaqueBase",
    "backward_node",
    "boxed",
    "boxed_gradients",
    "has_gradient_hooks",
    "is_used_up",
    "keeps_graph",
    "register_opaque",
    "used_up",
    "version_counter",
]

F = TypeVar("F", bound=type[torch.autograd.Function])


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def register_opaque(kind: type[OpaqueBase]) -> None:
    """Let AOTAutograd hand objects of a class from the forward to the backward pass."""
    register_opaque_type(kind, typ="reference")


def keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread leaves autograd's graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def boxed_gradients(function: F) -> F:
    """Mark an autograd function whose backward pass takes the gradients in a list, where this torch knows of it."""
    function.boxed_grads_call = True
    return function


def version_counter(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place: what autograd compares before it reads what it has saved."""
    return tensor._version


def backward_node(outputs: Iterable[torch.Tensor], function: Callable[..., Any]) -> Any:
    """The node of autograd's graph behind some outputs that runs a backward function of AOTAutograd's; None: none."""
    stack, seen = [t.grad_fn for t in outputs], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        runs = getattr(getattr(node, "_forward_cls", None), "compiled_bw", None)
        if runs is function:
            return node
        if runs is None:  # a view of an output; behind another planned step there is nothing of this one
            stack += [following for following, _ in node.next_functions]
    return None


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
        flat = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, _UsedUp)]
        raise RuntimeError(flat[0].text)


def used_up(like: torch.Tensor, text: str) -> torch.Tensor:
    """A gradient without memory that raises an error with a text whenever somebody reads it or adds to it."""
    return _UsedUp(like, text)


def is_used_up(gradient: Any) -> bool:
    """Whether it is one of `used_up`."""
    return isinstance(gradient, _UsedUp)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks of a parameter's own run on its gradient."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
