"""What the rows of a certificate say of a graph with a link to the host; docs/proofs.md has propositions P14 to P19.

Times are those of the plan: e_c is when coarse stage c begins, and a copy belongs to the coarse stage in which it
begins on the link. An *excursion* of a value is a copy out and the copy back that follows it. S is of values on the
device or on their way back to it. Of the excursions after which something useful reads the value, for 0 ≤ c < K,

    ("host", c, v)        H: the copy out of an excursion of v begins before e_c, and its copy back does not
    ("out", c, v)         X: how many copies out of v begin in c
    ("back", c, v)        P: how many copies back of v begin in c
    ("idle", c)           W: how long c lasts beyond its first computations and one of each op with R = 1
    ("running", c, d)     G: how long the copy that runs when c begins will still take, out (d = 0) or back (1)

Columns are whole numbers, those of `rows` and H 0 or 1. The objective is the makespan. The limits of X, P and W hold
for every plan with a makespan of at most `limit_ns`, so no bound above that is claimed.
"""

from __future__ import annotations

from ..graph import Graph
from .certificate import Column
from .rows import CHEAPER, KINDS, InvalidProof, Quantity, Relaxation, Terms

_AMPLE = 8
"""No bound exceeds the time of each op and each copy once, one after the other, so many times."""


class LinkRelaxation(Relaxation):
    """The relaxation of a graph with a link.

    Raises:
        InvalidProof: cuts that are none, or spans.
    """

    def __init__(self, graph: Graph, capacity: int, cuts: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> None:
        super().__init__(graph, capacity, cuts, spans)
        if spans or graph.link is None:
            raise InvalidProof("with a link there are no spans")
        self.link = graph.link
        self.kinds = LINK_KINDS
        self._running: dict[tuple[int, int], int] = {}
        sizes = graph.value_bytes
        self.times = (tuple(map(self.link.to_host_ns, sizes)), tuple(map(self.link.to_device_ns, sizes)))
        """[2][values] how long a copy out and a copy back take, in ns."""
        self.limit_ns = _AMPLE * (graph.total_cost_ns + sum(map(sum, self.times)))

    def moves(self, c: int, value: int) -> bool:
        """Whether copies of a value that are made from when c begins on can be of use (P1)."""
        useful = self._value_reach[value] >= self.first[c]
        return useful and value not in self._kept and self.graph.value_bytes[value] > 0

    def host(self, c: int, value: int) -> Quantity:
        """H, or 0 where that is certain."""
        if c == self.stages or self.graph.value_op[value] >= self.first[c]:
            return 0
        return ("host", c, value) if self.moves(c, value) else 0

    def copies(self, kind: str, c: int, value: int) -> Quantity:
        """X or P, or 0 where that is certain."""
        made = self.graph.value_op[value] <= self.cuts[c]
        return (kind, c, value) if made and self.moves(c, value) else 0

    def running(self, c: int, direction: int) -> Quantity:
        """G, or 0 where no copy can be running."""
        column = ("running", c, direction)
        return column if 0 < c < self.stages and self._longest(c, direction) else 0

    def cost(self, column: Column) -> int:
        """The coefficient of a column in the makespan, in ns."""
        return 1 if column[0] == "idle" else super().cost(column)

    def upper(self, column: Column) -> int:
        """The most that a column can be in a plan with a makespan of at most `limit_ns`."""
        if column[0] in ("out", "back"):
            return self.limit_ns // self.times[column[0] == "back"][int(column[2])]
        if column[0] == "idle":
            return self.limit_ns
        return self._longest(int(column[1]), int(column[2])) if column[0] == "running" else 1

    def limited(self, bound_ns: int | None) -> int:
        """What a bound on the points says of all plans: those without a point take longer than `limit_ns`."""
        return self.limit_ns if bound_ns is None else min(bound_ns, self.limit_ns)

    def is_column(self, column: Column) -> bool:
        """Whether there is such a column, of those that are 0 or 1."""
        if column[0] != "host" or len(column) != 3:
            return super().is_column(column)
        c, value = int(column[1]), int(column[2])
        return 0 < c < self.stages and 0 <= value < self.graph.values and self.host(c, value) == column

    def _longest(self, c: int, direction: int) -> int:
        """The most time that a copy can take which began before c and is of use after that (P19)."""
        if (c, direction) not in self._running:
            values = range(self._made_before(self.first[c]))
            self.count(len(values))
            self._running[c, direction] = max((self.times[direction][v] for v in values if self.moves(c, v)), default=0)
        return self._running[c, direction]

    def _brought(self, a: int, b: int, value: int) -> Terms:
        """− R of the maker − P."""
        return [*super()._brought(a, b, value), (-1, self.copies("back", a, value))]

    def _stays(self, c: int, value: int) -> bool:
        """Nothing has to stay on the device that could be on the host."""
        return self.graph.value_bytes[value] == 0 and super()._stays(c, value)

    def somewhere(self, c: int, value: int) -> Terms:
        """− R of the maker − S − H: a value that is read in c or there at its end was there before, or was made."""
        made = super()._brought(c, c, value)
        return [*made, (-1, self.hold(c, value)), (-1, self.host(c, value))]


def _host_read(on: LinkRelaxation, c: int, op: int, value: int) -> tuple[Terms, int]:
    """P15: R_{c,op} ≤ R_{c,p(v)} + S_{c,v} + H_{c,v} for a value v that op reads."""
    on._stages(c, c)
    if value not in on.graph.op_inputs[on._op(op)]:
        raise InvalidProof(f"op {op} does not read value {value}")
    return [(1, on.run(c, c, op)), *on.somewhere(c, value)], 0


def _host_first(on: LinkRelaxation, c: int, value: int) -> tuple[Terms, int]:
    """P15: 1 ≤ R_{c,p(v)} + S_{c,v} + H_{c,v} for a value v that an op first computed in c reads, or one later where
    v cannot be made any more.
    """
    on._stages(c, c)
    here = any(on.first[c] <= reader <= on.cuts[c] for reader in on.graph.users[on._value(value)])
    if not here and not Relaxation._stays(on, c, value):
        raise InvalidProof(f"value {value} need not be anywhere in coarse stage {c}")
    return on.somewhere(c, value), -1


def _host_stay(on: LinkRelaxation, c: int, value: int, away: int) -> tuple[Terms, int]:
    """P15: S_{c+1,v}, or H_{c+1,v} where `away` is 1, is at most R_{c,p(v)} + S_{c,v} + H_{c,v}."""
    on._stages(c, c)
    if away not in (0, 1):
        raise InvalidProof("a value is on the device, 0, or on the host, 1")
    after = on.host(c + 1, on._value(value)) if away else on.hold(c + 1, on._value(value))
    return [(1, after), *on.somewhere(c, value)], 0


def _hosted(on: LinkRelaxation, c: int) -> tuple[Terms, int]:
    """P17: what is on the host when c begins fits there."""
    on._stages(c, c)
    if on.link.host_bytes is None:
        raise InvalidProof("the host has no limit")
    values = range(on._made_before(on.first[c]))
    return [(on.graph.value_bytes[v], on.host(c, v)) for v in values], on.link.host_bytes


def _moved(on: LinkRelaxation, c: int, value: int) -> tuple[Terms, int]:
    """P18: H_{c+1,v} ≤ H_{c,v} + X_{c,v} − P_{c,v}."""
    _any_stage(on, c)
    before, after = on.host(c, on._value(value)), on.host(c + 1, value)
    out, back = on.copies("out", c, value), on.copies("back", c, value)
    return [(1, after), (-1, before), (-1, out), (1, back)], 0


def _carried(on: LinkRelaxation, c: int, direction: int) -> tuple[Terms, int]:
    """P19: the copies of one direction that begin in c, out (0) or back (1), take no longer than c lasts, but for
    what those at its beginning and its end share with other coarse stages.
    """
    _any_stage(on, c)
    if direction not in (0, 1):
        raise InvalidProof("a direction is 0, out, or 1, back")
    kind = ("out", "back")[direction]
    values, ops = range(on._made_before(on.cuts[c] + 1)), range(on.first[c])
    terms: Terms = [(on.times[direction][v], on.copies(kind, c, v)) for v in values]
    # what c lasts: its first computations, those of R, and W
    terms += [(-on.graph.op_cost_ns[op], on.run(c, c, op)) for op in ops]
    terms += [(-1, ("idle", c)), (1, on.running(c, direction)), (-1, on.running(c + 1, direction))]
    return terms, sum(on.graph.op_cost_ns[on.first[c] : on.cuts[c] + 1])


def _any_stage(on: LinkRelaxation, c: int) -> None:
    if not 0 <= c < on.stages:
        raise InvalidProof(f"there is no coarse stage {c}")


LINK_KINDS = {kind: make for kind, make in KINDS.items() if kind != CHEAPER} | {
    "host-read": _host_read,
    "host-first": _host_first,
    "host-stay": _host_stay,
    "hosted": _hosted,
    "moved": _moved,
    "carried": _carried,
}
"""How each kind of row is made from its indices where there is a link."""
