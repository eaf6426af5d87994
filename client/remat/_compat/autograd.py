"""Autograd: how often a tensor was written to, and arguments and gradients that come in a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["boxed", "boxed_gradients", "version_counter"]

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
