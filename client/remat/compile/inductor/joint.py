"""Inductor's joint graph in the form that remat plans, and back again: updates of buffers as results, and layouts.

A plan's code and plain Inductor's are to sum in the same order. Inductor stores what the forward graph returns in the
layout of its metadata, and what reads it then loops in that order. In a graph with convolutions the metadata's layout
is not the one that Inductor computes in (channels last), so saving another tensor than plain Inductor does would change
the order of sums: the forward pass's, and those of a backward pass that reads or computes again what plain Inductor
would have read from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ... import _compat
from ..._compat import inductor
from ...capture.dataflow import Dataflow, copy_, dataflow, is_random, results_of, updates_as_results, value_bytes
from ...capture.refused import refuse
from ...errors import CaptureError
from ...lowering.lower import Lowered


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph without in-graph updates.

    Attributes:
        flow: its analysis; the forward results begin with the new values of what it overwrites, in this order.
        layouts_noted: whether `note_layouts` has left notes on its nodes.
    """

    flow: Dataflow
    layouts_noted: bool = False


def joint_of(module: fx.GraphModule, forward_outputs: int, layouts_noted: bool = False) -> Joint:
    """The analysis of a copy of a joint graph that Inductor hands to its partitioner.

    Inductor keeps updates of inputs in the graph, as `copy_(input, new value)` that nothing reads.

    Raises:
        CaptureError: the graph cannot be planned under Inductor; the message says why.
    """
    module = inductor.copied(module)
    updates = updates_as_results(module.graph)
    _refuse(module)
    flow = dataflow(module, forward_outputs + len(updates))
    return Joint(replace(flow, mutated=updates), layouts_noted)


def with_updates(joint: Joint, lowered: Lowered) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs of a plan as Inductor wants them: buffers updated at the end of the forward graph."""
    graph = lowered.forward.graph
    output = graph.output_node()
    results = results_of(graph)
    updated = joint.flow.mutated
    inputs = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    with graph.inserting_before(output):
        for placeholder, new in zip(updated, results, strict=False):
            update = graph.call_function(copy_, (inputs[str(placeholder.target)], new))
            update.meta["val"] = placeholder.meta["val"]
    output.args = (tuple(results[len(updated) :]),)
    _compat.set_descriptors(graph, _compat.descriptors(graph)[len(updated) :])
    if joint.layouts_noted:
        keep_layouts(lowered.forward, lowered.backward, len(results) - len(updated) - lowered.saved)
    lowered.forward.recompile()
    return lowered.forward, lowered.backward


def _refuse(module: fx.GraphModule) -> None:
    refuse(module)
    for node in module.graph.nodes:
        # seeds, and draws of a few numbers, are kept at no cost to speak of
        if is_random(node) and not inductor.is_seed(node) and value_bytes(node) > 4096:
            raise CaptureError(
                f"{node.name} ({node.target}) draws from the generator itself, so it could be neither kept cheaply nor "
                "run again: leave fallback_random off under inner='inductor'"
            )


SAVED, FORWARD, BACKWARD = "remat_saved", "remat_forward", "remat_backward"
"""Metadata of a joint graph's node: the strides in which plain Inductor saves it for the backward pass, and in which
its forward and its backward pass write it to memory; there where they do."""

AS_STRIDED = frozenset(
    getattr(torch.ops.aten, name).default for name in ("as_strided", "as_strided_scatter", "resize", "resize_as")
)
"""Operators that read a tensor's memory without regard to its layout."""

INDEX = frozenset({torch.int32, torch.int64})
"""Of tensors that say where a sum goes: computed in place they change how its loops are tiled."""

READ = "remat_read"
"""Metadata of a joint graph's node: the strides in which it is written to memory wherever it is computed, since one of
`AS_STRIDED` read it there."""

RUN = "remat_run"
"""Metadata of a kernel of torch's own: the strides of what plain Inductor gives it to read."""

COMPUTED = "remat_computed"
"""Metadata of a joint graph's node: the strides of the loops that compute it, where those are not its value's own."""


def without_strides(joint: fx.GraphModule) -> None:
    """Turn `as_strided` into `reshape` where it means that, as in the decomposition of group norms.

    Beside convolutions in channels last a saved tensor may come back in another layout than its metadata's, and strides
    written for that one would read other numbers: wrong gradients without a word.

    Raises:
        CaptureError: where it means something else.
    """
    for node in joint.graph.nodes:
        if node.target not in AS_STRIDED:
            continue
        source, made = node.args[0].meta["val"], node.meta["val"]
        if node.target is torch.ops.aten.as_strided.default and _is_view(source, made):
            node.target = torch.ops.aten.reshape.default
            node.args, node.kwargs = (node.args[0], list(made.shape)), {}
            node.args[0].meta[READ] = tuple(source.stride())
        else:
            raise CaptureError(
                f"{node.name} reads memory by strides of its own, which a plan cannot carry out next to convolutions "
                "in channels last under inner='inductor': use inner='eager'"
            )
    joint.recompile()


def note_layouts(joint: fx.GraphModule, plain: inductor.Plain) -> bool:
    """Note in a joint graph what plain Inductor saves, and in which layout it computes what a plan may save.

    `plain` is plain Inductor's code for it. Returns whether there was something to note: without a convolution that
    Inductor runs in channels last, layouts are those of the metadata everywhere, and strides may be read by. With one
    the graph is left `without_strides`.

    Raises:
        CaptureError: as `without_strides`.
    """
    if not inductor.prefers_channels_last(joint):
        return False
    computed = _computed(joint)
    first = _first_alike(joint)
    for note, known in ((SAVED, plain.saved), (FORWARD, plain.forward), (BACKWARD, plain.backward)):
        alike = {first[node]: known[node.name] for node in joint.graph.nodes if node.name in known}
        for node in joint.graph.nodes:
            if first[node] in alike:
                node.meta[note] = alike[first[node]]
    for node, strides in computed.items():
        node.meta[COMPUTED] = strides
    for node in joint.graph.nodes:
        if node.name in plain.reads:
            node.meta[RUN] = plain.reads[node.name]
    without_strides(joint)  # not before: what plain Inductor writes to memory for them has been noted
    return True


def _first_alike(joint: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node the first one that computes the same of the same: plain Inductor merges them before it saves."""
    found: dict[fx.Node, fx.Node] = {}
    known: dict[str, fx.Node] = {}
    for node in joint.graph.nodes:
        found[node] = node
        if node.op == "call_function" and not is_random(node):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), found.__getitem__)
            found[node] = known.setdefault(f"{node.target} {args} {kwargs}", node)
    return found


def _is_view(source: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether one holds all of the other's elements in the same order."""
    whole = source.is_contiguous() and made.is_contiguous() and source.numel() == made.numel()
    return whole and made.storage_offset() == source.storage_offset()


def _computed(joint: fx.GraphModule) -> dict[fx.Node, tuple[int, ...]]:
    """The strides that follow from convolutions in channels last, of the nodes where they are not the metadata's."""
    values: dict[fx.Node, torch.Tensor] = {}
    for node in joint.graph.nodes:
        own = node.meta.get("val")
        if not isinstance(own, torch.Tensor):
            continue
        if node.target is torch.ops.aten.convolution.default and own.dim() == 4:
            values[node] = own.contiguous(memory_format=torch.channels_last)
        elif inductor.is_fusible_node(node) and any(n in values for n in node.all_input_nodes):
            made = _again(node, values)
            if isinstance(made, torch.Tensor) and made.shape == own.shape:
                values[node] = made
    return {
        node: tuple(value.stride()) for node, value in values.items() if value.stride() != node.meta["val"].stride()
    }


def _again(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> Any:
    """A node's value from inputs in other layouts; None where its operator does not take them."""
    known = [values.get(n, n.meta.get("val")) for n in node.all_input_nodes]
    mode = next((value.fake_mode for value in known if isinstance(value, _compat.FakeTensor)), None)
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
    read. What a pass of plain Inductor's writes to memory, since enough reads it, is written in that pass here, too,
    whatever is read or computed again around it. And what strides were read by is written in their order in either.

    Args:
        forward, backward: as Inductor takes them, of a joint graph with layouts noted.
        results: how many of the forward graph's outputs are the caller's.
    """
    output = forward.graph.output_node()
    saved = frozenset(results_of(forward.graph)[results:])
    for graph, written in ((forward.graph, FORWARD), (backward.graph, BACKWARD)):
        for node in list(graph.nodes):
            # Inductor saves in layouts of its own choice: what strides were read by is written next to what is saved
            strides = node.meta.get(READ) if node in saved else _to_store(node, written)
            if strides is not None:
                _store(graph, node, strides)
    outputs = results_of(forward.graph)
    for position in range(results, len(outputs)):
        outputs[position] = _copy(forward.graph, outputs[position])
    output.args = (tuple(outputs),)
    forward.recompile()
    backward.recompile()


def _to_store(node: fx.Node, written: str) -> tuple[int, ...] | None:
    """The strides in which a node has to be written to memory, or None."""
    strides: tuple[int, ...] | None = node.meta.get(READ)
    if strides is not None:
        return strides
    if node.op != "call_function" or not inductor.is_fusible_node(node):
        return None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    saved: tuple[int, ...] | None = node.meta.get(SAVED)
    if saved is not None and value.dtype in INDEX:
        return saved
    if value.dim() < 3:
        return None
    if saved is None:
        return node.meta.get(written)
    computed = node.meta.get(COMPUTED, tuple(value.stride()))
    return saved if _order(computed, value.shape) != _order(saved, value.shape) else None


def _store(graph: fx.Graph, node: fx.Node, strides: Sequence[int]) -> None:
    """Let what reads a node read it from memory."""
    if node.target is torch.ops.aten.cat.default and _order(strides, node.meta["val"].shape) == [0, 2, 3, 1]:
        node.target = inductor.channels_last_cat
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first) if node.op == "placeholder" else graph.inserting_after(node):
        stored = graph.call_function(inductor.stored, (node, list(strides)))
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    stored.meta = dict(node.meta)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What is saved in place of a node."""
    value = node.meta.get("val")
    known = SAVED in node.meta or not isinstance(value, torch.Tensor) or value.dim() < 3
    if READ not in node.meta and (known or node.op != "call_function" or not inductor.is_fusible_node(node)):
        return node
    strides = node.meta.get(COMPUTED)
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(inductor.materialized_copy, (node,))
        made.meta = dict(node.meta)
        if strides is None:
            return made
        # Inductor derives values anew after its passes: the layout has to be an operator's
        ordered = graph.call_function(inductor.force_stride_order, (made, list(strides)))
        own = node.meta["val"]
        with _compat.only_real_tensors(), own.fake_mode:
            ordered.meta = node.meta | {"val": own.new_empty_strided(own.shape, tuple(strides))}
    return ordered


def _order(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The dimensions of more than one element, from the widest stride to the narrowest."""
    return sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: -strides[d])
