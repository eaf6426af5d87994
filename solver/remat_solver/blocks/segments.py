"""Where a training graph is narrow: its forward pass cut into segments, each with its part of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from remat_ir import Graph

_LONG_LIVED = 0.3
"""Share of the forward ops that a value may outlive before it no longer counts against a cut: masks, positions."""


@dataclass(frozen=True)
class Segments:
    """A training graph as segments 0 … L−1 of its forward pass.

    Attributes:
        graph: the graph.
        ends: [L] the last forward op of each segment.
        backward_starts: [L] the first op of the backward part of each segment; they fall from segment to segment.
            A part may be empty.
    """

    graph: Graph
    ends: tuple[int, ...]
    backward_starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of segments L."""
        return len(self.ends)

    def forward(self, segment: int) -> range:
        """The forward ops of a segment."""
        return range(self.ends[segment - 1] + 1 if segment else 0, self.ends[segment] + 1)

    def backward(self, segment: int) -> range:
        """The backward ops of a segment, which run after those of all later segments."""
        return range(self.backward_starts[segment], self.backward_starts[segment - 1] if segment else self.graph.ops)

    @cached_property
    def joints(self) -> tuple[tuple[int, ...], ...]:
        """[L] the values that forward ops of later segments read of this one or of earlier ones; the last is empty."""
        graph, last = self.graph, self.ends[-1]
        found: list[list[int]] = [[] for _ in self.ends]
        place = segment_of(self.ends)
        for value, op in enumerate(graph.value_op):
            if op > last:
                break
            readers = [user for user in graph.users[value] if user <= last]
            if readers:
                for segment in range(place[op], place[readers[-1]]):
                    found[segment].append(value)
        return tuple(map(tuple, found))


def segment_of(ends: tuple[int, ...]) -> list[int]:
    """[ends[-1] + 1] the segment of each forward op."""
    place: list[int] = []
    for segment, end in enumerate(ends):
        place += [segment] * (end + 1 - len(place))
    return place


def segments_of(graph: Graph) -> Segments | None:
    """Cut a graph wherever a single value leads on to the rest of its forward pass; None without a backward pass.

    Only where the backward pass reads it too: what stays next to a tape would else be there for nothing.
    Values that live through much of the forward pass count nowhere: they are small, or there is no narrow place.
    """
    split = graph.backward_from
    if split is None or split < 2:
        return None
    crossing, passing = [0] * (split + 1), [0] * (split + 1)
    for value, op in enumerate(graph.value_op):
        if op >= split:
            break
        last = max((user for user in graph.users[value] if user < split), default=op)
        if op < last <= op + max(8, _LONG_LIVED * split):
            crossing[op] += 1
            crossing[last] -= 1
            if max(graph.users[value]) < split:
                passing[op] += 1
                passing[last] -= 1
    ends: list[int] = []
    across = unread = 0
    for op in range(split - 1):
        across += crossing[op]
        unread += passing[op]
        if across == 1 and not unread:
            ends.append(op)
    return with_ends(graph, (*ends, split - 1))


def with_ends(graph: Graph, ends: tuple[int, ...]) -> Segments:
    """The segments that end at these forward ops, with the backward ops shared out among them.

    A backward op belongs to the segment in which, or right after which, the forward values lie that it reads; so that
    the parts are contiguous, to no later one than the op before it does.
    """
    first = ends[-1] + 1
    place = segment_of(ends)
    latest = [
        max((place[user] for user in graph.users[value] if user < first), default=place[op])
        for value, op in enumerate(graph.value_op)
        if op < first
    ]
    starts = [graph.ops] * len(ends)
    now = len(ends) - 1
    starts[now] = first
    for op in range(first, graph.ops):
        lowest = min((latest[v] for v in graph.op_inputs[op] if graph.value_op[v] < first), default=now)
        while now > lowest:
            now -= 1
            starts[now] = op
    while now > 0:
        now -= 1
        starts[now] = graph.ops
    return Segments(graph, ends, tuple(starts))
