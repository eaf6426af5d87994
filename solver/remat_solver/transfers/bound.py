"""A lower bound on the makespan of every plan of a graph with a link, and what its relaxation would move.

The relaxation has coarse stages: what runs again, what is on the device, what is on the host. Coarse stages 0 … K − 1
and their cuts are those of `remat_solver.staged.relaxation`; c covers the stages f_c … τ_c. Time is counted too, so
coarse stage 0 has variables as well. D_c is the time between the ends of the first computations of τ_{c−1} and of τ_c.
Of a plan, with copies told apart by when they begin on the link (`docs/proofs.md`, With a link):

    R_{c,i}           op i < f_c is computed in c
    S_{c,v}           v is on the device when c begins, or its copy back has begun
    H_{c,v}           a copy of v out has begun before c, and its copy back has not
    X_{c,v}, P_{c,v}  how many copies of v out and back begin in c; v has bytes
    W_c ≥ 0           D_c less the costs of first computations in c and of each R_{c,i} once: idle time, and what runs
                      more than once in c or again in the coarse stage of its first computation
    G_{c,d} ≥ 0       how long the copy in direction d that runs when c begins will still take: one at most

The program minimises Σ C_i R_{c,i} + Σ W_c, which with Σ C_i is the makespan, subject to

    (a) R_{c,j} ≤ R_{c,p(v)} + S_{c,v} + P_{c,v}        j < f_c reads v
    (b) 1 ≤ R_{c,p(v)} + S_{c,v} + P_{c,v}              an op first computed in c reads v, made before
    (c) S_{c+1,v} ≤ R_{c,p(v)} + S_{c,v} + P_{c,v}      v made before c
    (a'), (b'), (c')  the same with H_{c,v} in place of P_{c,v}, and (c') of H_{c+1,v} too: v was somewhere, or is made
    (d) memory while τ_{c−1} is first computed, as without a link; Σ M_v H_{c,v} ≤ host_bytes
    (h) need(k) R_{c,k} + Σ M_v T_{c,v} ≤ capacity,     T_{c,v} ≥ S_{c+1,v} − R_{c,p(v)} − P_{c,v}
    (i) H_{c+1,v} ≤ H_{c,v} + X_{c,v} − P_{c,v}
    (j) Σ_v t_d(v) N_{c,v} + G_{c,d} − G_{c+1,d} ≤ D_c  N is X, t the time of a copy out; or P and of one back

Rows (j) added up over any run of coarse stages are the row of that run: the copies of a direction that start in it take
no longer than it lasts, but for what is left of one copy at its end. W, X and P have limits that only plans with a
makespan of more than `ample_ns` exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from remat_ir import Link

from ..array_view import ArrayView, Ids, view_of
from ..backends.engine import Engine
from ..deadline import Deadline, TimeUp, never
from ..incumbent import Incumbent
from ..program import Builder, Floats, Name, Program, Term
from ..staged import relaxation as staged
from ..staged.certificate import Certifier, wanted_ns
from ..staged.relaxation import ONE, ZERO, memory_at_cut, values_of
from ..staged.rows import Recomputations, Round, add_reruns, add_to, needed_to_end, through
from ..staged.scale import WHOLE, balance_of, balanced

_CUTS = (1, 2, 3)
_ROUNDS = 4
"""Linear programs at most for one set of cuts: each adds the rows (h) that the one before broke."""
_MOST_COLUMNS = 60_000
SOURCE = "transfer-bound"


@dataclass(frozen=True, eq=False)
class Columns(staged.Columns):
    """Where the variables are: per coarse stage [ops] R, and [values] S, H, X, P; per coarse stage W; [c, d] G.

    Coarse stage 0 has variables, too.
    """

    hosts: tuple[Ids, ...]
    out: tuple[Ids, ...]
    back: tuple[Ids, ...]
    idle: Ids
    running: Ids


def copy_times(view: ArrayView, link: Link) -> tuple[Ids, Ids]:
    """[m] how long the copies of each value take, out and back, in ns."""
    out = [link.to_host_ns(size) for size in view.graph.value_bytes]
    back = [link.to_device_ns(size) for size in view.graph.value_bytes]
    return np.array(out, np.int64), np.array(back, np.int64)


def ample_ns(view: ArrayView, link: Link) -> int:
    """A makespan that no plan worth having exceeds: eight times each op once and each value out and back, in turn."""
    return 8 * (int(view.cost.sum()) + sum(int(time.sum()) for time in copy_times(view, link)))


@dataclass(frozen=True, eq=False)
class Written(Round):
    """A relaxation's program, where its variables are, and what its rows and columns are called in a certificate."""

    columns: Columns


def relax(
    view: ArrayView,
    link: Link,
    cuts: tuple[int, ...],
    charged: dict[int, set[int]],
    stop: Callable[[], bool] = never,
) -> Written:
    """The program for some cuts, ascending and ending with n − 1.

    `charged`: the recomputations of each coarse stage that have a row (h). Times are in ns, sizes in bytes.
    Where `stop` says so, `TimeUp` is raised.
    """
    builder = Builder(stop)
    times = copy_times(view, link)
    columns = _columns(view, cuts, times, ample_ns(view, link), builder)
    for c in range(columns.stages):
        if c:
            _presence(view, columns, c, builder)
            _memory(view, link, columns, c, builder)
            _recomputations(view, columns, c, charged.get(c, set()), builder)
        _copies(view, columns, c, builder)
        _link_time(view, columns, c, times, builder)
    return Written(builder.program(), columns, builder.names, builder.column_names, ())


def _columns(view: ArrayView, cuts: tuple[int, ...], times: tuple[Ids, Ids], ample: int, builder: Builder) -> Columns:
    first = (0, *(cut + 1 for cut in cuts[:-1]))
    ops, values = np.arange(view.ops), np.arange(view.values)
    runs: list[Ids] = []
    holds: list[Ids] = []
    hosts: list[Ids] = []
    out: list[Ids] = []
    back: list[Ids] = []
    running = np.full((len(cuts) + 1, 2), ZERO)
    for c, (start, cut) in enumerate(zip(first, cuts, strict=True)):
        useful = (ops < start) & (view.op_reach >= start)
        name: Name = ("run", c, c, ops[useful])
        runs.append(builder.variables_at(useful, cost=view.cost[useful], name=name))
        moves = ~view.kept & (view.value_reach >= start)
        before = moves & (view.maker < start)
        hold = builder.variables_at(before, name=("hold", c, values[before]))
        hold[view.kept & (view.maker < start)] = ONE
        holds.append(hold)
        away = before & (view.size > 0)
        hosts.append(builder.variables_at(away, name=("host", c, values[away])))
        moved = moves & (view.maker <= cut) & (view.size > 0)
        for table, time, kind in zip((out, back), times, ("out", "back"), strict=True):
            most, name = ample // np.maximum(1, time[moved]), (kind, c, values[moved])
            table.append(builder.variables_at(moved, upper=most, name=name))
        if c and away.any():
            longest, name = [float(time[away].max()) for time in times], ("running", c, np.arange(2))
            running[c] = builder.variables(2, upper=longest, integer=False, name=name)
    name = ("idle", np.arange(len(cuts)))
    idle = builder.variables(len(cuts), cost=1.0, upper=float(ample), integer=False, name=name)
    count = builder.columns
    return Columns(cuts, first, tuple(runs), tuple(holds), count, tuple(hosts), tuple(out), tuple(back), idle, running)


def _supply(view: ArrayView, columns: Columns, c: int, values: Ids) -> tuple[tuple[Ids, ...], ...]:
    """The columns of R, S and P, and those of R, S and H, of each value."""
    both = columns.runs[c][view.maker[values]], columns.holds[c][values]
    return (*both, columns.back[c][values]), (*both, columns.hosts[c][values])


def _presence(view: ArrayView, columns: Columns, c: int, builder: Builder) -> None:
    """(a), (b), (c), and those of H."""
    start, cut = columns.first[c], columns.cuts[c]
    reader = columns.runs[c][view.edge_op]
    edges = np.flatnonzero((reader >= 0) & (columns.holds[c][view.edge_value] != ONE))
    op, value = view.edge_op[edges], view.edge_value[edges]
    names: tuple[Name, ...] = (("read", c, c, op, value), ("host-read", c, op, value))
    for supplied, name in zip(_supply(view, columns, c, value), names, strict=True):
        builder.add_implied(reader[edges], *supplied, name=name)
    read = np.unique(view.edge_value[view.edge_start[start] : view.edge_start[cut + 1]])
    read = read[(view.maker[read] < start) & (columns.holds[c][read] != ONE)]
    names, rows = (("first", c, c, read), ("host-first", c, read)), np.arange(len(read))
    for supplied, name in zip(_supply(view, columns, c, read), names, strict=True):
        builder.add_rows(len(read), [Term(rows, column) for column in supplied], lower=1.0, name=name)
    # what no op may make again and an op from here on reads is somewhere
    sealed = (view.last_stage[view.maker] < start) & (view.last_reader >= start) & (columns.holds[c] >= 0)
    values = np.flatnonzero(sealed)
    rows = np.arange(len(values))
    terms = [Term(rows, columns.holds[c][values]), Term(rows, columns.hosts[c][values])]
    builder.add_rows(len(values), terms, lower=1.0, name=("host-first", c, values))
    if c + 1 == columns.stages:
        return
    for away, after in enumerate((columns.holds[c + 1], columns.hosts[c + 1])):
        values = np.flatnonzero((after >= 0) & (view.maker < start))
        ways: tuple[Name, ...] = (("stay", c, c, values), ("host-stay", c, values, away))
        for supplied, name in list(zip(_supply(view, columns, c, values), ways, strict=True))[away:]:
            builder.add_implied(after[values], *supplied, name=name)


def _memory(view: ArrayView, link: Link, columns: Columns, c: int, builder: Builder) -> None:
    """(d), on the device and on the host."""
    memory_at_cut(view, columns, c, builder, WHOLE)
    host = columns.hosts[c]
    if link.host_bytes is not None:
        values = np.flatnonzero(host >= 0)
        terms = [Term(0, host[values], view.size[values])]
        builder.add_rows(1, terms, upper=float(link.host_bytes), name=("hosted", c))


def _recomputations(view: ArrayView, columns: Columns, c: int, charged: set[int], builder: Builder) -> None:
    """(h)"""
    if not charged:
        return
    need = needed_to_end(view, columns, c)
    values = np.flatnonzero((need != ZERO) & (columns.holds[c] != ONE))
    brought = columns.runs[c][view.maker[values]], columns.back[c][values]
    column = np.full(view.values, ZERO)
    column[values] = through(c, values, need[values], brought, builder, integer=False)
    column[(columns.holds[c] == ONE) & (view.maker < columns.first[c])] = ONE
    add_reruns(view, columns, c, charged, column, builder, WHOLE)


def _copies(view: ArrayView, columns: Columns, c: int, builder: Builder) -> None:
    """(i); at the end of the plan with 0 on the left."""
    values = np.flatnonzero(columns.back[c] >= 0)
    rows = np.arange(len(values))
    after = columns.hosts[c + 1][values] if c + 1 < columns.stages else np.full(len(values), ZERO)
    terms = [
        Term(rows, after),
        Term(rows, columns.hosts[c][values], -1.0),
        Term(rows, columns.out[c][values], -1.0),
        Term(rows, columns.back[c][values]),
    ]
    builder.add_rows(len(values), terms, upper=0.0, name=("moved", c, values))


def _link_time(view: ArrayView, columns: Columns, c: int, times: tuple[Ids, Ids], builder: Builder) -> None:
    """(j)"""
    start, cut, run = columns.first[c], columns.cuts[c], columns.runs[c]
    again = np.flatnonzero(run >= 0)
    for d, (table, time) in enumerate(zip((columns.out, columns.back), times, strict=True)):
        values = np.flatnonzero(table[c] >= 0)
        terms = [
            Term(0, table[c][values], time[values]),
            Term(0, run[again], -view.cost[again]),
            Term(0, columns.idle[c], -1.0),
            Term(0, columns.running[c, d]),
            Term(0, columns.running[c + 1, d], -1.0),
        ]
        builder.add_rows(1, terms, upper=float(view.cost[start : cut + 1].sum()), name=("carried", c, d))


def violations(view: ArrayView, columns: Columns, x: Floats) -> dict[int, set[int]]:
    """Recomputations of a solution whose row (h) it breaks, for each coarse stage."""
    found: dict[int, set[int]] = {}
    for c in range(1, columns.stages):
        run, back = values_of(columns.runs[c], x), values_of(columns.back[c], x)
        there = np.maximum(0.0, values_of(needed_to_end(view, columns, c), x) - run[view.maker] - back)
        there[(columns.holds[c] == ONE) & (view.maker < columns.first[c])] = 1.0
        total = float(there @ view.size)
        for op in np.flatnonzero(run > 1e-6).tolist():
            own = np.concatenate((view.inputs(op), np.arange(view.value_start[op], view.value_start[op + 1])))
            load = view.need[op] * run[op] + total - float(there[own] @ view.size[own])
            if load > view.capacity * (1 + 1e-3):
                found.setdefault(c, set()).add(op)
    return found


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solved relaxation.

    Attributes:
        bound_ns: what `row_dual`, of the balanced program, proves.
        moved: [values] the most of a value that is on the host when a coarse stage begins, 0 to 1.
    """

    written: Written
    bound_ns: int
    row_dual: Floats
    moved: Floats


def cuts_of(view: ArrayView, count: int) -> tuple[int, ...]:
    """Ops that end coarse stages: where keeping everything takes most memory, and others spread over what is too full.

    Ends with the last op; without any op at which memory is short, it is alone.
    """
    held = view.held_until(np.where(view.kept, view.ops, view.last_reader))
    over = np.flatnonzero(held > view.capacity)
    if not len(over):
        return (view.ops - 1,)
    chosen = {int(np.argmax(held))}
    chosen |= {int(over[(2 * i + 1) * len(over) // (2 * count)]) for i in range(count - 1)}
    return tuple(sorted(chosen | {view.ops - 1}))


def solved(
    engine: Engine,
    view: ArrayView,
    cuts: tuple[int, ...],
    deadline: Deadline,
    *,
    stopped: Callable[[], bool] = never,
) -> Relaxed | None:
    """The linear relaxation for some cuts, with the rows (h) that its solutions break; None if time is up before."""
    link = view.graph.link
    assert link is not None
    charged: Recomputations = {}
    best: Relaxed | None = None
    for _ in range(_ROUNDS):
        try:
            written = relax(view, link, cuts, charged, lambda: deadline.passed() or stopped())
        except TimeUp:
            break
        program, columns = written.program, written.columns
        if program.columns > _MOST_COLUMNS:
            break
        found = engine.lp(balanced(program), deadline=deadline, stopped=stopped)
        if found.x is None or found.row_dual is None:
            break
        bound = proved_ns(view, link, program, found.row_dual)
        if best is None or bound >= best.bound_ns:
            best = Relaxed(written, bound, found.row_dual, _moved(view, columns, found.x))
        if not add_to(charged, violations(view, columns, found.x)) or deadline.passed():
            break
    return best


def proved_ns(view: ArrayView, link: Link, program: Program, row_dual: Floats) -> int:
    """What the duals of the balanced program prove in ns, by weak duality whatever they are; at most `ample_ns`."""
    total, added_ns = int(view.cost.sum()), balanced(program).dual_bound(row_dual) / balance_of(program)
    if not math.isfinite(added_ns):
        return total
    bound = total + max(0, math.ceil(added_ns - 1e-9 * (1.0 + abs(added_ns))))
    return min(bound, ample_ns(view, link))


def _moved(view: ArrayView, columns: Columns, x: Floats) -> Floats:
    moved = np.zeros(view.values)
    for table in (*columns.hosts, *columns.back):
        there = table >= 0
        moved[there] = np.maximum(moved[there], np.minimum(1.0, x[table[there]]))
    return moved


def prove(incumbent: Incumbent, deadline: Deadline, memory_bytes: int = 0) -> Iterator[Relaxed]:
    """Raise the incumbent's bound by linear relaxations with ever more cuts; yields each.

    `memory_bytes` is what the engine may use, as in `Engine`.
    """
    view = view_of(incumbent.problem)
    certifier = Certifier(incumbent.problem) if incumbent.certifies else None
    with Engine("highs", memory_bytes=memory_bytes) as engine:
        for cuts in dict.fromkeys(cuts_of(view, count) for count in _CUTS):
            if deadline.passed() or incumbent.stopped():
                continue
            relaxed = solved(engine, view, cuts, deadline, stopped=incumbent.stopped)
            if relaxed is None:
                break
            bound = relaxed.bound_ns
            if certifier is None:
                incumbent.raise_bound(bound, SOURCE)
            elif bound > incumbent.bound_ns:
                wanted = wanted_ns(incumbent, bound)
                found = certifier.of_linear(relaxed.written, WHOLE, relaxed.row_dual, bound, wanted)
                if found is not None and found.bound_ns is not None:
                    incumbent.raise_bound(found.bound_ns, SOURCE, proof=found.proof)
            yield relaxed
