"""Which node of a joint graph makes which storage, and which storages it reads: views and getitems folded away."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _compat
from ..device import storage_bytes
from ..errors import CaptureError

copy_ = torch.ops.aten.copy_.default

REDUCED_IN_PLACE = frozenset(
    {
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
        torch.ops.aten.binary_cross_entropy.default,
    }
)
"""Losses whose scalar lies in a storage as large as their elements."""

WHOLE_STORAGE = frozenset(
    {
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.copy.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
    }
)
"""What copies the whole storage of its first argument, of which that may be a small view."""


@dataclass(frozen=True, eq=False)
class Dataflow:
    """A joint graph at the level of storages.

    A kernel is a node that makes storage, draws random numbers, or checks what others have made. Every other live node
    is a view, a getitem, a constant or a placeholder, and costs neither time nor memory.

    Attributes:
        joint: the graph itself.
        kernels: the live kernels in trace order; the first `forward_kernels` of them run before any tangent is there.
        makes: the storages that each kernel makes, in output order.
        reads: the storages that each kernel reads, through any chain of views, placeholders' included.
        sizes: [storages] bytes.
        owner: [storages] the kernel or placeholder or constant that each storage comes from.
        primals, tangents: the placeholders.
        forward_results, backward_results: what the two passes return, in order; entries need not be nodes.
        mutated: placeholder → its new value among the forward results, copied back when the forward pass ends.
        storages_of: the storages that a node's own tensors lie in.
    """

    joint: fx.GraphModule
    kernels: tuple[fx.Node, ...]
    forward_kernels: int
    makes: Mapping[fx.Node, tuple[int, ...]]
    reads: Mapping[fx.Node, tuple[int, ...]]
    sizes: tuple[int, ...]
    owner: tuple[fx.Node, ...]
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward_results: tuple[Any, ...]
    backward_results: tuple[Any, ...]
    mutated: Mapping[fx.Node, fx.Node]
    storages_of: Mapping[fx.Node, tuple[int, ...]]

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The primals that are tensors: the module's own come first. A parameter that is split over ranks (DTensor) is
        its local shard here, with its mesh as a primal of its own."""
        return tuple(p for p in self.primals if isinstance(p.meta.get("val"), torch.Tensor))

    def storages(self, results: Iterable[Any]) -> set[int]:
        """The storages that the nodes among some results lie in."""
        return {s for r in results if isinstance(r, fx.Node) for s in self.storages_of.get(r, ())}


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors inside nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with the tensors inside nested tuples, lists and mappings changed, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: changed(item, change) for name, item in value.items()}
    return type(value)(changed(item, change) for item in value) if type(value) in (tuple, list) else value


def value_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that a node gives."""
    return sum(t.numel() * t.element_size() for t in tensors(node.meta.get("val")))


def value_of(node: fx.Node) -> Any:
    """What a node gives, as its fake value; a constant of the graph may be there itself."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target), None)
    return value


def results_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns, in order."""
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return list(results)


def device_of(flow: Dataflow) -> torch.device:
    """The device of a step's first parameter or input."""
    return next((t.device for p in flow.primals for t in tensors(p.meta.get("val"))), torch.device("cpu"))


def resident_bytes(flow: Dataflow) -> int:
    """Bytes of the parameters, buffers and inputs that a joint graph takes, each storage once."""
    return sum(flow.sizes[s] for s in flow.storages(flow.primals))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator: attention with a dropout of 0 does not."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, _compat.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, name in enumerate(_compat.parameter_names(target)):
        if name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
        if name in ("train", "training"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(name, True)
            if given is False:
                return False
    return True


def is_check(node: fx.Node) -> bool:
    """Whether a node makes nothing and raises where what it reads is wrong, such as a factorization that failed."""
    return node.op == "call_function" and node.target in _compat.CHECKS


def is_unknown(node: fx.Node) -> bool:
    """Whether a node may do anything: it is no operator of torch's, nor one that says that it draws numbers."""
    if node.op != "call_function" or node.target is operator.getitem or _compat.is_functional_region(node):
        return False
    return not _compat.is_known(node.target) and not is_random(node)


CHOICES = frozenset(
    {
        torch.ops.aten.argmax.default,
        torch.ops.aten.argmin.default,
        torch.ops.aten.argsort.default,
        torch.ops.aten.argsort.stable,
        torch.ops.aten.sort.default,
        torch.ops.aten.sort.stable,
        torch.ops.aten.topk.default,
    }
)
"""What chooses among numbers, such as the experts of a token."""


def is_choice(node: fx.Node) -> bool:
    """Whether a node chooses by numbers that may come out otherwise in the last bits where they are computed again."""
    if node.op != "call_function" or node.target not in CHOICES or not isinstance(node.args[0], fx.Node):
        return False
    value = node.args[0].meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def stateless(node: fx.Node) -> tuple[Any, tuple[int, ...]] | None:
    """What makes the same outputs without reading the statistics that a node updates, and the arguments that it takes.

    Batch normalization in training normalizes by the batch; the running statistics only go into their own new values.
    """
    if node.target is _compat.BATCH_NORM and node.args[5] is True:
        return _compat.BATCH_NORM_WITHOUT_STATISTICS, (0, 1, 2, 5, 6, 7)
    return None


def dataflow(joint: fx.GraphModule, forward_outputs: int) -> Dataflow:
    """Analyse a joint graph, by the storages of its fake tensors.

    Forward and backward are told apart by what the forward results need, not by the tags of the nodes.

    Raises:
        CaptureError: nothing in the graph can be trained.
    """
    drop_unread_statistics(joint)
    nodes = list(joint.graph.nodes)
    results = results_of(joint.graph)
    forward_results, backward_results = tuple(results[:forward_outputs]), tuple(results[forward_outputs:])
    checks = [n for n in nodes if is_check(n)]
    live = ancestors([n for n in results if isinstance(n, fx.Node)] + [n for n in nodes if is_random(n)] + checks)
    book = _Storages()
    placeholders = [n for n in nodes if n.op == "placeholder"]
    for node in placeholders:
        book.enter(node)
    kernels = []
    for node in nodes:
        if node.op in ("placeholder", "output") or node not in live:
            continue
        makes = book.enter(node)
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and (makes or is_random(node) or is_check(node))
        ):
            kernels.append(node)
    tangents = tuple(n for n in placeholders if _compat.is_tangent(n))
    if not tangents or not any(isinstance(n, fx.Node) for n in backward_results):
        raise CaptureError(
            "nothing to train: no output depends on a parameter or input that requires gradients; call it under "
            "torch.no_grad()"
        )
    early = [n for n in checks if not ancestors([n]) & frozenset(tangents)]
    needed = ancestors([n for n in forward_results if isinstance(n, fx.Node)] + early)
    forward = 1 + max((i for i, n in enumerate(kernels) if n in needed), default=-1)
    made = {n: tuple(book.made.get(n, ())) for n in kernels}
    updated = _compat.updated_inputs(joint.graph)
    return Dataflow(
        joint=joint,
        kernels=tuple(kernels),
        forward_kernels=forward,
        makes=made,
        reads={n: _reads(n, book) for n in kernels},
        sizes=tuple(book.sizes),
        owner=tuple(book.owner),
        primals=tuple(n for n in placeholders if n not in frozenset(tangents)),
        tangents=tangents,
        forward_results=forward_results,
        backward_results=backward_results,
        mutated={updated[i]: r for i, r in enumerate(forward_results) if i in updated and isinstance(r, fx.Node)},
        storages_of={n: tuple(s) for n, s in book.of.items()},
    )


def drop_unread_statistics(joint: fx.GraphModule) -> None:
    """Take from the backward passes of batch normalization in training the running statistics, which they do not read.

    They normalize by what the forward pass saved (aten/src/ATen/native/Normalization.cpp, cuda/Normalization.cu); the
    new statistics would be held from the forward pass until then.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


class _Storages:
    """Numbers for storages in the order in which nodes first hold them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.owner: list[fx.Node] = []
        self.of: dict[fx.Node, list[int]] = {}
        self.made: dict[fx.Node, list[int]] = {}
        self._number: dict[int, int] = {}

    def enter(self, node: fx.Node) -> list[int]:
        """Note a node; returns the storages that it is the first to hold."""
        source = maker(node)
        value = value_of(node)
        if value is None:
            value = [user.meta.get("val") for user in node.users if user.target is operator.getitem]
        new: list[int] = []
        held = self.of.setdefault(node, [])
        for tensor in tensors(value):
            key = _compat.storage_key(tensor)
            if key not in self._number:
                self._number[key] = len(self.sizes)
                self.sizes.append(storage_bytes(tensor, max(_elementwise_bytes(node), self._copied_bytes(node))))
                self.owner.append(source)
                new.append(self._number[key])
            if self._number[key] not in held:
                held.append(self._number[key])
        self.made.setdefault(source, []).extend(new)
        return new

    def _copied_bytes(self, node: fx.Node) -> int:
        """The bytes of the storage that a node copies whole, where a fake tensor's is that of a view; else 0.

        The kernels keep the strides and the offset (at::clone_preserve_strides, used by
        aten/src/ATen/native/TensorShape.cpp), unless elements of the view overlap.
        """
        view = node.args[0] if node.target in WHOLE_STORAGE else None
        if not isinstance(view, fx.Node) or not self.of.get(view):
            return 0
        value = view.meta["val"]
        overlapping = any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))
        return 0 if overlapping else self.sizes[self.of[view][0]]


def maker(node: fx.Node) -> fx.Node:
    """The node of which a node is an item, or an item of an item; else itself."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _elementwise_bytes(node: fx.Node) -> int:
    """The bytes of a loss before it is reduced, or of columns before they are folded, which the result goes on holding;
    0 for any other node.

    These kernels write the elements into the tensor that they then resize to the result, and resizing frees nothing
    (aten/src/ATen/native/BinaryOps.cpp, Loss.cpp, Col2Im.cpp); a fake tensor's storage is that of the scalar.
    """
    if node.target is torch.ops.aten.col2im.default and isinstance(node.args[0], fx.Node):
        return int(node.args[0].meta["val"].numel()) * int(node.meta["val"].element_size())
    if node.target not in REDUCED_IN_PLACE:
        return 0
    shapes = [a.meta["val"].shape for a in node.args[:2] if isinstance(a, fx.Node)]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return int(shape.numel()) * int(node.meta["val"].element_size())


def _reads(kernel: fx.Node, book: _Storages) -> tuple[int, ...]:
    found = {storage for argument in kernel.all_input_nodes for storage in book.of.get(argument, ())}
    return tuple(sorted(found.difference(book.made.get(kernel, ()))))


def reached(roots: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> frozenset[fx.Node]:
    """Some nodes and all that one comes to from them; `onward` gives those next to a node."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(onward(node))
    return frozenset(seen)


def ancestors(roots: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Some nodes and all that they are computed from."""
    return reached(roots, lambda node: node.all_input_nodes)


def updates_as_results(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Take Inductor's updates of inputs, `copy_(input, new)`, out of a graph, and return their new values first.

    Raises:
        CaptureError: one updates what is no input, or an input twice.
    """
    updates: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.target is not copy_:
            continue
        target, new = node.args[0], node.args[1]
        assert isinstance(target, fx.Node)
        assert isinstance(new, fx.Node)
        if target.op != "placeholder" or target in updates:
            raise CaptureError(f"{node.name} updates what is no input, or an input twice: it cannot be planned")
        node.replace_all_uses_with(new)
        updates[target] = new
        graph.erase_node(node)
    results = results_of(graph)
    described = _compat.descriptors(graph) or [None] * len(results)
    output.args = ((*updates.values(), *results),)
    _compat.set_descriptors(graph, [None] * len(updates) + described)
    return updates
