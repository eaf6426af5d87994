"""Coarser ops from kernels: a cheap kernel joins its only producer or only consumer where no option is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .. import _compat
from .dataflow import Dataflow, is_choice, is_random, is_unknown
from .operations import Kind, Operations

aten = torch.ops.aten

CHEAP = frozenset(
    {
        aten.clone.default,
        _compat.TO_COPY,
        aten.copy.default,
        aten.full.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_empty_strided.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.threshold_backward.default,
        aten.constant_pad_nd.default,
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.cat.default,
    }
)


@dataclass(frozen=True, eq=False)
class _Group:
    nodes: tuple[fx.Node, ...]
    cheap: bool


def groups(
    flow: Dataflow, cheap: Callable[[fx.Node], bool] | None = None, fused: bool = False
) -> tuple[tuple[fx.Node, ...], ...]:
    """The kernels of a step in groups, in the order in which they run, the forward pass's first.

    Two groups become one when the second is the only reader of what the first makes for it, both run in the same pass,
    neither draws random numbers, chooses among numbers, may do anything or is a collective, one of them is cheap,
    nothing that the step returns comes to be made together with what could else be made again, and:
    - what the first makes for others too is small, is read after the second has run, and the second is cheap;
    - the second makes no more bytes than it read from the first, or the first is the cheap one;
    - the first read no more bytes than it made for the second, beyond what the second reads anyway;
    - the merged op needs no more memory at once than some kernel needs anyway.
    Then whatever a plan of the kernels keeps, a plan of the groups can keep for no more bytes and nearly no more time.
    Kernels that only update an input from itself (counters) become one group, the last of the forward pass.

    Args:
        cheap: what may be merged; by default pointwise kernels and their like.
        fused: a group runs as one kernel, so that what stays inside it needs no memory.
    """
    return _Grouping(flow, cheap or _is_cheap, fused).run()


def groups_like(flow: Dataflow, other: Operations) -> tuple[tuple[fx.Node, ...], ...] | None:
    """The groups of another size of the same step, if its kernels are the same ones; their sizes do not matter here.

    None as well where they would not run in their order here: two buffers may have become one since then.
    """
    ours, theirs = flow.kernels, other.flow.kernels
    same = [n.target for n in ours] == [n.target for n in theirs]
    if not same or flow.forward_kernels != other.flow.forward_kernels:
        return None
    mine = dict(zip(theirs, ours, strict=True))
    found = tuple(tuple(mine[n] for n in op.nodes) for op in other.ops if op.kind is Kind.KERNELS)
    maker = {s: n for n in ours for s in flow.makes[n]}
    done: set[fx.Node] = set()
    for nodes in found:
        done.update(nodes)
        if any(maker[s] not in done for n in nodes for s in flow.reads[n] if s in maker):
            return None
    return found


class _Grouping:
    def __init__(self, flow: Dataflow, cheap: Callable[[fx.Node], bool], fused: bool) -> None:
        self.flow, self.fused = flow, fused
        self.position = {n: i for i, n in enumerate(flow.kernels)}
        self.group: dict[fx.Node, _Group] = {n: _Group((n,), cheap(n)) for n in flow.kernels}
        self.maker = {s: n for n in flow.kernels for s in flow.makes[n]}
        self.readers: dict[int, set[fx.Node]] = {}
        for node in flow.kernels:
            for storage in flow.reads[node]:
                self.readers.setdefault(storage, set()).add(node)
        self.returned = self._returned()
        self.updates = self._updates()
        self.roomy = max((self._need((n,)) for n in flow.kernels), default=0)

    def run(self) -> tuple[tuple[fx.Node, ...], ...]:
        changed = True
        while changed:
            changed = False
            for node in self.flow.kernels:
                first = self.group[node]
                if first.nodes[-1] is not node or node in self.updates:
                    continue
                for second, between in self._pairs(first):
                    if self._lossless(first, second, between):
                        nodes = self._sorted((*first.nodes, *second.nodes))
                        merged = _Group(nodes, first.cheap and second.cheap)
                        self.group |= dict.fromkeys(nodes, merged)
                        changed = True
                        break
        return self._ordered()

    def _returned(self) -> frozenset[int]:
        new = frozenset(self.flow.mutated.values())
        results = [r for r in (*self.flow.forward_results, *self.flow.backward_results) if r not in new]
        return frozenset(self.flow.storages(results))

    def _updates(self) -> tuple[fx.Node, ...]:
        """Kernels whose only product is the new value of an input that nothing else reads, made of inputs alone."""
        new = self.flow.storages(self.flow.mutated.values()) - self.returned
        return tuple(
            n
            for n in self.flow.kernels
            if set(self.flow.makes[n]) <= new
            and self.flow.makes[n]
            and not is_random(n)
            and not any(self.readers.get(s) for s in self.flow.makes[n])
            and not any(s in self.maker for s in self.flow.reads[n])
        )

    def _outputs(self, group: _Group) -> set[int]:
        """What a group makes that others read or the step returns."""
        inside = set(group.nodes)
        made = [s for n in group.nodes for s in self.flow.makes[n]]
        return {s for s in made if s in self.returned or self.readers.get(s, set()) - inside}

    def _inputs(self, nodes: Sequence[fx.Node]) -> set[int]:
        inside = set(nodes)
        read = {s for n in nodes for s in self.flow.reads[n]}
        return {s for s in read if s in self.maker and self.maker[s] not in inside}

    def _pairs(self, first: _Group) -> list[tuple[_Group, set[int]]]:
        """The groups that alone read something of a group's, and what that is."""
        inside = set(first.nodes)
        found: dict[fx.Node, set[int]] = {}
        for storage in sorted(self._outputs(first) - self.returned):
            readers = {self.group[n].nodes[-1] for n in self.readers[storage] - inside}
            if len(readers) == 1:
                found.setdefault(readers.pop(), set()).add(storage)
        return [(self.group[last], between) for last, between in found.items()]

    def _lossless(self, first: _Group, second: _Group, between: set[int]) -> bool:
        if not (first.cheap or second.cheap) or self._forward(first) != self._forward(second):
            return False
        nodes = (*first.nodes, *second.nodes)
        if any(is_random(n) or is_unknown(n) or is_choice(n) or _compat.is_collective(n.target) for n in nodes):
            return False
        outputs = self._outputs(second)
        elsewhere = self._outputs(first) - between
        if self._forward(first) and (outputs | elsewhere) & self.returned:
            return False
        if elsewhere and not (second.cheap and self._may_wait(first, second, elsewhere, between)):
            return False
        if not first.cheap and self._bytes(outputs) > self._bytes(between):
            return False
        merged = self._sorted(nodes)
        fresh = self._inputs(merged) - self._inputs(second.nodes)
        if first.cheap and self._bytes(fresh) > self._bytes(between):
            return False
        return self._need(merged) <= self.roomy

    def _may_wait(self, first: _Group, second: _Group, elsewhere: set[int], between: set[int]) -> bool:
        """Whether what a group makes for others is small, and not read before the second group has run."""
        last = self.position[second.nodes[-1]]
        readers = {self.group[n] for s in elsewhere for n in self.readers.get(s, ())} - {first, second}
        late = all(self.position[r.nodes[-1]] > last for r in readers)
        return late and 8 * self._bytes(elsewhere) <= self._bytes(between)

    def _need(self, nodes: Sequence[fx.Node]) -> int:
        if self.fused:
            return self._bytes(self._inputs(nodes)) + self._bytes(self._outputs(_Group(tuple(nodes), True)))
        return self._bytes(self._inputs(nodes)) + sum(self.flow.sizes[s] for n in nodes for s in self.flow.makes[n])

    def _bytes(self, storages: set[int]) -> int:
        return sum(self.flow.sizes[s] for s in storages)

    def _forward(self, group: _Group) -> bool:
        return self.position[group.nodes[0]] < self.flow.forward_kernels

    def _sorted(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=lambda n: self.position[n]))

    def _ordered(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Groups by their last kernel: all that a group reads is made by groups that end before it does."""
        updates = frozenset(self.updates)
        found = {self.group[n].nodes[-1]: self.group[n] for n in self.flow.kernels if n not in updates}
        ordered = [found[n].nodes for n in self.flow.kernels if n in found]
        forward = sum(self._forward(self.group[nodes[-1]]) for nodes in ordered)
        return (*ordered[:forward], *([self.updates] if updates else []), *ordered[forward:])


def _is_cheap(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, _compat.OpOverload) and (torch.Tag.pointwise in target.tags or target in CHEAP)
