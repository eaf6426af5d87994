"""Autograd: how often a tensor was written to, what comes in a list, and the node that runs a backward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from functorch.compile import make_boxed_func
from torch._library.fake_class_registry import FakeScriptObject

if TYPE_CHECKING or find_spec("torch._custom_class_base") is None:  # renamed in torch 2.15
    from torch._library.opaque_object import register_opaque_type
    from torch._opaque_base import OpaqueBase as OpaqueBase

    _BLACK_BOX = "reference"
else:
    from torch._custom_class_base import CustomClassBase as OpaqueBase
    from torch._library.opaque_object import register_custom_class as register_opaque_type

    _BLACK_BOX = "symbolic"

from .versions import require

F = TypeVar("F", bound=type[torch.autograd.Function])


_BOXED = {key: value for key, value in vars(make_boxed_func(lambda: None)).items() if key != "__wrapped__"}
"""How AOTAutograd marks a function that takes its arguments in a list."""

require([] if _BOXED else ["the mark of functorch.compile.make_boxed_func"])


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it empties."""
    vars(function).update(_BOXED)
    return function


def register_opaque(kind: type[OpaqueBase]) -> None:
    """Let AOTAutograd hand objects of a class from the forward to the backward pass."""
    register_opaque_type(kind, typ=_BLACK_BOX)


def opaque_example(made: OpaqueBase) -> Any:
    """What stands for such an object in a graph's metadata, by which every release of AOTAutograd counts it."""
    return FakeScriptObject(made, type(made).__name__, made)  # type: ignore[arg-type]


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


def _nodes_of_calls(behind: Iterable[Any], end: Iterable[Any] = ()) -> Iterator[tuple[Any, Any]]:
    """The nodes of autograd's graph that AOTAutograd has made for calls, those nearest to some others, each with the
    backward function that it runs; none from `end` on."""
    stack, seen = [*behind], set(end)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind: Any = getattr(node, "_forward_cls", None)
        if hasattr(kind, "compiled_bw"):
            yield node, kind.compiled_bw
        else:  # a view of an output
            stack += [following for following, _ in node.next_functions]


def backward_node(outputs: Iterable[torch.Tensor], function: Callable[..., Any]) -> Any:
    """The node of autograd's graph behind some outputs that runs a backward function of AOTAutograd's; None: none."""
    nodes = _nodes_of_calls(t.grad_fn for t in outputs)
    return next((node for node, runs in nodes if runs is function), None)


def compiled_node(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], unless: Any) -> Any:
    """The node that AOTAutograd has made for a call with these outputs; None: nothing of them has a gradient.

    Args:
        inputs: of the call, which may be among its outputs, or under views among these, with nodes of earlier calls.
        unless: a key that the nodes of calls have in their metadata which are known already.
    """
    earlier = {t.grad_fn for t in inputs}
    behind = [t.grad_fn for t in outputs if t.grad_fn not in earlier]
    # behind an input there are calls of other modules, but this one, too, where it has overwritten that input
    nodes = chain(_nodes_of_calls(behind, end=earlier), _nodes_of_calls(behind))
    return next((node for node, _ in nodes if unless not in node.metadata), None)


def saved_tensors_have_hooks() -> bool:
    """Whether hooks pack what autograd saves in this thread now, such as those of a checkpoint."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks are there"):
            return False
    except RuntimeError:  # they can't be forbidden
        return True


def when_differentiated(node: Any, text: str) -> None:
    """Let a backward pass through the gradients that a node is about to give raise an error with this text."""

    def refuse(_: Any) -> None:
        raise RuntimeError(text)

    def after(gradients: Iterable[torch.Tensor | None], _: Any) -> None:
        handle.remove()
        behind = {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}
        for each in behind:
            each.register_prehook(refuse)

    handle = node.register_hook(after)


def backward_task() -> int:
    """The number of the backward pass that runs in this thread; -1: none does."""
    return int(torch._C._current_graph_task_id())
