"""Transfers of a plan in the lowered graphs: what each of them runs, and where they stand among the kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import fx

from remat_ir import Drop, Offload, Prefetch, Wait

from .. import _compat
from ..capture.operations import Kind, Operations, getitems
from ..device import of
from .link import Copies, Link, Place, UnderWay, link_of

if TYPE_CHECKING:
    from .lower import Pass

Transfer: TypeAlias = Offload | Wait | Drop | Prefetch


class Away(NamedTuple):
    """A storage on the host, and how the tensors lie in it that stand for its value."""

    link: Link
    places: tuple[Place, ...]
    copies: Copies


class Moving(NamedTuple):
    """A storage of the device while it is copied out or back: until that has ended nothing else may free it, and the
    host's copy lives."""

    away: Away
    storage: torch.UntypedStorage
    token: UnderWay | None


def offload(*tensors: torch.Tensor) -> Moving:
    """Start to copy the storage of some tensors to the host.

    Raises:
        RuntimeError: the device's work is being captured as a graph of kernels.
    """
    device = tensors[0].device
    if of(device).capturing():
        raise RuntimeError(
            f"the plan offloads values, which cannot be done while {device} is being captured as a graph of kernels: "
            "train without such graphs, or without a link"
        )
    link, storage = link_of(device), tensors[0].untyped_storage()
    copies, token = link.out([storage])
    return Moving(Away(link, tuple(map(Place.of, tensors)), copies), storage, token)


def offloaded(leaving: Moving) -> Away:
    """Wait for a copy out: the device's storage is free to go."""
    leaving.away.link.wait(leaving.token)
    return leaving.away


def prefetch(away: Away) -> Moving:
    """Start to copy a storage back."""
    (storage,), token = away.link.back(away.copies)
    return Moving(away, storage, token)


def prefetched(returning: Moving) -> list[torch.Tensor]:
    """Wait for a copy back: the tensors as they lay in their storage."""
    returning.away.link.wait(returning.token)
    return [place.on(returning.storage) for place in returning.away.places]


class Crossing(_compat.OpaqueBase):
    """What of a transfer goes from the forward to the backward pass, next to the tensors that autograd saves.

    It lives as long as autograd's node; what it carries is let go of when the backward pass takes it, unless the graph
    is kept for another one.
    """

    def __init__(self, carried: Away | Moving | None = None) -> None:
        self.carried = carried


_compat.register_opaque(Crossing)


def crossed(crossing: Crossing) -> Away | Moving:
    """What a crossing carries.

    Raises:
        RuntimeError: an earlier backward pass has taken it.
    """
    carried = crossing.carried
    if carried is None:
        raise RuntimeError(
            "trying to backward through the graph a second time: specify retain_graph=True in the first backward()"
        )
    if not _compat.keeps_graph():
        crossing.carried = None
    return carried


@dataclass(eq=False)
class _Copy:
    """The copy of a storage: the node that stands for it, of which pass, and whether it is on its way back."""

    node: fx.Node
    late: bool
    returning: bool = False


class Transfers:
    """Emits a plan's transfers, each where the plan has it among the computations.

    Args:
        get: the node that stands in the present pass for a key of one of its tables, or None where the lowered step
            has no such tensor, since nothing reads it.
        carry: a placeholder of the backward graph for a node of the forward graph.
    """

    def __init__(
        self,
        step: Operations,
        get: Callable[[Pass, str, fx.Node], fx.Node | None],
        carry: Callable[[fx.Node, str], fx.Node],
    ) -> None:
        self._flow, self._get, self._carry = step.flow, get, carry
        made = [(storage, op) for op in step.ops for storage in op.makes]
        self._storages = [storage for storage, _ in made]
        self._makers = dict(made)
        self._copies: dict[int, _Copy] = {}

    def free(self, value: int) -> None:
        """Let go of a copy that was never needed."""
        self._copies.pop(self._storages[value], None)

    def emit(self, step: Transfer, passes: tuple[Pass, ...]) -> None:
        """Emit one transfer into the last of the passes that have begun."""
        storage = self._storages[step.value]
        now, late = passes[-1], len(passes) > 1
        copy = self._copies.get(storage)
        if isinstance(step, Offload):
            self._offload(storage, now, late)
        elif copy is None:
            pass  # of a value that the running step does not have
        elif isinstance(step, Drop):
            self._drop(storage, passes)
        elif isinstance(step, Prefetch):
            made = now.call(prefetch, (self._here(copy, passes),), {}, self._name(storage, "prefetch"))
            self._copies[storage] = _Copy(made, late, returning=True)
        elif copy.returning:
            self._arrive(storage, self._here(copy, passes), now)
        else:
            made = now.call(offloaded, (self._here(copy, passes),), {}, self._name(storage, "offloaded"))
            self._copies[storage] = _Copy(made, late)

    def _offload(self, storage: int, now: Pass, late: bool) -> None:
        places = [(table, key, self._get(now, table, key)) for table, key in self._keys(storage)]
        nodes = tuple(node for _, _, node in places if node is not None)
        if nodes and len(nodes) == len(places):
            made = now.call(offload, nodes, {}, self._name(storage, "offload"))
            self._copies[storage] = _Copy(made, late)

    def _drop(self, storage: int, passes: tuple[Pass, ...]) -> None:
        op = self._makers[storage]
        # views of the input that a storage is a copy of stand for views of the copy
        overwritten = self._flow.storages_of[op.nodes[0]] if op.kind is Kind.ORIGINAL else ()
        for one in passes:
            for table, key in self._keys(storage):
                one.table(table).pop(key, None)
            one.forget((storage, *overwritten))

    def _arrive(self, storage: int, copy: fx.Node, now: Pass) -> None:
        del self._copies[storage]
        name = self._name(storage, "prefetched")
        arrived = now.call(prefetched, (copy,), {}, name)
        for i, (table, key) in enumerate(self._keys(storage)):
            piece = now.call(operator.getitem, (arrived, i), {}, f"{name}_{i}")
            piece.meta = dict(key.meta)
            now.table(table)[key] = piece

    def _here(self, copy: _Copy, passes: tuple[Pass, ...]) -> fx.Node:
        """The node that stands for a copy in the present pass."""
        if copy.late or len(passes) == 1:
            return copy.node
        sent = passes[0].call(Crossing, (copy.node,), {}, copy.node.name + "_crossing")
        sent.meta = {"val": _compat.opaque_example(Crossing())}
        return passes[-1].call(crossed, (self._carry(sent, copy.node.name),), {}, copy.node.name + "_crossed")

    def _keys(self, storage: int) -> list[tuple[str, fx.Node]]:
        """Under which keys of which tables of a pass the tensors of a storage are found."""
        op, flow = self._makers[storage], self._flow
        if op.kind is Kind.BEFORE_UPDATE:
            return []
        if op.kind is Kind.ORIGINAL:
            return [("originals", op.nodes[0])]
        if op.kind is Kind.RANDOM_STATE:
            return [("states", op.nodes[0])]
        nodes = flow.tangents if op.kind is Kind.TURN else (flow.owner[storage], *getitems(flow.owner[storage]))
        lies = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and storage in flow.storages_of[n]]
        return [("env", node) for node in lies]

    def _name(self, storage: int, what: str) -> str:
        op = self._makers[storage]
        return f"{op.nodes[0].name if op.nodes else 'tangent'}_{what}"
