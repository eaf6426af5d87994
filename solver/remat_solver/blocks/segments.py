"""Where a training graph is narrow: its forward pass cut into segments, each with its part of the backward pass.

A segment is a block, a graph of its own, by which equal segments are recognised, and runs of them joined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from remat_ir import Graph

from ..chain.network import forward_lives, long_lived, narrow_places, stage_of
from ..deadline import look, never

T = TypeVar("T")


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
        found: list[list[int]] = [[] for _ in self.ends]
        place = stage_of(self.ends)
        for value, op, last in forward_lives(self.graph, self.ends[-1] + 1):
            for segment in range(place[op], place[last]):
                found[segment].append(value)
        return tuple(map(tuple, found))


def segments_of(graph: Graph) -> Segments | None:
    """Cut a graph wherever a single value leads on to the rest of its forward pass; None without a backward pass.

    Only where the backward pass reads it too: what stays next to a tape would else be there for nothing.
    Values that live through much of the forward pass count nowhere.
    """
    split = graph.backward_from
    if split is None or split < 2:
        return None
    return with_ends(graph, tuple(narrow_places(graph, split, long_lived(graph, split), least=1)))


def with_ends(graph: Graph, ends: tuple[int, ...]) -> Segments:
    """The segments that end at these forward ops, with the backward ops shared out among them.

    A backward op belongs to the segment in which, or right after which, the forward values lie that it reads; so that
    the parts are contiguous, to no later one than the op before it does.
    """
    first = ends[-1] + 1
    place = stage_of(ends)
    latest = [place[last] for _, _, last in forward_lives(graph, first)]
    starts = [graph.ops] * len(ends)
    now = len(ends) - 1
    starts[now] = first
    for op in range(first, graph.ops):
        lowest = min((latest[v] for v in graph.op_inputs[op] if graph.value_op[v] < first), default=now)
        while now > lowest:
            now -= 1
            starts[now] = op
    return Segments(graph, ends, tuple(starts))


@dataclass(frozen=True)
class Block:
    """A segment's forward and backward ops, between an op that makes what they read of others and a turn between them.

    Op 0 makes, and keeps, what comes from earlier segments. The turn stands for all that happens between the two
    parts: it reads what later segments read of this one, and makes what the backward part reads of them. Two segments
    are repeats of each other exactly where their graphs are equal: ops numbered from the segment's first, with the
    same costs, sizes, flags and edges.

    Attributes:
        graph: the block's graph.
        turn: the op between the two parts.
        outside_bytes: of the values that op 0 makes.
        joint: the block's values that later segments read.
    """

    graph: Graph
    turn: int
    outside_bytes: int
    joint: tuple[int, ...]


def block_of(segments: Segments, segment: int) -> Block:
    """The block of a segment; block op k > 0 is the k-th of its forward ops, then the turn, then the backward ops."""
    graph = segments.graph
    forward, backward = segments.forward(segment), segments.backward(segment)
    inner = {op: 1 + i for i, op in enumerate(forward)}
    turn = 1 + len(forward)
    inner |= {op: turn + 1 + i for i, op in enumerate(backward)}
    # what the segment reads of earlier forward ops, and what its backward part reads of anything else
    read = {v for op in (*forward, *backward) for v in graph.op_inputs[op] if graph.value_op[v] not in inner}
    before = tuple(sorted(v for v in read if graph.value_op[v] < forward.start))
    between = tuple(sorted(read.difference(before)))

    def each(first: T, turned: T, of: Callable[[int], T]) -> list[T]:
        return [first, *map(of, forward), turned, *map(of, backward)]

    made = each(before, between, lambda op: graph.op_values[op])
    number = {value: i for i, value in enumerate(value for values in made for value in values)}
    joint = tuple(number[v] for v in segments.joints[segment] if graph.value_op[v] in inner)
    optional, keep = frozenset(graph.optional), frozenset(graph.keep)
    leaving = {
        v for op in backward for v in graph.op_values[op] if any(u not in inner for u in graph.users[v]) or v in keep
    }
    own = {v for v in number if graph.value_op[v] in inner} - leaving
    return Block(
        Graph(
            op_cost_ns=tuple(each(0, 0, lambda op: graph.op_cost_ns[op])),
            op_inputs=tuple(each((), joint, lambda op: tuple(number[v] for v in graph.op_inputs[op]))),
            value_op=tuple(place for place, values in enumerate(made) for _ in values),
            value_bytes=tuple(graph.value_bytes[v] for v in number),
            op_workspace_bytes=tuple(each(0, 0, lambda op: graph.op_workspace_bytes[op])),
            optional=tuple(number[v] for v in number if v in own and v in optional),
            once=tuple(sorted({0, turn, *(inner[op] for op in graph.once if op in inner)})),
            keep=tuple(sorted([number[v] for v in before] + [number[v] for v in leaving])),
            consumes=tuple(number[v] for v in graph.consumes if v in own and graph.users[v][-1] in inner),
            backward_from=turn,
        ),
        turn,
        sum(graph.value_bytes[v] for v in before),
        joint,
    )


_LONGEST_PERIOD = 64


class Run(NamedTuple):
    """Segments start … start + period · times − 1, in which every block equals the one `period` before it."""

    start: int
    period: int
    times: int


def runs_of(kinds: Sequence[Hashable], stop: Callable[[], bool] = never) -> list[Run]:
    """The repeated stretches of a sequence, from left to right, each as far as it goes with its shortest period.

    Stretches do not overlap; of those that begin at one place the longest is taken. O(length · longest period).
    Where `stop` says so, `TimeUp` is raised.
    """
    count = len(kinds)
    # reach[p][i]: how many entries from i on equal the entry p later
    most = min(_LONGEST_PERIOD, count // 2)
    reach = [[0] * (count + 1) for _ in range(most + 1)]
    for period in range(1, most + 1):
        look(stop)
        row = reach[period]
        for i in range(count - period - 1, -1, -1):
            row[i] = row[i + 1] + 1 if kinds[i] == kinds[i + period] else 0
    found: list[Run] = []
    i = 0
    while i < count:
        here = [Run(i, period, 1 + reach[period][i] // period) for period in range(1, most + 1)]
        repeated = (run for run in here if run.times > 1)
        best = max(repeated, key=lambda run: run.period * run.times, default=Run(i, 1, 1))
        if best.times > 1:
            found.append(best)
        i += best.period * best.times
    return found


def joined(segments: Segments, most: int, stop: Callable[[], bool] = never) -> tuple[Segments, list[Block]]:
    """At most about `most` segments, made by joining neighbours, and their blocks; inside runs, by whole periods.

    So repeats stay repeats: a run of 330 pairs of equal segments becomes 165 pairs of pairs, of one kind.
    Where `stop` says so, `TimeUp` is raised.
    """
    blocks = _blocks(segments, stop)
    while segments.count > most:
        runs = {run.start: run for run in runs_of(blocks, stop)}
        ends: list[int] = []
        i = 0
        while i < segments.count:
            run = runs.get(i)
            if run is None:
                width, beyond = (1 if i + 1 in runs else 2), i + 1
            else:
                # one period at a time first, then two of them
                width = run.period if run.period > 1 else 2
                beyond = i + run.period * run.times
            while i < beyond:
                i = min(i + width, segments.count) if run is None else min(i + width, beyond)
                ends.append(segments.ends[i - 1])
        if len(ends) == segments.count:
            break
        segments = with_ends(segments.graph, tuple(ends))
        blocks = _blocks(segments, stop)
    return segments, blocks


def _blocks(segments: Segments, stop: Callable[[], bool]) -> list[Block]:
    blocks: list[Block] = []
    for i in range(segments.count):
        look(stop)
        blocks.append(block_of(segments, i))
    return blocks
