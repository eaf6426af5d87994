"""Copying blocks that repeat: notes on AOTAutograd's nodes, another graph for Dynamo's module, fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "MODULE_STACKS",
    "copy_sources",
    "description",
    "empty_like",
    "example_of",
    "fake_like",
    "fake_tensor",
    "input_place",
    "is_backward",
    "is_wrapper",
    "of_torch_or_python",
    "sequence_number",
    "set_examples",
    "traced_from",
]


MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Notes of the modules whose forward made a node, or what it differentiates; Dynamo's nodes have the first."""


_PACKAGES = frozenset({"torch", "_operator", "operator", "builtins", "math"})


def of_torch_or_python(target: Any) -> bool:
    """Whether a function that Dynamo leaves in a graph is torch's or Python's: a version says what it does."""
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0] in _PACKAGES


def example_of(node: fx.Node) -> Any:
    """The fake value of a node of Dynamo's."""
    return node.meta.get("example_value")


def set_examples(module: fx.GraphModule, examples: Mapping[str, Any]) -> None:
    """Say of the inputs of a part of a graph of Dynamo's what they are, by the names of its nodes."""
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = examples[str(node.target)]


def empty_like(graph: fx.Graph) -> fx.Graph:
    """A graph without nodes that takes its inputs as another one does."""
    made = fx.Graph()
    made.set_codegen(graph._codegen)
    return made


def description(node: fx.Node) -> Any:
    """What AOTAutograd says of an input; None where it says nothing."""
    return node.meta.get("desc")


def input_place(node: fx.Node) -> int | None:
    """Which input of Dynamo's graph an input of a joint graph is; None for a tensor that the graph itself holds."""
    return getattr(node.meta.get("desc"), "idx", None)


def copy_sources(like: Any, to: Any) -> None:
    """Say of a graph of torch.compile's where its inputs come from, which copying its nodes does not."""
    for its, mine in zip(*(each.graph.find_nodes(op="placeholder") for each in (like, to)), strict=True):
        if hasattr(its, "_dynamo_source"):
            mine._dynamo_source = its._dynamo_source
    if hasattr(like, "_param_name_to_source"):
        to._param_name_to_source = like._param_name_to_source


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd says that the backward pass made a node."""
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """What a node of the backward pass has in common with the one that it differentiates."""
    number: int | None = node.meta.get("seq_nr")
    return number


def traced_from(node: fx.Node) -> str:
    """The name of Dynamo's node for which AOTAutograd's forward pass made this one; empty where it does not say."""
    sources = node.meta.get("from_node")
    return str(sources[0].name) if sources else ""


def fake_tensor(
    mode: FakeTensorMode, storage: torch.UntypedStorage, like: tuple[Any, ...], device: torch.device
) -> FakeTensor:
    """A fake tensor in a storage on the meta device, from its dtype, offset, shape and strides."""
    dtype, offset, shape, strides = like
    return FakeTensor(mode, torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides), device)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds others, as a DTensor does, by more than its own metadata says."""
    return bool(is_traceable_wrapper_subclass(tensor))


def fake_like(tensor: Any, holder: torch.Tensor | None) -> torch.Tensor:
    """A fake tensor like another one, in the storage that a third one has; None: in a storage of its own.

    It is to be called under `only_real_tensors`.
    """
    like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    if holder is None:
        memory_of: Any = torch.UntypedStorage
        storage = memory_of(tensor.untyped_storage().nbytes(), device="meta")
    else:
        storage = holder.untyped_storage()
    return fake_tensor(tensor.fake_mode, storage, like, tensor.device).requires_grad_(tensor.requires_grad)
