"""What the rows of a certificate say, written from the problem alone; docs/proofs.md has propositions P1 to P11.

Cuts τ_0 < τ_1 < … < τ_{K−1} = n − 1 gather the stages of a plan into coarse stages: c is what runs after the first
computation of τ_{c−1}, up to and including that of τ_c. Its first op is f_c = τ_{c−1} + 1. For 1 ≤ a ≤ b < K, of a plan
without useless computations and holdings,

    ("run", a, b, i)      R: op i < f_a is computed in one of the coarse stages a … b
    ("hold", c, v)        S: value v, made by an op before f_c, is resident when c begins, and read later or kept
    ("through", c, v)     T: value v, made by an op before f_c that does not run in c, is resident throughout c, since
                          it is resident when c ends or read by τ_c

are 0 or 1. Only R of single coarse stages (a = b) cost something. What is certain is no column but a number (P1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ..errors import InvalidPlan
from ..graph import Graph
from .certificate import Column, Row

MOST_TERMS = 20_000_000
"""Terms that the rows of one certificate may have together: what bounds the time of a check."""

MOST_COVER = 10_000

Quantity: TypeAlias = Column | int
Terms: TypeAlias = list[tuple[int, Quantity]]


class InvalidProof(InvalidPlan):
    """A well-formed certificate that proves nothing about this problem; the message says why."""


class Inequality(NamedTuple):
    """The sum of coefficient · column is at most `most`.

    `extra_ns`: it holds for plans that cost less than this more than all ops once; None: for all plans.
    """

    terms: dict[Column, int]
    most: int
    extra_ns: int | None = None


class Relaxation:
    """The coarse-stage relaxation of a graph under a capacity (bytes, fixed ones left out) for given cuts and spans.

    Raises:
        InvalidProof: cuts or spans that are none.
    """

    def __init__(self, graph: Graph, capacity: int, cuts: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> None:
        if not cuts or cuts[0] < 0 or cuts[-1] != graph.ops - 1 or any(b <= a for a, b in pairwise(cuts)):
            raise InvalidProof(f"cuts must ascend and end with op {graph.ops - 1}")
        self.graph, self.capacity, self.cuts = graph, capacity, cuts
        self.kinds = KINDS
        self.stages = len(cuts)
        self.first = (0, *(cut + 1 for cut in cuts))
        """[K + 1] f_c; the last entry is n."""
        for a, b in spans:
            if not 1 <= a < b < self.stages:
                raise InvalidProof(f"({a}, {b}) is no span of the coarse stages 1 to {self.stages - 1}")
        self._ends = {a: sorted({a, *(b for start, b in spans if start == a)}) for a in range(1, self.stages)}
        self._kept = frozenset(graph.keep)
        self._optional = frozenset(graph.optional)
        self._reach()
        self._resident: dict[int, list[tuple[int, Quantity]]] = {}
        self._terms = 0
        self.most_terms = MOST_TERMS

    def _reach(self) -> None:
        """The last stage that holding a value, or recomputing an op, can be of use for (P1)."""
        graph, last = self.graph, self.graph.last_stage
        self._value_reach, self._op_reach = [-1] * graph.values, [-1] * graph.ops
        for op in range(graph.ops - 1, -1, -1):
            for value in graph.op_values[op]:
                reach = -1
                for reader in graph.users[value]:
                    reach = max(reach, reader, self._op_reach[reader])
                self._value_reach[value] = graph.ops if value in self._kept else reach
                self._op_reach[op] = max(self._op_reach[op], self._value_reach[value])
            self._op_reach[op] = min(self._op_reach[op], last[op])

    def run(self, a: int, b: int, op: int) -> Quantity:
        """R, or 0 where the op cannot be of use or must not run again."""
        if op >= self.first[a]:
            raise InvalidProof(f"op {op} is not computed before coarse stage {a}")
        return 0 if self._op_reach[op] < self.first[a] else ("run", a, b, op)

    def hold(self, c: int, value: int) -> Quantity:
        """S, or 0 or 1 where that is certain; c = K is the end of the step, where only kept values matter."""
        if c == self.stages:
            return int(value in self._kept)
        maker = self.graph.value_op[value]
        if maker >= self.first[c]:
            raise InvalidProof(f"value {value} is not made before coarse stage {c}")
        if value in self._kept or self._stays(c, value):
            return 1
        return ("hold", c, value) if self._value_reach[value] >= self.first[c] else 0

    def through(self, c: int, value: int) -> Quantity:
        """T, or what it is where nothing can bring the value in c."""
        end = self._end(c, value)
        if end == 0 or all(quantity == 0 for _, quantity in self._brought(c, c, value)):
            return end
        return ("through", c, value)

    def cost(self, column: Column) -> int:
        """The coefficient of a column in the objective, in ns."""
        return self.graph.op_cost_ns[int(column[3])] if column[0] == "run" and column[1] == column[2] else 0

    def upper(self, column: Column) -> int:
        """The most that a column can be; the least is 0."""
        return 1

    def limited(self, bound_ns: int | None) -> int | None:
        """What a bound on the points says of all plans; None: there is no point, hence no plan."""
        return bound_ns

    def is_column(self, column: Column) -> bool:
        """Whether there is such a column."""
        kind, at = column[0], [int(number) for number in column[1:]]
        try:
            if kind == "run" and len(at) == 3:
                self._stages(at[0], at[1])
                return self.run(at[0], at[1], self._op(at[2])) == column
            if kind in ("hold", "through") and len(at) == 2:
                self._stages(at[0], at[0])
                return (self.hold if kind == "hold" else self.through)(at[0], self._value(at[1])) == column
        except InvalidProof:
            return False
        return False

    def inequality(self, row: Row) -> Inequality:
        """The row of that kind and those indices.

        Raises:
            InvalidProof: there is no such row for this problem, or it does not hold.
        """
        make = self.kinds.get(str(row[0]))
        if make is None:
            raise InvalidProof(f"there are no rows of kind {row[0]!r}; there are: {', '.join(self.kinds)}")
        try:
            terms, most = make(self, *(int(number) for number in row[1:]))
        except TypeError:
            raise InvalidProof(f"row {row[0]!r} has {len(row) - 1} indices, which is not how many it takes") from None
        self.count(len(terms))
        merged: dict[Column, int] = {}
        for coefficient, quantity in terms:
            if isinstance(quantity, int):
                most -= coefficient * quantity
            else:
                merged[quantity] = merged.get(quantity, 0) + coefficient
        return Inequality(merged, most, int(row[1]) if row[0] == CHEAPER else None)

    def count(self, terms: int) -> None:
        """Note work on so many terms.

        Raises:
            InvalidProof: it is too much together.
        """
        self._terms += terms
        if self._terms > self.most_terms:
            raise InvalidProof(f"the rows have more than {self.most_terms} terms")

    def _op(self, op: int) -> int:
        if not 0 <= op < self.graph.ops:
            raise InvalidProof(f"there is no op {op}")
        return op

    def _value(self, value: int) -> int:
        if not 0 <= value < self.graph.values:
            raise InvalidProof(f"there is no value {value}")
        return value

    def _stages(self, a: int, b: int) -> None:
        if not 1 <= a <= b < self.stages or b not in self._ends[a]:
            raise InvalidProof(f"({a}, {b}) is neither a coarse stage nor a span")

    def _stays(self, c: int, value: int) -> bool:
        """Whether an op from c on reads a value that cannot be made again by then."""
        read = max(self.graph.users[value], default=-1) >= self.first[c]
        return read and self.graph.last_stage[self.graph.value_op[value]] < self.first[c]

    def _end(self, c: int, value: int) -> Quantity:
        """What T is where nothing brings the value in c: S when c ends, or 1 where τ_c reads it."""
        return 1 if value in self.graph.op_inputs[self.cuts[c]] else self.hold(c + 1, value)

    def _brought(self, a: int, b: int, value: int) -> Terms:
        """− R of the maker: what can bring a value in a … b that was not there when a began."""
        return [(-1, self.run(a, b, self.graph.value_op[value]))]

    def _supplied(self, a: int, b: int, value: int) -> Terms:
        """− R of the maker − S: a value read in a … b was made in it, or was there when a began."""
        return [*self._brought(a, b, value), (-1, self.hold(a, value))]

    def _need(self, op: int) -> int:
        """Bytes that a computation of the op holds for certain: inputs, what it always makes, workspace."""
        graph = self.graph
        sizes = sum(graph.value_bytes[v] for v in (*graph.op_inputs[op], *graph.op_always[op]))
        return sizes + graph.op_workspace_bytes[op]

    def _beside(self, c: int) -> tuple[int, list[int]]:
        """What is free while τ_{c−1} is first computed, and the values that may be resident then besides its own."""
        graph, op = self.graph, self.cuts[c - 1]
        read = frozenset(graph.op_inputs[op])
        last = [v for v in graph.op_values[op] if v in self._optional]
        return self.capacity - self._need(op), [v for v in (*range(self._made_before(op)), *last) if v not in read]

    def _made_before(self, op: int) -> int:
        return bisect_left(self.graph.value_op, op)

    def _throughout(self, c: int) -> list[tuple[int, Quantity]]:
        """The values that may be resident throughout a coarse stage, with their T."""
        if c not in self._resident:
            values = range(self._made_before(self.first[c]))
            self._resident[c] = [(v, column) for v in values if (column := self.through(c, v)) != 0]
        return self._resident[c]


def least(numbers: Iterable[int | None]) -> int | None:
    """The least of those that are not None, or None."""
    return min((number for number in numbers if number is not None), default=None)


def _read(on: Relaxation, a: int, b: int, op: int, value: int) -> tuple[Terms, int]:
    """P2: R_{ab,op} ≤ R_{ab,p(v)} + S_{a,v} for a value v that op reads."""
    on._stages(a, b)
    if value not in on.graph.op_inputs[on._op(op)]:
        raise InvalidProof(f"op {op} does not read value {value}")
    return [(1, on.run(a, b, op)), *on._supplied(a, b, value)], 0


def _first(on: Relaxation, a: int, b: int, value: int) -> tuple[Terms, int]:
    """P3: 1 ≤ R_{ab,p(v)} + S_{a,v} for a value v that an op first computed in a … b reads."""
    on._stages(a, b)
    if not any(on.first[a] <= reader <= on.cuts[b] for reader in on.graph.users[on._value(value)]):
        raise InvalidProof(f"no op first computed in coarse stages {a} to {b} reads value {value}")
    return on._supplied(a, b, value), -1


def _stay(on: Relaxation, a: int, b: int, value: int) -> tuple[Terms, int]:
    """P4: S_{b+1,v} ≤ R_{ab,p(v)} + S_{a,v}."""
    on._stages(a, b)
    return [*on._supplied(a, b, on._value(value)), (1, on.hold(b + 1, value))], 0


def _memory(on: Relaxation, c: int) -> tuple[Terms, int]:
    """P5: memory while τ_{c−1} is first computed."""
    on._stages(c, c)
    room, values = on._beside(c)
    return [(on.graph.value_bytes[v], on.hold(c, v)) for v in values], room


def _part(on: Relaxation, a: int, b: int, inner_a: int, inner_b: int, op: int) -> tuple[Terms, int]:
    """P6: R of coarse stages within a … b is at most R of a … b."""
    on._stages(a, b)
    on._stages(inner_a, inner_b)
    if not a <= inner_a <= inner_b <= b:
        raise InvalidProof(f"coarse stages {inner_a} to {inner_b} are not within {a} to {b}")
    return [(1, on.run(inner_a, inner_b, on._op(op))), (-1, on.run(a, b, op))], 0


def _or(on: Relaxation, a: int, b: int, op: int) -> tuple[Terms, int]:
    """P6: R of a … b is at most the sum of R of the largest spans and coarse stages that it consists of."""
    on._stages(a, b)
    terms: Terms = [(1, on.run(a, b, on._op(op)))]
    at = a
    while at <= b:
        end = max(last for last in on._ends[at] if (last <= b and (at, last) != (a, b)) or last == at)
        terms.append((-1, on.run(at, end, op)))
        at = end + 1
    return terms, 0


def _through(on: Relaxation, c: int, value: int) -> tuple[Terms, int]:
    """P7: T_{c,v} ≥ S_{c+1,v} − R_{c,p(v)}, with 1 in the place of S where τ_c reads v."""
    on._stages(c, c)
    if not on.is_column(("through", c, value)):
        raise InvalidProof(f"value {value} has no T in coarse stage {c}")
    return [(1, on._end(c, value)), *on._brought(c, c, value), (-1, ("through", c, value))], 0


def _rerun(on: Relaxation, c: int, op: int) -> tuple[Terms, int]:
    """P8: memory while an op made before c is recomputed in c: its need, and what is resident throughout."""
    on._stages(c, c)
    own = {*on.graph.op_inputs[on._op(op)], *on.graph.op_values[op]}
    terms: Terms = [(on._need(op), on.run(c, c, op))]
    terms += [(on.graph.value_bytes[value], column) for value, column in on._throughout(c) if value not in own]
    return terms, on.capacity


def _cover(on: Relaxation, c: int, most: int, *weighted: int) -> tuple[Terms, int]:
    """P9: Σ α_v S_{c,v} ≤ most, since values of larger α together do not fit next to τ_{c−1}.

    `weighted` lists values and their α in turn. The least bytes of values that together have α of more than `most` is
    found by dynamic programming over α; it must exceed what is free.
    """
    on._stages(c, c)
    if len(weighted) % 2 or not 0 <= most <= MOST_COVER or min(weighted, default=0) < 0:
        raise InvalidProof(f"a cover lists values and weights in turn, and allows a weight of 0 to {MOST_COVER}")
    chosen = dict(zip(weighted[::2], weighted[1::2], strict=True))
    room, values = on._beside(c)
    certain = sum(on.graph.value_bytes[v] for v in values if on.hold(c, v) == 1)
    allowed = {v for v in values if v in chosen and isinstance(on.hold(c, v), tuple)}
    if len(chosen) * 2 != len(weighted) or allowed != set(chosen):
        raise InvalidProof(f"a cover of coarse stage {c} names a value twice, or one that has no S to be charged there")
    on.count(len(chosen) * (most + 2))
    least = [0] + [on.capacity + 1] * (most + 1)  # bytes of values by their α; where there are none, more than fit
    for value, weight in sorted(chosen.items()):
        for total in range(most, -1, -1):
            after = min(total + weight, most + 1)
            least[after] = min(least[after], least[total] + on.graph.value_bytes[value])
    if least[most + 1] <= room - certain:
        raise InvalidProof(f"values of more than {most} fit next to op {on.cuts[c - 1]}: the cover does not hold")
    return [(weight, ("hold", c, value)) for value, weight in sorted(chosen.items())], most


def _cheaper(on: Relaxation, extra_ns: int) -> tuple[Terms, int]:
    """P11: a plan that costs less than `extra_ns` more than all ops once recomputes for less."""
    stages = range(1, on.stages)
    return [(on.graph.op_cost_ns[op], on.run(c, c, op)) for c in stages for op in range(on.first[c])], extra_ns - 1


CHEAPER = "cheaper"
"""The kind of row that holds only for plans that are cheaper than it says."""

KINDS: dict[str, Callable[..., tuple[Terms, int]]] = {
    "read": _read,
    "first": _first,
    "stay": _stay,
    "memory": _memory,
    "part": _part,
    "or": _or,
    "through": _through,
    "rerun": _rerun,
    "cover": _cover,
    CHEAPER: _cheaper,
}
"""How each kind of row is made from its indices."""
