"""Layouts of plain Inductor's code in the code of a plan, so that both sum in the same order.

Inductor stores what the forward graph returns in the layout of its metadata, and what reads it then loops in that
order. In a graph with convolutions the metadata's layout is not the one that Inductor computes in (channels last), so
saving another tensor than plain Inductor does would change the order of sums: the forward pass's, and those of a
backward pass that reads or computes again what plain Inductor would have read from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import _compat, _compat_inductor
from ..errors import CaptureError

SAVED, FORWARD, BACKWARD = "remat_saved", "remat_forward", "remat_backward"
"""Metadata of a joint graph's node: the strides in which plain Inductor saves it for the backward pass, and in which
its forward and its backward pass write it to memory; there where they do."""

AS_STRIDED = frozenset(
    getattr(torch.ops.aten, name).default for name in ("as_strided", "as_strided_scatter", "resize", "resize_as")
)
"""Operators that read a tensor's memory without regard to its layout, which must then be the metadata's."""

INDEX = frozenset({torch.int32, torch.int64})
"""Of tensors that say where a sum goes: computed in place they change how its loops are tiled."""

COMPUTED = "remat_computed"
"""Metadata of a joint graph's node: the strides of the loops that compute it, where those are not its value's own."""


def without_strides(joint: fx.GraphModule) -> None:
    """Turn `as_strided` into `reshape` where it means that, as in the decomposition of group norms.

    A saved tensor may come back in another layout than its metadata's, and strides written for that one would read
    other numbers: wrong gradients without a word.

    Raises:
        CaptureError: where it means something else, beside convolutions that Inductor runs in channels last.
    """
    for node in joint.graph.nodes:
        if node.target is not torch.ops.aten.as_strided.default:
            continue
        source, made = node.args[0].meta["val"], node.meta["val"]
        whole = source.is_contiguous() and made.is_contiguous() and source.numel() == made.numel()
        if whole and made.storage_offset() == source.storage_offset():
            node.target = torch.ops.aten.reshape.default
            node.args, node.kwargs = (node.args[0], list(made.shape)), {}
        elif _compat_inductor.prefers_channels_last(joint):
            raise CaptureError(
                f"{node.name} reads memory by strides of its own, which a plan cannot carry out beside convolutions in "
                "channels last under inner='inductor': use inner='eager'"
            )
    joint.recompile()


def note_layouts(joint: fx.GraphModule, forward_outputs: int, **options: Any) -> bool:
    """Note in a joint graph what plain Inductor saves, and in which layout it computes what a plan may save.

    Must be called where Inductor partitions. Returns whether there was something to note: without a convolution that
    Inductor runs in channels last, layouts are those of the metadata everywhere.
    """
    if not _compat_inductor.prefers_channels_last(joint):
        return False
    plain = _compat_inductor.plain_layouts(joint, forward_outputs, **options)
    computed = _computed(joint)
    for node in joint.graph.nodes:
        if _read_as_strided(node):
            node.meta[SAVED] = tuple(node.meta["val"].stride())
            continue
        for note, known in ((SAVED, plain.saved), (FORWARD, plain.forward), (BACKWARD, plain.backward)):
            if node.name in known:
                node.meta[note] = known[node.name]
        if node in computed:
            node.meta[COMPUTED] = computed[node]
    return True


def _read_as_strided(node: fx.Node) -> bool:
    """Whether a tensor's memory is read by strides of the reader's own, be it through a view."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    own = _compat.storage_key(value)
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user.target in AS_STRIDED:
                return True
            made = user.meta.get("val")
            if user not in seen and isinstance(made, torch.Tensor) and _compat.storage_key(made) == own:
                seen.add(user)
                stack.append(user)
    return False


def _computed(joint: fx.GraphModule) -> dict[fx.Node, tuple[int, ...]]:
    """The strides that follow from convolutions in channels last, of the nodes where they are not the metadata's."""
    values: dict[fx.Node, torch.Tensor] = {}
    for node in joint.graph.nodes:
        own = node.meta.get("val")
        if not isinstance(own, torch.Tensor):
            continue
        if node.target is torch.ops.aten.convolution.default and own.dim() == 4:
            values[node] = own.contiguous(memory_format=torch.channels_last)
        elif _compat_inductor.is_fusible_node(node) and any(n in values for n in node.all_input_nodes):
            made = _again(node, values)
            if isinstance(made, torch.Tensor) and made.shape == own.shape:
                values[node] = made
    return {
        node: tuple(value.stride()) for node, value in values.items() if value.stride() != node.meta["val"].stride()
    }


def _again(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> Any:
    """A node's value from inputs in other layouts; None where its operator does not take them."""
    known = [values.get(n, n.meta.get("val")) for n in node.all_input_nodes]
    mode = _compat.detect_fake_mode(known)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values.get(n, n.meta.get("val")))
    if mode is None or any(value is None for value in known):
        return None
    try:
        with _compat.only_real_tensors(), mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # a view that another layout does not allow
        return None


def keep_layouts(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Change the two graphs of a plan so that sums run in the order in which plain Inductor's code runs them.

    What is saved but would not be by plain Inductor is saved as a copy in the layout in which it is computed, so that
    the forward pass reads it as if it were not saved; the copy is what is stored, not one more. What plain Inductor
    saves in another layout than it computes in, and the plan computes again, is written in that layout before it is
    read. And what a pass of plain Inductor's writes to memory, since enough reads it, is written in that pass here,
    too, whatever is read or computed again around it.

    Args:
        forward, backward: as Inductor takes them, of a joint graph with layouts noted.
        results: how many of the forward graph's outputs are the caller's.
    """
    output = forward.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    saved = frozenset(outputs[results:])
    for graph, written in ((forward.graph, FORWARD), (backward.graph, BACKWARD)):
        for node in list(graph.nodes):
            strides = None if node in saved else _to_store(node, written)
            if strides is not None:
                _store(graph, node, strides)
    for position in range(results, len(outputs)):
        outputs[position] = _copy(forward.graph, outputs[position])
    output.args = (tuple(outputs),)
    forward.recompile()
    backward.recompile()


def _to_store(node: fx.Node, written: str) -> tuple[int, ...] | None:
    """The strides in which a node has to be written to memory, or None."""
    if node.op != "call_function" or not _compat_inductor.is_fusible_node(node):
        return None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if SAVED in node.meta and value.dtype in INDEX:
        return node.meta[SAVED]  # type: ignore[no-any-return]
    if value.dim() < 3:
        return None
    if SAVED not in node.meta:
        return node.meta.get(written)
    strides: tuple[int, ...] = node.meta[SAVED]
    computed = node.meta.get(COMPUTED, tuple(value.stride()))
    return strides if _order(computed, value.shape) != _order(strides, value.shape) else None


def _store(graph: fx.Graph, node: fx.Node, strides: Sequence[int]) -> None:
    """Let what reads a node read it from memory."""
    with graph.inserting_after(node):
        stored = graph.call_function(_compat_inductor.stored, (node, list(strides)))
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    stored.meta = dict(node.meta)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What is saved in place of a node."""
    value = node.meta.get("val")
    known = SAVED in node.meta or not isinstance(value, torch.Tensor) or value.dim() < 3
    if known or node.op != "call_function" or not _compat_inductor.is_fusible_node(node):
        return node
    strides = node.meta.get(COMPUTED)
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(_compat_inductor.materialized_copy, (node,))
        made.meta = dict(node.meta)
        if strides is None:
            return made
        # Inductor derives values anew after its passes: the layout has to be an operator's
        ordered = graph.call_function(_compat_inductor.force_stride_order, (made, list(strides)))
        ordered.meta = _meta(node, strides)
    return ordered


def _meta(node: fx.Node, strides: Sequence[int]) -> dict[str, Any]:
    """A node's metadata with its value in another layout."""
    value = node.meta["val"]
    with _compat.only_real_tensors(), value.fake_mode:
        return node.meta | {"val": value.new_empty_strided(value.shape, tuple(strides))}


def _order(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The dimensions of more than one element, from the widest stride to the narrowest."""
    return sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: -strides[d])
