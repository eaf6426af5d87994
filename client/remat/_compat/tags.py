"""What plans by tags need of torch: the tag of a node, torch's partitioner, and the switches around both."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .memory import storage_key
from .tracing import is_tangent
from .versions import lacking, require, required

with required("a plan by tags"):
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

require(
    lacking(
        ((min_cut_rematerialization_partition, ("joint_module", "_joint_inputs", "num_fwd_outputs")),),
        ((functorch_config, "joint_custom_pass"), (functorch_config, "enable_autograd_cache")),
    ),
    "a plan by tags",
)

_TAG = "recompute"
_CHECKPOINTS = ("ac_graph_id", "has_backward_hook")
"""What the partitioner reads tags of the module's own checkpoints by, and might change ours for."""


class Partitioner(CustomPartitionerFn):
    """A partition function as `torch._inductor.config.custom_partitioner_fn` wants it.

    The configuration is copied deeply more than once and pickled for keys; copies are this very object, since what it
    holds can be copied neither cheaply nor at all. `key` enters those keys.
    """

    key: str

    def uuid(self) -> str:
        # None would not keep Inductor from taking another plan's code out of its caches, whatever its docs say
        return self.key

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self.key,))  # all that a cache's key may know of it


def write_tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    """Say that a node is saved where it is needed, computed again, or moved to the host."""
    node.meta[_TAG] = policy
    for key in _CHECKPOINTS:
        node.meta.pop(key, None)


def prepare(module: fx.GraphModule) -> None:
    """What the partitioner does first: drop dead nodes, and make equal ones one."""
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        views = {node.name for node in module.graph.nodes if _is_view(node)}
        module.graph = fx_graph_cse(module.graph)
        for node in module.graph.nodes:
            if node.name in views and not _is_view(node):  # of a node whose place an equal one has taken
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    module.recompile()


def _is_view(node: fx.Node) -> bool:
    """Whether a node's tensors lie in a storage of its inputs."""
    read = {key for source in node.all_input_nodes for key in _storages(source)}
    return node.op == "call_function" and not read.isdisjoint(_storages(node))


def _storages(node: fx.Node) -> set[int]:
    value = node.meta.get("val")
    found = value if isinstance(value, (list, tuple)) else (value,)
    return {storage_key(tensor) for tensor in found if isinstance(tensor, torch.Tensor)}


partition = min_cut_rematerialization_partition
"""Torch's own partition of a joint graph."""


def replayed(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator that a node of a backward graph runs again from a saved generator's state, and its arguments."""
    return (node.args[1], tuple(node.args[2:])) if node.target is torch.ops.higher_order.run_with_rng_state else None


def forward_results(graph: fx.Graph) -> int:
    """How many results of a joint graph are the forward pass's; a gradient, or None, for each input follows."""
    results: Any = graph.output_node().args[0]
    count: int = len(results) - sum(n.op == "placeholder" and not is_tangent(n) for n in graph.nodes)
    return count


def cache_is_on() -> bool:
    """Whether AOTAutograd keeps compiled graphs by keys that know nothing of passes over the joint graph."""
    return bool(functorch_config.enable_autograd_cache)


def module_of(node: fx.Node) -> str:
    """The path of the module that a node of a traced step is of, as torchtitan notes it."""
    return str(node.meta.get("custom", {}).get("module_fqn", ""))


NO_LAYER = -1
_VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "t", "transpose", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "slice", "select", "expand",
        "permute", "as_strided", "alias", "detach",
    )
)  # fmt: skip


def layer_of(node: fx.Node) -> int:
    """The number in the path of a node's module where that is one of `layers`, as torchtitan's passes read it."""
    parts = module_of(node).split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdecimal() else NO_LAYER


def is_known_view(node: fx.Node) -> bool:
    """Whether torchtitan's pass for the host takes a node for a view, whose readers it leads to what comes back."""
    return getattr(node.target, "overloadpacket", None) in _VIEWS


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a traced step is of its backward pass, as torchtitan's trainer tells it."""
    return bool(node.meta.get("autograd_backward"))
