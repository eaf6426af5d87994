"""Check plans and certificates of rematerialization, with nothing but Python's standard library.

This file imports nothing of the project that made the answers, and was written from its documents alone:
`docs/problem.md` and `docs/wire.md` say what a plan is and what it costs, `docs/proofs.md` what a certificate says and
why it is true (P1 to P13 below are the propositions there). Copy it, and run it with Python 3.11 or later:

    python check.py GRAPH.json.xz ANSWER.json.xz …    answers to one graph
    python check.py FOLDER                            a release: graphs in FOLDER/graphs, answers in FOLDER/answers

Files are JSON, plain or compressed (.gz, .bz2, .xz). A graph is a `remat-graph/1`. An answer is an object with
`budget_bytes` and at least one of `plan`, with its `cost_ns` and `peak_bytes`, `bound_ns`, and `infeasible`; the last
two follow from `proof`, from the cost of each op once, or from what one op needs. In a release it also has `graph`, a
name in `graphs`, and `graph_digest`. All numbers are whole. Graphs with a link to the host have plans here, and no
certificates but of what one op needs.

Each function raises `Refused` with the reason. Exit code 1: something was refused.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

Column = tuple[Any, ...]
"""("run", a, b, op), ("hold", c, value) or ("through", c, value): 0 or 1 for every plan."""

Term = Column | int
"""A column, or the number that it is for certain."""

MOST = 2**53
MOST_COVER_WORK = 100_000_000


class Refused(Exception):
    """A file breaks a rule, or says more than follows from it."""


def need(condition: object, reason: str) -> None:
    """Refuse for this reason unless the condition holds."""
    if not condition:
        raise Refused(reason)


def whole(number: object, name: str, least: float = 0, most: float = MOST) -> int:
    """A whole number in a range."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise Refused(f"{name}: {number!r} is no whole number in {least} … {most}")
    return number


def array(written: object, name: str) -> list[Any]:
    """An array."""
    if not isinstance(written, list):
        raise Refused(f"{name} is no array")
    return written


def wholes(written: object, name: str, least: float = 0, most: float = MOST) -> list[int]:
    """An array of whole numbers in a range."""
    return [whole(number, name, least, most) for number in array(written, name)]


def indices_of(written: object, name: str, count: int | None = None) -> list[int]:
    """An array of so many whole numbers of any size and sign."""
    found = wholes(written, name, -math.inf, math.inf)
    need(count is None or len(found) == count, f"{name} has {len(found)} numbers")
    return found


def members(document: object, name: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """An object that has these members and no others."""
    if not isinstance(document, dict):
        raise Refused(f"{name} is no object")
    missing, known = set(required) - document.keys(), {*required, *optional}
    need(not missing, f"{name} lacks {sorted(missing)}")
    need(document.keys() <= known, f"{name} has unknown members {sorted(map(str, document.keys() - known))}")
    return document


class Graph:
    """The data of a problem but for its budget, and what P1 derives from it.

    Attributes, by op: `cost` in ns, `workspace` in bytes, `inputs`, `makes` (its values), `last` (the last stage in
    which it may run, n where there is none), `reach` (the last stage in which computing it again may be of use),
    `need` (bytes that a computation holds for certain). By value: `maker`, `size`, `readers` ascending, `value_reach`.
    """

    def __init__(
        self, cost: list[int], workspace: list[int], inputs: list[list[int]], maker: list[int], size: list[int],
        optional: Iterable[int], once: Iterable[int], keep: Iterable[int], consumes: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.cost, self.workspace, self.inputs, self.maker, self.size = cost, workspace, inputs, maker, size
        self.optional, self.keep, self.consumes = set(optional), set(keep), set(consumes)
        self.n, self.total = len(cost), sum(cost)
        self.makes: list[list[int]] = [[] for _ in cost]
        self.readers: list[list[int]] = [[] for _ in size]
        for v, p in enumerate(maker):
            self.makes[p].append(v)
        for i, read in enumerate(inputs):
            for v in read:
                self.readers[v].append(i)
        self.single = set(once) | {maker[v] for v in self.keep}
        self.last = [
            i if i in self.single else min((self.readers[v][-1] for v in read if v in self.consumes), default=self.n)
            for i, read in enumerate(inputs)
        ]
        self.reach, self.value_reach = [-1] * self.n, [-1] * len(size)
        for i in reversed(range(self.n)):
            for v in self.makes[i]:
                later = max((max(u, self.reach[u]) for u in self.readers[v]), default=-1)
                self.value_reach[v] = self.n if v in self.keep else later
            self.reach[i] = min(self.last[i], max((self.value_reach[v] for v in self.makes[i]), default=-1))
        self.always = [[v for v in made if v not in self.optional] for made in self.makes]
        held = [inputs[i] + self.always[i] for i in range(self.n)]
        self.need = [workspace[i] + sum(size[v] for v in held[i]) for i in range(self.n)]
        self.fixed = 0
        self.link: dict[str, Any] | None = None
        self.document: dict[str, Any] = {}

    def certainly_held(self, v: int, stage: int) -> bool:
        """Whether a value that is made before this stage is resident when it begins in every plan: S = 1 (P1)."""
        runs_no_more = self.last[self.maker[v]] < stage
        return v in self.keep or (runs_no_more and bool(self.readers[v]) and self.readers[v][-1] >= stage)


COLUMNS = ("op_cost_ns", "op_inputs", "value_op", "value_bytes")
MARKS = ("optional", "once", "keep", "consumes")
LINK = ("to_host_bytes_per_s", "to_device_bytes_per_s")


def read_graph(document: object) -> Graph:
    """A `remat-graph/1` as `docs/wire.md` defines it."""
    names = ("op_workspace_bytes", *MARKS, "backward_from", "fixed_bytes", "link", "op_names", "value_names")
    data = members(document, "graph", ("format", *COLUMNS), names)
    need(data["format"] == "remat-graph/1", f"the format is {data['format']!r}")
    cost = wholes(data["op_cost_ns"], "op_cost_ns")
    n = len(cost)
    workspace = wholes(data.get("op_workspace_bytes", [0] * n), "op_workspace_bytes")
    maker, size = wholes(data["value_op"], "value_op", 0, n - 1), wholes(data["value_bytes"], "value_bytes")
    reads = enumerate(array(data["op_inputs"], "op_inputs"))
    inputs = [wholes(read, f"inputs of op {i}", 0, len(size) - 1) for i, read in reads]
    need(len(workspace) == len(inputs) == n and len(maker) == len(size), "arrays have unequal lengths")
    need(all(a <= b for a, b in pairwise(maker)), "value_op decreases")
    for i, read in enumerate(inputs):
        need(len(set(read)) == len(read) and all(maker[v] < i for v in read), f"op {i} can't read {read}")
    marked: list[list[int]] = []
    for name in MARKS:
        marked.append(wholes(data.get(name, []), name, 0, (n if name == "once" else len(size)) - 1))
        need(len(set(marked[-1])) == len(marked[-1]), f"{name} names one twice")
    graph = Graph(cost, workspace, inputs, maker, size, *marked)
    for v in graph.consumes:
        consumed = v not in graph.keep and graph.readers[v] and graph.readers[v][-1] in marked[1]
        need(consumed, f"no op of `once` consumes value {v}, or it is kept")
    if data.get("backward_from") is not None:
        whole(data["backward_from"], "backward_from", 0, n)
    graph.fixed = whole(data.get("fixed_bytes", 0), "fixed_bytes")
    if (link := data.get("link")) is not None:
        graph.link = members(link, "link", LINK, ("latency_ns", "host_bytes"))
        for name in LINK:
            whole(link[name], name, 1)
        whole(link.get("latency_ns", 0), "latency_ns")
        if link.get("host_bytes") is not None:
            whole(link["host_bytes"], "host_bytes")
    graph.document = data
    return graph


def digest(graph: Graph, budget: int | None = None) -> str:
    """SHA-256 of a graph, or of the problem with this budget in bytes."""
    document = graph.document
    data: dict[str, Any] = {name: document[name] for name in COLUMNS}
    data |= {name: document.get(name, []) for name in ("keep", "once", "optional")}
    data |= {"format": "remat-graph/1", "backward_from": document.get("backward_from")}
    data |= {"op_workspace_bytes": graph.workspace}
    data |= {name: document[name] for name in ("consumes", "link") if document.get(name)}
    data |= {} if budget is None else {"budget_bytes": budget - graph.fixed}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Replay:
    """A plan carried out step by step: the time in ns, and bytes on the device and on the host.

    A value that exists is on a `side`: "device", "out" (also there, while a copy to the host is under way), "both",
    "host" or "back" (under way to the device).
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.now = self.next = self.host = 0
        self.resident = self.peak = graph.fixed
        self.side: dict[int, str] = {}
        self.ends: dict[int, int] = {}
        self.free_at = {"out": 0, "back": 0}

    def step(self, verb: str, number: int, kept: list[int] | None) -> None:
        """One step of a plan."""
        graph = self.graph
        if verb == "compute":
            self.compute(number, graph.always[number] if kept is None else kept)
            return
        need(number in self.side, f"{verb}: value {number} is not there")
        side, size = self.side[number], graph.size[number]
        if verb == "free":
            need(number not in graph.keep, f"free: value {number} is to be kept")
            need(side in ("device", "both"), f"free: value {number} is on its way, or on the host alone")
            del self.side[number]
            self.resident -= size
            self.host -= size if side == "both" else 0
        elif verb == "offload":
            need(side == "device" and number not in graph.keep, f"offload: value {number} can't go out")
            self.start("out", number)
            self.host += size
            limit = (graph.link or {}).get("host_bytes")
            need(limit is None or self.host <= limit, f"the host holds {self.host} bytes")
        elif verb == "prefetch":
            need(side == "host", f"prefetch: value {number} is not on the host alone")
            self.start("back", number)
            self.resident += size
            self.peak = max(self.peak, self.resident)
        elif verb == "wait":
            need(side in ("out", "back"), f"wait: no copy of value {number} is under way")
            self.now = max(self.now, self.ends[number])
            self.side[number] = "both" if side == "out" else "device"
            self.host -= size if side == "back" else 0
        else:
            need(side == "both", f"drop: value {number} has no copy on the host")
            self.side[number] = "host"
            self.resident -= size

    def start(self, way: str, v: int) -> None:
        """Begin a copy after those before it in its direction."""
        assert self.graph.link is not None
        rate = self.graph.link[LINK[way == "back"]]
        time = self.graph.link.get("latency_ns", 0) - (-self.graph.size[v] * 10**9 // rate)
        self.side[v] = way
        self.ends[v] = self.free_at[way] = max(self.now, self.free_at[way]) + time

    def compute(self, i: int, kept: Sequence[int]) -> None:
        """Run an op, and keep these of its values."""
        graph, side = self.graph, self.side
        need(i <= self.next, f"op {i} is first computed before op {self.next}")
        need(i == self.next or i not in graph.single, f"op {i} runs once")
        need(i == self.next or self.next <= graph.last[i], f"op {i} reads what was consumed before")
        need(set(kept) <= set(graph.makes[i]) and len(set(kept)) == len(kept), f"op {i} keeps what it doesn't make")
        readable = all(side.get(v) in ("device", "out", "both") for v in graph.inputs[i])
        need(readable, f"op {i} reads what is not there")
        made = {*graph.always[i], *kept}
        absent = all(v not in side or (side[v] == "host" and v not in kept) for v in made)
        need(absent, f"op {i} makes what is there")
        self.peak = max(self.peak, self.resident + graph.workspace[i] + sum(graph.size[v] for v in made))
        self.resident += sum(graph.size[v] for v in kept)
        side |= dict.fromkeys(kept, "device")
        self.now += graph.cost[i]
        self.next += i == self.next


def check_plan(graph: Graph, plan: object) -> tuple[int, int]:
    """Cost in ns (with a link the makespan) and peak in bytes of a `remat-plan/1`."""
    data, replay = members(plan, "plan", ("format", "steps")), Replay(graph)
    need(data["format"] == "remat-plan/1", f"the format is {data['format']!r}")
    verbs = {"compute", "free"} | ({"offload", "wait", "drop", "prefetch"} if graph.link else set())
    for at, step in enumerate(array(data["steps"], "steps")):
        try:
            lengths = (2, 3) if array(step, "step")[:1] == ["compute"] else (2,)
            need(len(step) in lengths and str(step[0]) in verbs, f"no such step: {step!r}")
            most = (graph.n if step[0] == "compute" else len(graph.size)) - 1
            kept = wholes(step[2], "kept", 0, len(graph.size) - 1) if len(step) == 3 else None
            replay.step(step[0], whole(step[1], step[0], 0, most), kept)
        except Refused as refused:
            raise Refused(f"step {at}: {refused}") from None
    need(replay.next == graph.n, f"op {replay.next} is never computed")
    need(all(replay.side.get(v) == "device" for v in graph.keep), "a kept value is not there at the end")
    need(not {"out", "back"} & set(replay.side.values()), "a copy is not waited for")
    return replay.now, replay.peak


class Row:
    """Σ terms ≤ most for every plan that fits; with a `limit`, that costs less than all ops once and `limit` ns."""

    def __init__(self, most: int, *terms: tuple[int, Term], limit: int | None = None) -> None:
        self.terms: dict[Column, int] = {}
        self.most, self.limit = most, limit
        for factor, term in terms:
            self.add(factor, term)

    def add(self, factor: int, term: Term) -> None:
        """Add to the left side; of a number, its product goes to the right."""
        if isinstance(term, int):
            self.most -= factor * term
        else:
            self.terms[term] = self.terms.get(term, 0) + factor

    def add_row(self, factor: int, row: Row) -> None:
        """Add a multiple of another row."""
        for column, a in row.terms.items():
            self.add(factor * a, column)
        self.most += factor * row.most
        self.limit = least(self.limit, row.limit)


def least(*limits: int | None) -> int | None:
    """The smallest, of which None is none."""
    return min((limit for limit in limits if limit is not None), default=None)


class Stages:
    """The columns of a graph at cuts, within a capacity in bytes, and the rows P2 to P11 between them."""

    def __init__(self, graph: Graph, capacity: int, cuts: list[int], spans: object) -> None:
        self.graph, self.capacity, self.cuts, self.count = graph, capacity, cuts, len(cuts)
        need(cuts and cuts[-1] == graph.n - 1, "the last cut is not the last op")
        need(all(a < b for a, b in pairwise(cuts)), "the cuts don't ascend")
        self.first = [0, *(cut + 1 for cut in cuts)]
        self.spans: set[tuple[int, int]] = set()
        for span in array(spans, "spans"):
            a, b = indices_of(span, "span", 2)
            need(1 <= a < b < self.count, f"no span [{a}, {b}]")
            self.spans.add((a, b))
        self.reads = [set(read) for read in graph.inputs]

    def run(self, a: int, b: int, i: int) -> Term:
        """R_{ab,i}."""
        return 0 if self.graph.reach[i] < self.first[a] else ("run", a, b, i)

    def hold(self, c: int, v: int) -> Term:
        """S_{c,v}; at the end of the plan, whether v is kept."""
        if c == self.count:
            return int(v in self.graph.keep)
        if self.graph.certainly_held(v, self.first[c]):
            return 1
        return 0 if self.graph.value_reach[v] < self.first[c] else ("hold", c, v)

    def held_after(self, c: int, v: int) -> Term:
        """The left of P7: S_{c+1,v}, or 1 if the last first computation of c reads v."""
        return 1 if v in self.reads[self.cuts[c]] else self.hold(c + 1, v)

    def through(self, c: int, v: int) -> Term:
        """T_{c,v}."""
        after = self.held_after(c, v)
        return after if after == 0 or self.run(c, c, self.graph.maker[v]) == 0 else ("through", c, v)

    def exists(self, column: Column) -> bool:
        """Whether this is a column: what is certain is none."""
        kind, *rest = column or (None,)
        need(all(isinstance(number, int) for number in rest), "a column has something else than numbers")
        if kind == "run" and len(rest) == 3:
            a, b, i = rest
            return self.is_span(a, b) and 0 <= i < self.first[a] and self.run(a, b, i) == column
        c, v = rest if kind in ("hold", "through") and len(rest) == 2 else (0, 0)
        if not 1 <= c < self.count or not self.made(v, c):
            return False
        return (self.hold(c, v) if kind == "hold" else self.through(c, v)) == column

    def made(self, v: int, c: int) -> bool:
        """Whether this is a value that is made before coarse stage c."""
        return 0 <= v < len(self.graph.size) and self.graph.maker[v] < self.first[c]

    def is_span(self, a: int, b: int) -> bool:
        """Whether a … b is a coarse stage from 1 on, or a span."""
        return 1 <= a <= b < self.count and (a == b or (a, b) in self.spans)

    def supplied(self, most: int, a: int, b: int, v: int, *terms: tuple[int, Term]) -> Row:
        """Terms − R_{ab,p(v)} − S_{a,v} ≤ most, of a value made before."""
        need(self.is_span(a, b) and self.made(v, a), f"no [{a}, {b}], or no value {v} before it")
        return Row(most, *terms, (-1, self.run(a, b, self.graph.maker[v])), (-1, self.hold(a, v)))

    def read(self, a: int, b: int, j: int, v: int) -> Row:
        """P2."""
        need(self.is_span(a, b) and 0 <= j < self.first[a] and v in self.reads[j], f"op {j} doesn't read value {v}")
        return self.supplied(0, a, b, v, (1, self.run(a, b, j)))

    def first_(self, a: int, b: int, v: int) -> Row:
        """P3."""
        row = self.supplied(-1, a, b, v)
        need(any(self.first[a] <= u <= self.cuts[b] for u in self.graph.readers[v]), f"nothing reads value {v} there")
        return row

    def stay(self, a: int, b: int, v: int) -> Row:
        """P4."""
        need(self.is_span(a, b) and self.made(v, a), f"no [{a}, {b}], or no value {v} before it")
        return self.supplied(0, a, b, v, (1, self.hold(b + 1, v)))

    def charged(self, c: int) -> list[int]:
        """The values of P5."""
        need(1 <= c < self.count, f"no coarse stage {c}")
        graph, cut = self.graph, self.cuts[c - 1]
        before = [v for v in range(len(graph.size)) if graph.maker[v] < cut and v not in self.reads[cut]]
        return before + [v for v in graph.makes[cut] if v in graph.optional]

    def memory(self, c: int) -> Row:
        """P5."""
        values, free = self.charged(c), self.capacity - self.graph.need[self.cuts[c - 1]]
        return Row(free, *((self.graph.size[v], self.hold(c, v)) for v in values))

    def part(self, a: int, b: int, c: int, d: int, i: int) -> Row:
        """P6, one part."""
        need(self.is_span(a, b) and self.is_span(c, d) and a <= c and d <= b, f"{c} … {d} is no part of {a} … {b}")
        need(0 <= i < self.first[a], f"op {i} is not before {a}")
        return Row(0, (1, self.run(c, d, i)), (-1, self.run(a, b, i)))

    def or_(self, a: int, b: int, i: int) -> Row:
        """P6, all parts: the longest that there is, one after the other."""
        need(self.is_span(a, b) and 0 <= i < self.first[a], f"no parts of [{a}, {b}] and op {i}")
        row, at = Row(0, (1, self.run(a, b, i))), a
        while at <= b:
            parts = (end for end in range(at, b + 1) if self.is_span(at, end) and (at, end) != (a, b))
            end = max(parts, default=at)
            row.add(-1, self.run(at, end, i))
            at = end + 1
        return row

    def through_(self, c: int, v: int) -> Row:
        """P7."""
        need(self.exists(("through", c, v)), f"no column T of {c} and value {v}")
        again = self.run(c, c, self.graph.maker[v])
        return Row(0, (1, self.held_after(c, v)), (-1, again), (-1, ("through", c, v)))

    def rerun(self, c: int, k: int) -> Row:
        """P8."""
        need(1 <= c < self.count and 0 <= k < self.first[c], f"op {k} is not before coarse stage {c}")
        graph, used = self.graph, {*self.reads[k], *self.graph.makes[k]}
        there = (v for v in range(len(graph.size)) if self.made(v, c) and v not in used)
        terms = ((graph.size[v], self.through(c, v)) for v in there)
        return Row(self.capacity, (graph.need[k], self.run(c, c, k)), *terms)

    def cover(self, c: int, most: int, *pairs: int) -> Row:
        """P9: the least bytes of values whose weights exceed `most`, by dynamic programming over weights."""
        memory, row, charged = self.memory(c), Row(most), set(self.charged(c))
        values, weights = pairs[::2], pairs[1::2]
        need(len(values) == len(weights) == len(set(values)), "a cover needs values and weights in turn")
        for v, weight in zip(values, weights, strict=True):
            need(weight >= 0 and v in charged and self.exists(("hold", c, v)), f"value {v} is not in the memory of {c}")
            row.add(weight, ("hold", c, v))
        if most < 0:
            need(memory.most < 0, "the cover fits")
        elif sum(weights) > most:
            need((most + 2) * len(values) <= MOST_COVER_WORK, "the cover's weights are too large to check")
            fewest: list[float] = [0, *[math.inf] * (most + 1)]
            for v, weight in zip(values, weights, strict=True):
                size = self.graph.size[v]
                for w in range(most + 1, -1, -1):
                    to = min(most + 1, w + weight)
                    fewest[to] = min(fewest[to], fewest[w] + size)
            need(fewest[most + 1] > memory.most, "the cover fits")
        return row

    def cheaper(self, limit: int) -> Row:
        """P11."""
        stages, ops = range(1, self.count), self.graph.cost
        terms = ((ops[i], self.run(c, c, i)) for c in stages for i in range(self.first[c]))
        return Row(limit - 1, *terms, limit=limit)

    def cost(self, column: Column) -> int:
        """What a column costs."""
        return self.graph.cost[column[3]] if column[0] == "run" and column[1] == column[2] else 0

    def round(self, rows: Sequence[Row], d: int, t: int, b: int, *rest: int) -> Row:
        """P10: mixed-integer rounding of a sum of earlier rows."""
        need(d > 0 and t > 0, "a divisor is not positive")
        need(0 <= rest[0] < len(rest) - 1, "a rounded row ends early")
        positions, (added, *pairs) = rest[1 : rest[0] + 1], rest[rest[0] + 1 :]
        need(len(pairs) % 2 == 0 and 0 <= added <= len(pairs) // 2, "a rounded row needs rows and multipliers in turn")
        total, taken = Row(0), Row(0)
        for at, (r, m) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
            need(0 <= r < len(rows) and m > 0, f"row {r} times {m}, of {len(rows)} earlier rows")
            total.add_row(m if at < added else -m, rows[r])
            if at >= added:
                taken.add_row(m, rows[r])
        need(b >= total.most, f"the sum of the rows allows {total.most}, not {b}")
        columns = sorted(column for column, a in total.terms.items() if a)
        once = len(set(positions)) == len(positions) and all(0 <= j < len(columns) for j in positions)
        need(once, "a column to complement is not there, or twice")
        complemented = {columns[j] for j in positions}
        q, f = divmod(b - sum(total.terms[column] for column in complemented), d)
        row = Row((d - f) * q, limit=total.limit)
        for column in columns:
            sign = -1 if column in complemented else 1
            quotient, rest_of = divmod(sign * total.terms[column], d)
            g = (d - f) * quotient + max(0, rest_of - f)
            row.add(sign * g, column)
            row.most -= g if sign < 0 else 0
        row.add_row(1, taken)
        row.terms = {column: a // t for column, a in row.terms.items()}
        row.most //= t
        return row

    def row(self, rows: Sequence[Row], written: object) -> Row:
        """A row from its kind and indices, and from the rows before it."""
        kind, *rest = array(written, "row") or [None]
        indices = indices_of(rest, "row")
        kinds: dict[object, tuple[Callable[..., Row], int]] = {
            "read": (self.read, 4), "first": (self.first_, 3), "stay": (self.stay, 3), "memory": (self.memory, 1),
            "part": (self.part, 5), "or": (self.or_, 3), "through": (self.through_, 2), "rerun": (self.rerun, 2),
            "cheaper": (self.cheaper, 1), "cover": (self.cover, 2), "round": (partial(self.round, rows), 5),
        }  # fmt: skip
        make, count = kinds.get(str(kind), (self.memory, -1))
        more = len(indices) > count >= 0 and kind in ("cover", "round")
        need(len(indices) == count or more, f"no row {written!r}")
        return make(*indices)


def check_stages(graph: Graph, capacity: int, proof: dict[str, Any]) -> float:
    """Ns that every plan within the capacity costs at least, by stages; infinite where none fits."""
    cuts = wholes(proof["cuts"], "cuts", 0, graph.n - 1)
    on = Stages(graph, capacity, cuts, proof["spans"])
    rows: list[Row] = []
    nodes = array(proof["nodes"], "nodes")
    for r, written in enumerate(array(proof["rows"], "rows")):
        try:
            rows.append(on.row(rows, written))
        except Refused as refused:
            raise Refused(f"row {r}: {refused}") from None
    denominator, at = whole(proof["denominator"], "denominator", 1, 2**200), 0
    proved: float = graph.total
    need(nodes, "there is no tree")
    while at < len(nodes):
        at, bound = tree(on, rows, denominator, nodes, at)
        proved = max(proved, bound)
    return proved


def tree(on: Stages, rows: list[Row], denominator: int, nodes: list[Any], at: int) -> tuple[int, float]:
    """Where the tree that begins at a node ends, and what it proves: the least of its leaves."""
    box: dict[Column, int] = {}  # the columns that are branched on above, in order
    open_: list[tuple[int, Column, int]] = [(0, (), 0)]
    fewest: float = math.inf
    limit: int | None = None
    while open_:
        depth, column, side = open_.pop()
        while len(box) > depth:
            box.popitem()
        box |= {column: side} if column else {}
        need(at < len(nodes), "the tree ends early")
        node, at = nodes[at], at + 1
        need(isinstance(node, list) and len(node) == 2 and isinstance(node[1], list), f"no node: {node!r}")
        kind, content = node
        if kind == "branch":
            split = tuple(content)
            need(on.exists(split) and split not in box, f"no column {split}, or a second branch on it")
            open_ += [(len(box), split, 1), (len(box), split, 0)]
            continue
        need(kind in ("bound", "empty"), f"no node: {node!r}")
        value, depends = leaf(on, rows, denominator, box, indices_of(content, "leaf"), priced=kind == "bound")
        limit = least(limit, depends)
        if kind == "bound":
            fewest = min(fewest, on.graph.total - (-value // denominator))
        else:
            need(value > 0, "a leaf without points has some")
    if limit is not None:
        fewest = min(fewest, on.graph.total + limit)
    return at, fewest


def leaf(
    on: Stages, rows: list[Row], denominator: int, box: dict[Column, int], pairs: list[int], *, priced: bool
) -> tuple[int, int | None]:
    """What the right side of a leaf is, times the denominator, and the limit that it depends on."""
    need(len(pairs) % 2 == 0, "a leaf needs rows and multipliers in turn")
    total = Row(0)
    for r, y in zip(pairs[::2], pairs[1::2], strict=True):
        need(0 <= r < len(rows) and y > 0, f"row {r} times {y}, of {len(rows)} rows")
        total.add_row(y, rows[r])
    found = -total.most
    for column, a in total.terms.items():
        slope = a + (denominator * on.cost(column) if priced else 0)
        found += min(0, slope) if column not in box else slope * box[column]
    forced = (column for column, side in box.items() if side and column not in total.terms)
    return found + priced * denominator * sum(map(on.cost, forced)), total.limit


def certain_need(graph: Graph, k: int) -> int:
    """Bytes that are there for certain while op k is first computed."""
    there = {*graph.inputs[k], *graph.always[k]}
    there |= {v for v in graph.keep if graph.maker[v] <= k}
    if graph.link is None:
        there |= {v for v, p in enumerate(graph.maker) if p <= k and graph.certainly_held(v, k + 1)}
    return graph.workspace[k] + sum(graph.size[v] for v in there)


def check_pairs(graph: Graph, capacity: int, proof: dict[str, Any]) -> float:
    """That an op cannot run, because of pairs of values that are never resident together (P12)."""
    k = whole(proof["op"], "op", 0, graph.n - 1)
    if certain_need(graph, k) > capacity:
        return math.inf
    need(graph.link is None, "pairs say nothing of a graph with a link")
    never: set[tuple[int, int]] = set()
    partners: dict[int, set[int]] = {}
    for pair in array(proof["pairs"], "pairs"):
        one, other = indices_of(pair, "pair", 2)
        need(min(one, other) >= 0 and max(one, other) < len(graph.size), f"no pair: {pair!r}")
        for u, v in ((one, other), (other, one)):
            never.add((u, v))
            partners.setdefault(u, set()).add(v)

    def among(values: Sequence[int]) -> bool:
        return any(not partners.get(v, set()).isdisjoint(values) for v in values)

    for u, v in never:
        o = graph.maker[u]
        together = graph.maker[v] == o
        ran = o if together else max(o, graph.maker[v])
        there = {*graph.inputs[o], *graph.always[o], u, v} | {x for x in graph.keep if graph.maker[x] <= ran}
        if graph.workspace[o] + sum(graph.size[x] for x in there) > capacity or among(graph.inputs[o]):
            continue
        apart = not together and ((v, v) in never or not partners.get(v, set()).isdisjoint(graph.inputs[o]))
        need(apart, f"values {u} and {v} may be resident together")
    need(among(graph.inputs[k]), f"op {k} may run")
    return math.inf


def check_windows(graph: Graph, capacity: int, proof: dict[str, Any]) -> float:
    """A bound by windows of a deep network (P13), in ns."""
    turn, small = whole(proof["turn"], "turn", 0, graph.n - 1), whole(proof["small_bytes"], "small_bytes")
    firsts, laters = wholes(proof["firsts"], "firsts", 0, turn), wholes(proof["laters"], "laters", turn + 1, graph.n)
    count = len(firsts) - 1
    need(len(laters) == len(firsts) > 1, "firsts and laters have unequal lengths, or no segments")
    need(firsts == sorted(firsts) and laters == sorted(laters, reverse=True), "the segments are in disorder")
    read = set(graph.inputs[turn])
    before = [v for v in range(len(graph.size)) if graph.maker[v] < turn]
    certain = {v for v in before if graph.certainly_held(v, turn + 1)}
    free = {v for v in before if v in read or v in certain or graph.size[v] <= small}
    certain |= {v for v in graph.makes[turn] if v in graph.optional and graph.certainly_held(v, turn + 1)}
    room = capacity - graph.need[turn] - sum(graph.size[v] for v in certain - read)
    need(room >= 0, "nothing fits at the turn: that is no certificate by windows")
    able = [v for v in before if v not in free and graph.value_reach[v] > turn]
    smallest = [  # bytes that a segment holds at least if it holds something
        min((graph.size[v] for v in able if start <= graph.maker[v] < end), default=math.inf)
        for start, end in pairwise(firsts)
    ]
    parts = [members(part, "part", STAGE_MEMBERS) for part in array(proof["parts"], "parts")]
    known: dict[str, float] = {}
    unheld: dict[tuple[int, int], float] = {}  # windows that hold nothing -> ns that they pay at least
    spare: list[dict[int, float]] = [{} for _ in range(count)]  # segment -> bytes that it may hold -> ns
    for one in array(proof["windows"], "windows"):
        i, j, r, which = indices_of(one, "window", 4)
        need(0 <= i < j <= count and r >= 0 and 0 <= which < len(parts), f"no window: {one!r}")
        part = parts[which]
        need(part["problem"] == proof["problem"] and part["by"] == "stages", "a part is of another kind")
        ops = [*range(firsts[i], firsts[j]), None, *range(laters[j], laters[i])]
        window = window_graph(graph, ops, free, capacity - r)
        key = f"{which} {window.cost} {window.workspace} {window.inputs} {window.maker} {window.size}"
        key += f" {sorted(window.optional)} {sorted(window.single)} {sorted(window.keep)}"
        if key not in known:
            known[key] = check_stages(window, capacity, part) - window.total
        if r == 0:
            unheld[i, j] = max(known[key], unheld.get((i, j), 0))
        if j == i + 1:
            spare[i][r] = max(known[key], spare[i].get(r, 0))
    return graph.total + fewest_over_windows(count, room, smallest, unheld, spare)


def window_graph(graph: Graph, ops: list[int | None], free: set[int], workspace: int) -> Graph:
    """The window of these ops, of which None is the turn."""
    made = [(v, at) for at, op in enumerate(ops) if op is not None for v in graph.makes[op]]
    number, maker = {v: new for new, (v, _) in enumerate(made)}, [at for _, at in made]
    read = [[] if op is None else graph.inputs[op] for op in ops]
    inputs = [[number[v] for v in values if v in number] for values in read]
    spaces = [
        workspace if op is None else graph.workspace[op] + sum(graph.size[v] for v in values if v not in number)
        for op, values in zip(ops, read, strict=True)
    ]
    once = [at for at, op in enumerate(ops) if op is None or graph.last[op] == op]
    cost = [0 if op is None else graph.cost[op] for op in ops]
    size = [0 if v in free else graph.size[v] for v in number]
    optional, keep = ([number[v] for v in marked & number.keys()] for marked in (graph.optional, graph.keep))
    return Graph(cost, spaces, inputs, maker, size, optional, once, keep)


def fewest_over_windows(
    count: int, room: int, smallest: list[float], unheld: dict[tuple[int, int], float], spare: list[dict[int, float]]
) -> float:
    """The least that windows pay, in ns, over all sets of segments that hold something within the room."""
    # [start][end]: the most that windows apart from each other pay in segments start … end − 1 where these hold nothing
    most: list[list[float]] = [[0] * (count + 1) for _ in range(count + 2)]
    for start in reversed(range(count)):
        from_here = [(j, pays) for (i, j), pays in unheld.items() if i == start]
        for end in range(start + 1, count + 1):
            paid = [pays + most[j][end] for j, pays in from_here if j <= end]
            most[start][end] = max(most[start + 1][end], *paid, 0)
    # [i]: bytes held and ns paid before segment i where the one before it holds something; no state is worse in both
    states: list[list[tuple[float, float]]] = [[(0, 0)]]
    for i in range(count + 1):
        before = enumerate(states)
        here = not_worse([(held, cost + most[start][i]) for start, found in before for held, cost in found])
        if i == count:
            return min((cost for _, cost in here), default=math.inf)
        touches, lower = list[tuple[float, float]](), smallest[i]
        for r, pays in sorted(spare[i].items()):
            if r >= lower:
                touches.append((lower, pays))
                lower = r + 1
        touches.append((lower, 0))
        after = ((held + size, cost + pays) for held, cost in here for size, pays in touches)
        states.append(not_worse([state for state in after if state[0] <= room]))
    raise AssertionError


def not_worse(states: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (bytes, ns) that no other one is below in both."""
    kept: list[tuple[float, float]] = []
    for held, cost in sorted(states):
        if not kept or cost < kept[-1][1]:
            kept.append((held, cost))
    return kept


STAGE_MEMBERS = ("format", "by", "problem", "cuts", "spans", "rows", "denominator", "nodes")
WINDOW_MEMBERS = ("format", "by", "problem", "turn", "firsts", "laters", "small_bytes", "parts", "windows")
PROOFS = {
    "stages": (check_stages, STAGE_MEMBERS),
    "pairs": (check_pairs, ("format", "by", "problem", "op", "pairs")),
    "windows": (check_windows, WINDOW_MEMBERS),
}


def check_proof(graph: Graph, budget: int, proof: object) -> float:
    """What a `remat-proof/1` proves of a graph within a budget: ns that every plan costs at least."""
    if not isinstance(proof, dict) or proof.get("format") != "remat-proof/1" or str(proof.get("by")) not in PROOFS:
        raise Refused("no remat-proof/1 by stages, pairs or windows")
    check, names = PROOFS[proof["by"]]
    members(proof, "proof", names)
    need(graph.link is None or proof["by"] == "pairs", "certificates with a link are not checked here")
    need(proof["problem"] == digest(graph, budget), "the certificate is for another problem")
    return check(graph, budget - graph.fixed, proof)


def check_answer(graph: Graph, answer: dict[str, Any]) -> str:
    """Check all that an answer says, and say in a line what of it is certain."""
    budget = whole(answer.get("budget_bytes"), "budget_bytes")
    need(any(answer.get(name) is not None for name in ("plan", "bound_ns", "infeasible")), "the answer says nothing")
    proved: float = graph.total
    if max((certain_need(graph, k) for k in range(graph.n)), default=0) > budget - graph.fixed:
        proved = math.inf
    if answer.get("proof") is not None:
        proved = max(proved, check_proof(graph, budget, answer["proof"]))
    said = []
    if answer.get("plan") is not None:
        cost, peak = check_plan(graph, answer["plan"])
        need(peak <= budget, f"the peak of {peak} bytes is over the budget of {budget}")
        need(answer.get("cost_ns", cost) == cost, f"the plan costs {cost} ns, not {answer.get('cost_ns')}")
        need(answer.get("peak_bytes", peak) == peak, f"the peak is {peak} bytes, not {answer.get('peak_bytes')}")
        need(proved <= cost, "the certificate contradicts the plan: one of the two rules is wrong")
        said.append(f"cost {cost} ns, peak {peak} bytes")
    if answer.get("bound_ns") is not None:
        bound = whole(answer["bound_ns"], "bound_ns")
        need(bound <= proved, f"a bound of {bound} ns is said, {proved} is proved")
        said.append(f"no plan costs less than {bound} ns")
    if answer.get("infeasible"):
        need(proved == math.inf, "that no plan fits is said, and not proved")
        said.append("no plan fits")
    return "; ".join(said)


def load(path: Path) -> Any:
    """A JSON file, compressed or not."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def main(arguments: Sequence[str]) -> int:
    """Check what the arguments name, a line for each answer."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    paths = [Path(argument) for argument in arguments]
    graphs = {"": paths[0]}
    if len(paths) == 1:
        graphs = {path.name.split(".")[0]: path for path in (paths[0] / "graphs").iterdir()}
    read: dict[str, Graph] = {}
    refused = checked = 0
    for path in paths[1:] or sorted((paths[0] / "answers").iterdir()):
        try:
            answer = load(path)
            name = answer.get("graph", "") if len(paths) == 1 else ""
            need(isinstance(name, str) and name in graphs, f"no graph {name!r}")
            if name not in read:
                read = {name: read_graph(load(graphs[name]))}
            need(answer.get("graph_digest") in (None, digest(read[name])), "the answer is to another graph")
            print(f"{path.name}: {check_answer(read[name], answer)}")
            checked += 1
        except Exception as error:  # a damaged file may fail in any way
            print(f"{path.name}: REFUSED: {error}")
            refused += 1
    print(f"{checked} confirmed, {refused} refused")
    return 1 if refused or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
