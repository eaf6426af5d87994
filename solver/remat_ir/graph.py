"""The dataflow graph of one training step: ops with costs, values with sizes, nothing else."""

from __future__ import annotations

from array import array as packed
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from operator import le
from typing import Any, NamedTuple

from .document import Array, Column, ColumnOfRows, Document, Integer, Member, Nested, Text
from .errors import InvalidData
from .link import LINK, Link
from .read import LARGEST_INTEGER, Rows, integer, length_of_rows

FORMAT = "remat-graph/1"
MOST_OPS = 1_000_000
MOST_VALUES = 4_000_000
MOST_INPUTS = 10_000_000

_COLUMNS = ("op_cost_ns", "op_workspace_bytes", "value_op", "value_bytes", "optional", "once", "keep", "consumes")
_OPS, _VALUES = Column(cap=MOST_OPS), Column(cap=MOST_VALUES)
GRAPH = Document(
    "GraphDocument",
    "graph",
    "A `remat-graph/1`: the training step as columns of integers.",
    {
        "fixed_bytes": Member(Integer(), 0),
        "op_cost_ns": Member(Column(shortest=1, cap=MOST_OPS)),
        "op_workspace_bytes": Member(_OPS, ()),
        "op_inputs": Member(ColumnOfRows(_VALUES, cap=MOST_OPS)),
        "value_op": Member(_VALUES),
        "value_bytes": Member(_VALUES),
        "optional": Member(_VALUES, ()),
        "once": Member(_OPS, ()),
        "keep": Member(_VALUES, ()),
        "consumes": Member(_VALUES, (), sparse=True),  # absent, as before there was such a thing
        "backward_from": Member(Integer(), None, nullable=True),
        "link": Member(Nested((LINK,), Link.from_json), None, nullable=True, sparse=True),
        "op_names": Member(Array(Text(), cap=MOST_OPS), None, nullable=True, local=True, sparse=True),
        "value_names": Member(Array(Text(), cap=MOST_VALUES), None, nullable=True, local=True, sparse=True),
    },
    (FORMAT,),
)


@dataclass(frozen=True)
class Graph:
    """A training step as ops in a fixed topological order and the values that they make.

    Arrays are columnar. An op can make several values, each kept or freed on its own. Construction validates;
    an invalid graph cannot exist.

    Attributes:
        op_cost_ns: [ops] time of one computation, in ns.
        op_inputs: [ops] the values that each op reads, made by earlier ops.
        value_op: [values] the op that makes each value, non-decreasing.
        value_bytes: [values] size in bytes.
        op_workspace_bytes: [ops] bytes that live only while the op runs; empty means none anywhere.
        optional: values that are made, and charged, only when the compute keeps them, ascending.
        once: ops that a plan computes exactly once, ascending.
        keep: values that stay to the end of the step once made, ascending.
        consumes: values that their last reader, a `once` op, consumes, ascending: no op reads them after it, so ops
            that read them are not computed again. An update of a parameter consumes its gradient, and the parameter
            as it was before.
        backward_from: the first op of the backward pass, or None.
        fixed_bytes: bytes resident throughout.
        link: the link to the host, or None where plans have no transfers.
        op_names, value_names: for people only; never in the digest, never on the wire.

    Raises:
        InvalidData: naming the op or value index that is wrong.

    Example:
        >>> graph = graph_of([1, 2], [4, 8], [[], [0]])
        >>> graph.ops, graph.total_cost_ns
        (2, 3)
    """

    op_cost_ns: tuple[int, ...]
    op_inputs: tuple[tuple[int, ...], ...]
    value_op: tuple[int, ...]
    value_bytes: tuple[int, ...]
    op_workspace_bytes: tuple[int, ...] = ()
    optional: tuple[int, ...] = ()
    once: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    consumes: tuple[int, ...] = ()
    backward_from: int | None = None
    fixed_bytes: int = 0
    link: Link | None = None
    op_names: tuple[str, ...] | None = field(default=None, compare=False, repr=False)
    value_names: tuple[str, ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.op_workspace_bytes:
            object.__setattr__(self, "op_workspace_bytes", (0,) * len(self.op_cost_ns))
        _check_lengths(self)
        _check_numbers(self)
        _check_edges(self)
        _check_sets(self)
        _check_consumed(self)
        for key in _COLUMNS:  # what was read in columns, now that it is right
            object.__setattr__(self, key, tuple(getattr(self, key)))
        rows: object = self.op_inputs
        if isinstance(rows, Rows):
            object.__setattr__(self, "op_inputs", tuple(map(tuple, rows)))

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.op_cost_ns)

    @property
    def values(self) -> int:
        """The number of values."""
        return len(self.value_op)

    @cached_property
    def op_values(self) -> tuple[tuple[int, ...], ...]:
        """[ops] the values that each op makes, ascending."""
        made: list[list[int]] = [[] for _ in range(self.ops)]
        for value, op in enumerate(self.value_op):
            made[op].append(value)
        return tuple(map(tuple, made))

    @cached_property
    def op_always(self) -> tuple[tuple[int, ...], ...]:
        """[ops] the values that each op makes whether kept or not: those that are not optional."""
        optional = frozenset(self.optional)
        return tuple(tuple(v for v in values if v not in optional) for values in self.op_values)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """[values] the ops that read each value, ascending."""
        readers: list[list[int]] = [[] for _ in range(self.values)]
        for op, inputs in enumerate(self.op_inputs):
            for value in inputs:
                readers[value].append(op)
        return tuple(map(tuple, readers))

    @cached_property
    def last_stage(self) -> tuple[int, ...]:
        """[ops] the last stage in which each op may run: before, or as, the first computation of that op.

        Its own of an op that runs once (a `once` op; one that makes a kept value, which is never freed and not made
        while it is resident); that of the first op that consumes something it reads; else `ops`.
        """
        last = [self.ops] * self.ops
        for value in self.consumes:
            for reader in self.users[value]:
                last[reader] = min(last[reader], self.users[value][-1])
        for op in (*self.once, *(self.value_op[value] for value in self.keep)):
            last[op] = op
        return tuple(last)

    @cached_property
    def first_needs(self) -> tuple[int, ...]:
        """[ops] bytes, fixed ones left out, that every plan holds while each op is first computed.

        What the op reads; all its values that are not optional; its workspace; the kept values of earlier ops; and each
        value of an earlier op that may not run any more, if an op from this one on reads it: it cannot be made again.
        With a link to the host such a value may be there instead, and does not count.
        """
        size, keep, optional = self.value_bytes, frozenset(self.keep), frozenset(self.optional)
        born, own = [0] * (self.ops + 1), list(self.op_workspace_bytes)
        for op, inputs in enumerate(self.op_inputs):
            own[op] += sum([size[v] for v in inputs if v not in keep])
        last, ops = self.last_stage, self.ops
        for value, maker in enumerate(self.value_op):
            if value not in optional:
                own[maker] += size[value]
            if value in keep:
                born[maker + 1] += size[value]
            elif last[maker] < ops and self.link is None:  # of most values the maker may run at any time
                readers = self.users[value]
                start, end = max(maker + 1, last[maker]), max(readers, default=-1)
                if start < end:
                    born[start] += size[value]
                    born[end] -= size[value]
                    for op in readers:
                        own[op] -= size[value] if start <= op < end else 0
        return tuple(need + held for need, held in zip(own, accumulate(born[: self.ops]), strict=True))

    @cached_property
    def total_cost_ns(self) -> int:
        """The cost of computing each op once, in ns."""
        return sum(self.op_cost_ns)

    def with_fixed(self, fixed_bytes: int) -> Graph:
        """The same graph with other fixed bytes; nothing else is checked again.

        Raises:
            InvalidData: they are no bytes, or all bytes together overflow 2^53.
        """
        twin = copy(self)
        object.__setattr__(twin, "fixed_bytes", fixed_bytes)
        _check_sums(twin)
        return twin

    def with_link(self, link: Link | None) -> Graph:
        """The same graph with another link to the host, or without one."""
        return replace(self, link=link)

    def op_label(self, op: int) -> str:
        """What to call an op when speaking to a person."""
        return f"op {op}" if self.op_names is None else f"op {op} ({self.op_names[op]})"

    def to_json(self, *, names: bool = False) -> dict[str, Any]:
        """The `remat-graph/1` object; `names` adds the names, for a local file only."""
        return GRAPH.write(self, local=names)

    @classmethod
    def from_json(cls, data: object) -> Graph:
        """Read a `remat-graph/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names key and index.
        """
        found = GRAPH.read(data)
        _check_length(found, "op_workspace_bytes", "op_cost_ns")
        if length_of_rows(found["op_inputs"]) > MOST_INPUTS:
            raise InvalidData(f"op_inputs has more than {MOST_INPUTS} entries in all", "/op_inputs")
        return cls(**found)


def _check_lengths(graph: Graph) -> None:
    ops = len(graph.op_cost_ns)
    if ops == 0:
        raise InvalidData("graph has no ops", "/op_cost_ns")
    if ops > MOST_OPS:
        raise InvalidData(f"graph has {ops} ops, more than the {MOST_OPS} allowed", "/op_cost_ns")
    for key in ("op_workspace_bytes", "op_inputs", "op_names"):
        _check_length(vars(graph), key, "op_cost_ns")
    for key in ("value_bytes", "value_names"):
        _check_length(vars(graph), key, "value_op")


def _check_length(columns: Mapping[str, Any], key: str, other: str) -> None:
    found, expected = columns.get(key), len(columns[other])
    if found is not None and len(found) != expected:
        raise InvalidData(f"{key} has {len(found)} entries where {other} has {expected}", f"/{key}")


def _check_numbers(graph: Graph) -> None:
    check_column(graph.op_cost_ns, "op", "cost_ns", "op_cost_ns")
    check_column(graph.op_workspace_bytes, "op", "workspace_bytes", "op_workspace_bytes")
    check_column(graph.value_bytes, "value", "bytes", "value_bytes")
    _check_sums(graph)


def check_column(column: Collection[int], thing: str, quantity: str, key: str, first: int = 0) -> None:
    """Refuse a column with a number that is no integer from 0 to 2^53, of things that are counted from `first`."""
    if not _in_range(column, LARGEST_INTEGER + 1):
        for i, number in enumerate(column):
            integer(number, f"{thing} {i + first}: {quantity}", f"/{key}/{i}")


def _check_sums(graph: Graph) -> None:
    integer(graph.fixed_bytes, "fixed_bytes", "/fixed_bytes")
    if sum(graph.op_cost_ns) > LARGEST_INTEGER:
        raise InvalidData("the sum of op_cost_ns overflows 2^53", "/op_cost_ns")
    if sum(graph.value_bytes) + sum(graph.op_workspace_bytes) + graph.fixed_bytes > LARGEST_INTEGER:
        raise InvalidData("the sum of all bytes overflows 2^53", "/value_bytes")


def _check_edges(graph: Graph) -> None:
    ops, values, value_op = len(graph.op_cost_ns), len(graph.value_op), graph.value_op
    if not (_in_range(value_op, ops) and all(map(le, value_op, islice(value_op, 1, None)))):
        _refuse_value_op(value_op, ops)
    reader = packed("q", [-1]) * values  # the op that read each value last
    if _in_range(_flat(graph.op_inputs), values):
        for op, inputs in enumerate(graph.op_inputs):
            for value in inputs:
                if value_op[value] >= op or reader[value] == op:
                    _refuse_inputs(op, inputs, value_op)
                reader[value] = op
        return
    for op, inputs in enumerate(graph.op_inputs):
        _refuse_inputs(op, inputs, value_op)


def _flat(rows: Sequence[Sequence[int]]) -> Collection[int]:
    return rows.values if isinstance(rows, Rows) else tuple(chain.from_iterable(rows))


def _in_range(numbers: Collection[int], below: int) -> bool:
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0 and max(numbers, default=-1) < below


def _refuse_value_op(value_op: Sequence[int], ops: int) -> None:
    last = 0
    for value, op in enumerate(value_op):
        if type(op) is not int or not 0 <= op < ops:
            raise InvalidData(f"value {value}: value_op {op} is not an op (0 to {ops - 1})", f"/value_op/{value}")
        if op < last:
            raise InvalidData(
                f"value {value}: value_op {op} follows {last}, but must not decrease", f"/value_op/{value}"
            )
        last = op


def _refuse_inputs(op: int, inputs: Sequence[int], value_op: Sequence[int]) -> None:
    """Refuse the inputs of an op if one is wrong."""
    seen = set()
    for position, value in enumerate(inputs):
        if type(value) is not int or not 0 <= value < len(value_op):
            raise InvalidData(f"op {op}: input {value} is not a value", f"/op_inputs/{op}/{position}")
        if value_op[value] >= op:
            raise InvalidData(
                f"op {op}: reads value {value}, which op {value_op[value]} makes: a forward reference or a cycle",
                f"/op_inputs/{op}/{position}",
            )
        if value in seen:
            raise InvalidData(f"op {op}: reads value {value} twice", f"/op_inputs/{op}")
        seen.add(value)


def _check_sets(graph: Graph) -> None:
    ops, values = len(graph.op_cost_ns), len(graph.value_op)
    for key, ids, count, thing in (
        ("optional", graph.optional, values, "value"),
        ("once", graph.once, ops, "op"),
        ("keep", graph.keep, values, "value"),
        ("consumes", graph.consumes, values, "value"),
    ):
        last = -1
        for i, number in enumerate(ids):
            if type(number) is not int or not 0 <= number < count:
                raise InvalidData(f"{key}[{i}]: {number} is not {thing} 0 to {count - 1}", f"/{key}/{i}")
            if number <= last:
                raise InvalidData(f"{key}[{i}]: {number} follows {last}, but must ascend", f"/{key}/{i}")
            last = number
    kept = bytearray(values)
    for value in graph.keep:
        kept[value] = 1
    both = next((value for value in graph.optional if kept[value]), None)
    if both is not None:
        raise InvalidData(f"value {both} is both optional and keep", "/optional")
    if graph.backward_from is not None and not (type(graph.backward_from) is int and 0 <= graph.backward_from < ops):
        raise InvalidData(f"backward_from {graph.backward_from} is not an op (0 to {ops - 1})", "/backward_from")


def _check_consumed(graph: Graph) -> None:
    """Refuse a consumed value that stays, that nothing reads, or whose last reader may run again."""
    once, keep = frozenset(graph.once), frozenset(graph.keep)
    last: dict[int, int] = dict.fromkeys(graph.consumes, -1)
    for op, inputs in enumerate(graph.op_inputs if last else ()):
        last |= {value: op for value in inputs if value in last}
    for i, (value, reader) in enumerate(last.items()):
        if value in keep:
            raise InvalidData(f"value {value} is both consumed and keep", f"/consumes/{i}")
        if reader < 0:
            raise InvalidData(f"value {value} is consumed, but no op reads it", f"/consumes/{i}")
        if reader not in once:
            raise InvalidData(
                f"value {value} is consumed by its last reader, op {reader}, which must be in once", f"/consumes/{i}"
            )


def graph_of(costs: Sequence[int], sizes: Sequence[int], inputs: Sequence[Sequence[int]], **more: Any) -> Graph:
    """A graph in the papers' model, where op i makes exactly the value i, of cost C_i and size M_i.

    Checkmate, Section 3: `costs` is C in ns, `sizes` is M in bytes, `inputs[i]` lists the ops that op i reads.
    """
    return Graph(
        op_cost_ns=tuple(costs),
        op_inputs=tuple(tuple(row) for row in inputs),
        value_op=tuple(range(len(costs))),
        value_bytes=tuple(sizes),
        **more,
    )


def pinned_ops(graph: Graph) -> frozenset[int]:
    """Ops that no plan computes twice: `once` ops, and those that make a value which stays to the end.

    A kept value is never freed and no value is made while it is resident, so its op cannot run again.
    """
    return frozenset(op for op, last in enumerate(graph.last_stage) if last == op)


class WorkingSet(NamedTuple):
    """The op whose first computation needs the most bytes in any plan, and those bytes, fixed ones included."""

    op: int
    least_bytes: int


def working_set(graph: Graph) -> WorkingSet:
    """The largest need of any single first computation (`Graph.first_needs`): a lower bound on every budget that
    suffices.
    """
    need = max(graph.first_needs)
    return WorkingSet(graph.first_needs.index(need), graph.fixed_bytes + need)
