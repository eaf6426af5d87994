"""Autograd: how often a tensor was written to, what comes in a list, and the node that runs a backward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._library.fake_class_registry import FakeScriptObject

if TYPE_CHECKING or find_spec("torch._custom_class_base") is None:  # renamed in torch 2.15
    from torch._library.opaque_object import register_opaque_type
    from torch._opaque_base import OpaqueBase

    _BLACK_BOX = "reference"
else:
    from torch._custom_class_base import CustomClassBase as OpaqueBase
    from torch._library.opaque_object import register_custom_class as register_opaque_type

    _BLACK_BOX = "symbolic"

__all__ = [
    "OpaqueBase",
    "accumulate_by_hand",
    "backward_node",
    "backward_task",
    "boxed",
    "boxed_gradients",
    "compiled_node",
    "gives_all_gradients",
    "has_gradient_hooks",
    "has_hooks_after_accumulation_alone",
    "is_used_up",
    "keeps_graph",
    "opaque_example",
    "register_opaque",
    "run_hooks_after_accumulation",
    "saved_tensors_have_hooks",
    "used_up",
    "version_counter",
    "when_backward_ends",
    "when_differentiated",
    "will_accumulate",
]

_BY_HAND = "remat: accumulated by hand in this task"

F = TypeVar("F", bound=type[torch.autograd.Function])


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as one that takes its arguments in a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
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


def compiled_node(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], unless: Any) -> Any:
    """The node that AOTAutograd has made for a call with these outputs; None: nothing of them has a gradient.

    Args:
        inputs: of the call, which may be among its outputs, with nodes of earlier calls.
        unless: a key that the nodes of calls have in their metadata which are known already.
    """
    earlier = {t.grad_fn for t in inputs}
    stack, seen = [t.grad_fn for t in outputs if t.grad_fn not in earlier], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(getattr(node, "_forward_cls", None), "compiled_bw"):
            if unless not in node.metadata:
                return node
        else:  # a view of an output
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


def saved_tensors_have_hooks() -> bool:
    """Whether hooks pack what autograd saves in this thread now, such as those of a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


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


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call something when the backward pass that runs has ended, its accumulation of gradients included."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


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


def accumulate_by_hand(parameter: torch.Tensor, error: str) -> bool:
    """Let autograd leave a parameter's gradient and hooks alone in the backward pass that runs; False: it does already.

    Where something else of the same loss gives it a part of the gradient after all, a RuntimeError says so.
    """
    node, task = torch.autograd.graph.get_gradient_edge(parameter).node, backward_task()
    notes: Any = node.metadata  # a dict, which torch's stub calls a method
    if notes.get(_BY_HAND) == task:
        return False
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
        for handle in handles:
            handle.remove()

    handles = node.register_prehook(before), node.register_hook(after)
    return True
