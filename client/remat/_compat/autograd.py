"""Autograd: how often a tensor was written to, what comes in a list, and the node that runs a backward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

__all__ = ["backward_node", "boxed", "boxed_gradients", "version_counter"]

F = TypeVar("F", bound=type[torch.autograd.Function])


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


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
