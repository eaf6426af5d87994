"""A bound by windows: a deep network in stretches of layers, each of which has a certificate of its own (P13).

Few values fit next to the first computation of one op, the turn. So most of the network has none held there, and a
stretch of it that has none must be computed again after the turn, within the memory, whatever the rest does. A window
is such a stretch, its ops before the turn and those after it that belong to them, written as a graph of its own; equal
windows have equal graphs, of which one certificate is enough. What the values that are held make of the network, by
dynamic programming over where they are, is then the least that all windows between them cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from ..errors import InvalidData
from ..graph import Graph
from .certificate import StageProof, WindowProof
from .check import prove_stages
from .rows import InvalidProof, Relaxation

MOST_OPS = 4_000_000
"""Ops of all windows together."""
MOST_STEPS = 20_000_000
"""Steps over the segments, and over what may be held in them."""
MOST_DIFFERENT = 1_000
"""Pairs of a window's graph and a certificate that differ."""


class Held(NamedTuple):
    """With values of at least so many bytes held in these segments, the segments so far cost at least so much."""

    bytes: int
    extra_ns: int
    touched: tuple[int, ...] = ()


class Windows:
    """The segments of a graph around an op, and their windows as graphs.

    Segment i has the ops firsts[i] … firsts[i + 1] − 1 before the turn and laters[i + 1] … laters[i] − 1 after it.
    Values that are certainly there at the turn, that it reads, or of at most `small_bytes` count as free there.

    Raises:
        InvalidProof: segments that are none, or a graph with a link.
    """

    def __init__(
        self, graph: Graph, capacity: int, turn: int, firsts: Sequence[int], laters: Sequence[int], small_bytes: int
    ) -> None:
        if graph.link is not None:
            raise InvalidProof("windows are for graphs without a link")
        on = Relaxation(graph, capacity, (turn, graph.ops - 1), ())
        if len(firsts) != len(laters) or len(firsts) < 2 or small_bytes < 0:
            raise InvalidProof("windows need segments, with as many ends before the turn as after it")
        if firsts[0] < 0 or firsts[-1] > turn or any(b <= a for a, b in pairwise(firsts)):
            raise InvalidProof(f"segments must ascend and end before op {turn}")
        if laters[-1] <= turn or laters[0] > graph.ops or any(b > a for a, b in pairwise(laters)):
            raise InvalidProof(f"what belongs to the segments must descend and end after op {turn}")
        self.graph, self.capacity, self.turn, self.small_bytes = graph, capacity, turn, small_bytes
        self.firsts, self.laters = firsts, laters
        self.segments = len(firsts) - 1
        free, beside = on._beside(1)
        self.room = free - sum(graph.value_bytes[v] for v in beside if on.hold(1, v) == 1)
        """Bytes for what is held at the turn."""
        read, kept = frozenset(graph.op_inputs[turn]), frozenset(graph.keep)
        self._kept, self._optional = kept, frozenset(graph.optional)
        held = {v: on.hold(1, v) for op in range(firsts[0], firsts[-1]) for v in graph.op_values[op]}
        self._free = {v for v, s in held.items() if s == 1 or v in read or graph.value_bytes[v] <= small_bytes}
        self._least = [
            min(
                (
                    graph.value_bytes[v]
                    for op in range(start, end)
                    for v in graph.op_values[op]
                    if held[v] not in (0, 1) and v not in self._free
                ),
                default=None,
            )
            for start, end in pairwise(firsts)
        ]
        self._steps = 0

    def most_touched(self) -> int | None:
        """The most segments in which something can be held at the turn; None where nothing can be."""
        least = sorted(size for size in self._least if size is not None)
        return bisect_right([*accumulate(least)], self.room) if least else None

    def spares(self, segment: int) -> tuple[int, ...]:
        """Bytes held of a segment that are worth telling apart: those of its smallest value, and all that fit."""
        least = self._least[segment]
        return () if least is None or least > self.room else tuple({least, self.room})

    def window(self, start: int, end: int, spare_bytes: int) -> Graph:
        """Segments start … end − 1 as a graph: with so many bytes for what is held while the turn runs.

        What other ops make is no value of it: where an op reads it, it adds to the op's workspace.

        Raises:
            InvalidProof: there is no such window.
        """
        graph = self.graph
        alone = end == start + 1 and 0 <= spare_bytes <= self.capacity
        if not 0 <= start < end <= self.segments or (spare_bytes and not alone):
            raise InvalidProof(f"({start}, {end}, {spare_bytes}) is no window")
        before = range(self.firsts[start], self.firsts[end])
        after = range(self.laters[end], self.laters[start])
        ops = [*before, -1, *after]
        made = [graph.op_values[op] if op >= 0 else () for op in ops]
        reads = [graph.op_inputs[op] if op >= 0 else () for op in ops]
        number = {value: i for i, value in enumerate(value for values in made for value in values)}
        own = [graph.op_workspace_bytes[op] if op >= 0 else self.capacity - spare_bytes for op in ops]
        outside = [sum(graph.value_bytes[v] for v in read if v not in number) for read in reads]
        try:
            return Graph(
                op_cost_ns=tuple(graph.op_cost_ns[op] if op >= 0 else 0 for op in ops),
                op_inputs=tuple(tuple(number[v] for v in read if v in number) for read in reads),
                value_op=tuple(at for at, values in enumerate(made) for _ in values),
                value_bytes=tuple(0 if v in self._free else graph.value_bytes[v] for v in number),
                op_workspace_bytes=tuple(map(add, own, outside)),
                optional=tuple(number[v] for v in number if v in self._optional),
                once=tuple(at for at, op in enumerate(ops) if op < 0 or graph.last_stage[op] == op),
                keep=tuple(number[v] for v in number if v in self._kept),
            )
        except InvalidData as error:
            raise InvalidProof(f"a window is no graph: {error}") from None

    def least(self, costs: Iterable[tuple[int, int, int, int]]) -> Held:
        """The least that all windows cost, besides each op once, over all that may be held at the turn; with what is.

        `costs` says of windows (start, end, spare) what they cost at least if no more than `spare` bytes are held.
        """
        ending: dict[int, list[tuple[int, int]]] = {}
        touched: list[list[tuple[int, int]]] = [[] for _ in range(self.segments)]
        for start, end, spare, extra in costs:
            if spare:
                touched[start].append((spare, extra))
            else:
                ending.setdefault(end, []).append((start, extra))
        touches = [self._touches(i, touched[i]) for i in range(self.segments)]
        # [i] where segment i − 1 is the last one that is touched; of no two one is worse in bytes and cost
        so_far: list[list[Held]] = [[Held(0, 0)], *([] for _ in range(self.segments))]
        ends: list[Held] = []
        for start in range(self.segments + 1):
            states = _undominated(so_far[start])
            if not states:
                continue
            packed = self._packed(start, ending)
            best = min(states, key=lambda state: state.extra_ns)
            ends.append(best._replace(extra_ns=best.extra_ns + packed[-1]))
            for at in range(start, self.segments):
                self._step(len(states) * len(touches[at]) + 1)
                so_far[at + 1] += [
                    Held(
                        state.bytes + more.bytes,
                        state.extra_ns + packed[at - start] + more.extra_ns,
                        (*state.touched, at),
                    )
                    for more in touches[at]
                    for state in states
                    if state.bytes + more.bytes <= self.room
                ]
        return min(ends, key=lambda state: state.extra_ns)

    def _packed(self, start: int, ending: dict[int, list[tuple[int, int]]]) -> list[int]:
        """[k] the most that windows apart from each other cost in segments start … start + k − 1 with nothing held."""
        best = [0]
        for end in range(start + 1, self.segments + 1):
            found = ending.get(end, ())
            self._step(len(found) + 1)
            best.append(max([best[-1], *(best[a - start] + extra for a, extra in found if a >= start)]))
        return best

    def _touches(self, segment: int, levels: Sequence[tuple[int, int]]) -> list[Held]:
        """What it takes to hold something of a segment, and what it costs then."""
        least = self._least[segment]
        if least is None:
            return []
        ordered = sorted(levels)
        above = (0, *(spare + 1 for spare, _ in ordered))
        extras = (*(extra for _, extra in ordered), 0)
        return _undominated([Held(max(least, a), extra) for a, extra in zip(above, extras, strict=True)])

    def _step(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise InvalidProof(f"the windows take more than {MOST_STEPS} steps to join")


def _undominated(states: list[Held]) -> list[Held]:
    kept: list[Held] = []
    for state in sorted(states, key=lambda state: (state.bytes, state.extra_ns)):
        if not kept or state.extra_ns < kept[-1].extra_ns:
            kept.append(state)
    return kept


def prove_windows(graph: Graph, capacity: int, proof: WindowProof) -> int:
    """The bound that the parts of a certificate by windows prove together.

    Raises:
        InvalidProof: a window that is none, or a part that proves nothing of its window.
    """
    on = Windows(graph, capacity, proof.turn, proof.firsts, proof.laters, proof.small_bytes)
    graphs: list[tuple[Graph, int]] = []
    ops = 0
    for start, end, spare, part in proof.windows:
        if not 0 <= part < len(proof.parts):
            raise InvalidProof(f"there is no part {part}")
        graphs.append((on.window(start, end, spare), part))
        ops += graphs[-1][0].ops
        if ops > MOST_OPS:
            raise InvalidProof(f"the windows have more than {MOST_OPS} ops together")
    different = dict.fromkeys(graphs, 0)
    if len(different) > MOST_DIFFERENT:
        raise InvalidProof(f"the windows are of more than {MOST_DIFFERENT} kinds")
    for each, part in different:
        different[each, part] = _extra_ns(each, capacity, proof.parts[part], len(different))
    costs = [(*window[:3], different[kind]) for window, kind in zip(proof.windows, graphs, strict=True)]
    return graph.total_cost_ns + on.least(costs).extra_ns


def _extra_ns(graph: Graph, capacity: int, part: StageProof, share: int) -> int:
    """What a window costs at least besides each of its ops once."""
    bound_ns = prove_stages(graph, capacity, part, share)
    if bound_ns is None:
        raise InvalidProof("a part says that its window has no plan")
    return bound_ns - graph.total_cost_ns
