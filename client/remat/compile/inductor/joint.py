"""Inductor's joint graph in the form that remat plans: updates of buffers as results, and back again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from ... import _compat
from ..._compat import inductor
from ...capture.dataflow import Dataflow, copy_, dataflow, is_random, tensors, updates_as_results
from ...capture.refused import refuse
from ...errors import CaptureError
from ...lowering.lower import Lowered
from .layout import keep_layouts


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph without in-graph updates.

    Attributes:
        flow: its analysis; the forward results begin with the new values of `updated`.
        updated: the placeholders that the step overwrites, in the order of their updates.
        layouts_noted: whether `note_layouts` has left notes on its nodes.
    """

    flow: Dataflow
    updated: tuple[fx.Node, ...]
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
    return Joint(replace(flow, mutated=updates), tuple(updates), layouts_noted)


def with_updates(joint: Joint, lowered: Lowered) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs of a plan as Inductor wants them: buffers updated at the end of the forward graph."""
    graph = lowered.forward.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    count = len(joint.updated)
    inputs = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    with graph.inserting_before(output):
        for placeholder, new in zip(joint.updated, results, strict=False):
            update = graph.call_function(copy_, (inputs[str(placeholder.target)], new))
            update.meta["val"] = placeholder.meta["val"]
    output.args = (tuple(results[count:]),)
    _compat.set_descriptors(graph, _compat.descriptors(graph)[count:])
    if joint.layouts_noted:
        keep_layouts(lowered.forward, lowered.backward, len(results) - count - lowered.saved)
    lowered.forward.recompile()
    return lowered.forward, lowered.backward


def _refuse(module: fx.GraphModule) -> None:
    refuse(module)
    for node in module.graph.nodes:
        if is_random(node) and not inductor.is_seed(node) and not _small(node):
            raise CaptureError(
                f"{node.name} ({node.target}) draws from the generator itself, so it could be neither kept cheaply nor "
                "run again: leave fallback_random off under inner='inductor'"
            )


def _small(node: fx.Node) -> bool:
    """Random results that are kept at no cost to speak of: seeds, and draws of a few numbers."""
    return sum(t.numel() * t.element_size() for t in tensors(node.meta.get("val"))) <= 4096
