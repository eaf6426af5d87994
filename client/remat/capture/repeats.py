"""Blocks that repeat in the graph that Dynamo made: which are alike in all that tracing sees, and a graph with a few.

Dynamo has traced every block, so that its guards and its side effects are those of all of them. What follows, the trace
of both passes, depends on the graph alone: where a block follows on one that is alike, its part of the trace is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _compat
from .sizes import SYMBOLS

LEAST_SPARED = 40
"""Nodes; a run that spares fewer is traced as it is."""

KEPT = 4
"""Blocks of a run that are traced: the first, two between blocks that are alike, the last."""

_WINDOW = 6
_PERIODS = 12
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, eq=False)
class Run:
    """Blocks that follow one another and are alike.

    Attributes:
        blocks: the nodes of each, in order.
        own: the placeholders that each block alone reads, in the order in which it reads them; those of the first are
            not known.
    """

    blocks: tuple[tuple[fx.Node, ...], ...]
    own: tuple[tuple[fx.Node, ...], ...]


def words(value: object, node: object = "%") -> object:
    """What no other value has, but for the nodes in it: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return node
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(words(item, node) for item in value)
    if isinstance(value, Mapping):
        return type(value).__name__, *((repr(key), words(item, node)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", *(words(part, node) for part in (value.start, value.stop, value.step))
    return "object", type(value).__name__, id(value)


def metadata(value: object) -> object:
    """What tracing sees of a value: of tensors all but numbers and storage, of symbols what they stand for."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not _compat.is_wrapper(value):
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        places = tuple(n if type(n) is int else metadata(n) for n in numbers)
        kind = type(value), value.dtype, value.device, value.dim(), places
        return *kind, value.requires_grad, value.is_conj(), value.is_neg(), type(value.grad_fn).__name__
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(metadata, value)
    if isinstance(value, SYMBOLS):
        return type(value).__name__, value.node.expr
    return words(value)


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of a node's arguments in order, each as often as it is there."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _token(node: fx.Node) -> object:
    """What two nodes of blocks that are alike have in common; of its own for a node that is part of none."""
    known = _compat.of_torch_or_python(node.target) and not isinstance(node.target, _compat.HigherOrderOperator)
    if not (node.op == "call_method" or (node.op == "call_function" and known)):
        return node
    target = node.target if isinstance(node.target, str) else id(node.target)
    noted = {key: words(value) for key, value in node.meta.items() if key in ("custom", "ac_graph_id", "recompute")}
    return node.op, target, words(node.args), words(node.kwargs), metadata(_compat.example_of(node)), repr(noted)


def runs(graph: fx.Graph) -> list[Run]:
    """The runs of blocks that are worth it, without overlaps, those first that spare most."""
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    number: dict[object, int] = {}
    tokens = [number.setdefault(_token(node), len(number)) for node in body]
    finder = _Finder(body)
    found: list[Run] = []
    free = [True] * len(body)
    for first, end, period in _repeats(tokens):
        for start in finder.cuts(first, end, period):
            if not all(free[start:end]):
                break
            run = finder.run(start, (end - start) // period, period)
            if run is not None:
                found.append(run)
                used = len(run.blocks) * period
                free[start : start + used] = [False] * used
                break
    return found


def _repeats(tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Ranges in which every token comes again after a period, those that spare most first: start, end, period."""
    last: dict[tuple[int, ...], int] = {}
    apart: Counter[int] = Counter()
    for at in range(len(tokens) - _WINDOW):
        window = tuple(tokens[at : at + _WINDOW])
        if window in last:
            apart[at - last[window]] += 1
        last[window] = at
    found = []
    for period, _ in apart.most_common(_PERIODS):
        start = 0
        for at in range(len(tokens) - period + 1):
            if at == len(tokens) - period or tokens[at] != tokens[at + period]:
                if (at + period - start) // period > KEPT and (at - start) - (KEPT - 1) * period >= LEAST_SPARED:
                    found.append((start, at + period, period))
                start = at + 1
    yield from sorted(found, key=lambda each: (each[0] - each[1] + KEPT * each[2], each[2]))


class _Finder:
    """Blocks in a sequence of nodes, whose tokens repeat."""

    def __init__(self, body: Sequence[fx.Node]) -> None:
        self._body = body
        self._at = {node: at for at, node in enumerate(body)}
        self._reads = {node: nodes_in((node.args, node.kwargs)) for node in body}
        self._alive = [0] * (len(body) + 1)
        """[positions] how many values are made before and read from there on."""
        for node, at in self._at.items():
            until = max((self._at.get(user, len(body)) for user in node.users), default=at)
            self._alive[at + 1] += 1
            if until < len(body):
                self._alive[until + 1] -= 1
        for at in range(len(body)):
            self._alive[at + 1] += self._alive[at]

    def cuts(self, start: int, end: int, period: int) -> list[int]:
        """Where the first block may begin, with the fewest values between blocks first."""
        second = range(start, min(start + period, end - KEPT * period))
        return sorted(second, key=lambda at: self._alive[at + period])[:8]

    def run(self, start: int, count: int, period: int) -> Run | None:
        """The longest run from there; None: it spares too little."""
        blocks = [tuple(self._body[at : at + period]) for at in range(start, start + count * period, period)]
        own: list[tuple[fx.Node, ...]] = [()]
        for number in range(1, count):
            end = start + (number + 1) * period
            found = self._own(start, period, number, own[-1])
            if found is None or not (number == 1 or self._read_before(blocks[number - 1], end)):
                break
            if any(_compat.version_counter(_compat.example_of(p)) for p in found):  # updated: a result of the step
                return None
            own.append(found)
        if (len(own) - KEPT) * period < LEAST_SPARED:
            return None
        return Run(tuple(blocks[: len(own)]), tuple(own))

    def _read_before(self, block: Sequence[fx.Node], end: int) -> bool:
        """Whether a block's values are read before a position alone."""
        return all(self._at.get(user, end) < end for node in block for user in node.users)

    def _own(self, start: int, period: int, number: int, before: Sequence[fx.Node]) -> tuple[fx.Node, ...] | None:
        """The placeholders that a block alone reads, where what it reads corresponds to what the block before it does.

        Args:
            number: of the block; the second's is 1, and corresponds to itself.
            before: those of the block before it.
        """
        here = start + number * period
        there = here - period if number > 1 else here
        partner: dict[fx.Node, fx.Node] = {}
        for offset in range(period):
            mine, other = self._reads[self._body[here + offset]], self._reads[self._body[there + offset]]
            if len(mine) != len(other):
                return None
            for m, o in zip(mine, other, strict=True):
                if m.op == o.op == "placeholder":
                    if partner.setdefault(o, m) is not m:
                        return None
                elif not (m is o and self._at.get(m, start) < start) and not self._alike(m, o, here, there, period):
                    return None
        if number == 1:
            return tuple(m for m in partner if self._alone(m, here, period))
        own = tuple(partner[o] for o in before)
        if any(o is not m for o, m in partner.items() if o not in before) or len(set(own)) < len(own):
            return None
        given = ([metadata(_compat.example_of(p)) for p in those] for those in (own, before))
        return own if all(self._alone(m, here, period) for m in own) and next(given) == next(given) else None

    def _alike(self, mine: fx.Node, other: fx.Node, here: int, there: int, period: int) -> bool:
        """Whether two nodes have one place in blocks, or in those before them."""
        at, to = self._at.get(mine), self._at.get(other)
        return at is not None and to is not None and at - here == to - there >= -period

    def _alone(self, placeholder: fx.Node, here: int, period: int) -> bool:
        """Whether a placeholder is read in one block."""
        return all(0 <= self._at.get(user, -1) - here < period for user in placeholder.users)


def shortened(graph: fx.Graph, found: Sequence[Run]) -> fx.Graph:
    """A copy of the graph without the blocks of runs that are not traced; its nodes have the same names."""
    short = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    left = {node for run in found for block in run.blocks[KEPT - 1 : -1] for node in block}
    stands = {node: run for run in found for node in run.blocks[-1][:1]}
    for node in graph.nodes:
        if node in left:
            continue
        if node in stands:
            run = stands[node]
            for gone, like in zip(run.blocks[-2], run.blocks[KEPT - 2], strict=True):
                copies[gone] = copies[like]
        copies[node] = short.node_copy(node, copies.__getitem__)
    return short
