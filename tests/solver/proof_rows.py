"""Every row that a certificate can name, and the point that a plan without useless steps maps to, for small graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog

from remat_ir import Compute, Graph, Plan, Problem, problem_digest
from remat_ir.proof import Branch, Leaf, StageProof
from remat_ir.proof.certificate import Column, Row
from remat_ir.proof.check import KIND, Rounding, inequality, relaxation_of, summed
from remat_ir.proof.rows import Inequality, InvalidProof, Relaxation
from solver.little import problems


def every_row(on: Relaxation, covers: Sequence[Row] = ()) -> list[Row]:
    """The rows of all kinds that exist for these cuts and spans: each combination of indices is tried."""
    graph, found = on.graph, []
    intervals = [(a, b) for a in range(1, on.stages) for b in range(a, on.stages)]
    for a, b in intervals:
        for value in range(graph.values):
            found += [("first", a, b, value), ("stay", a, b, value)]
        for op in range(graph.ops):
            found.append(("or", a, b, op))
            found += [("read", a, b, op, value) for value in graph.op_inputs[op]]
            found += [("part", a, b, c, d, op) for c, d in intervals]
    for c in range(1, on.stages):
        found.append(("memory", c))
        found += [("through", c, value) for value in range(graph.values)]
        found += [("rerun", c, op) for op in range(graph.ops)]
    if graph.link is not None:
        found += link_rows(on)
    good = []
    for row in (*found, *covers):
        try:
            on.inequality(row)
        except InvalidProof:
            continue
        good.append(row)
    assert {row[0] for row in good} <= set(on.kinds)
    return good


def link_rows(on: Relaxation) -> Iterator[Row]:
    """Those that there are only with a link."""
    graph = on.graph
    for c in range(on.stages):
        yield from (("carried", c, direction) for direction in (0, 1))
        yield ("hosted", c)
        for value in range(graph.values):
            yield from (("moved", c, value), ("host-first", c, value))
            yield from (("host-stay", c, value, away) for away in (0, 1))
            yield from (("host-read", c, op, value) for op in graph.users[value])


def written(on: Relaxation, rows: Sequence[Row]) -> list[Inequality]:
    """Rows as the checker reads them, each from those before it."""
    made: list[Inequality] = []
    for row in rows:
        made.append(inequality(on, made, row))
    return made


def with_roundings(on: Relaxation, rows: list[Row], rng: random.Random, count: int = 25) -> list[Row]:
    """Rows, and rows that are rounded from random sums of them and of each other."""
    found, made = list(rows), written(on, rows)
    for _ in range(count if rows else 0):
        chosen = rng.sample(range(len(found)), min(len(found), rng.randint(1, 5)))
        split = rng.randint(0, len(chosen))
        pairs = [(r, rng.choice((1, 1, 1, 2, 3, 7))) for r in chosen]
        rounding = Rounding(
            rng.choice((1, 2, 2, 3, 4, 5, 8, 13)),
            rng.choice((1, 1, 1, 2, 5)),
            0,
            (),
            tuple(pairs[:split]),
            tuple(pairs[split:]),
        )
        total = summed(on, made, rounding)
        columns = [j for j, column in enumerate(total.columns()) if on.upper(column) == 1]
        high = tuple(sorted(rng.sample(columns, rng.randint(0, len(columns)))))
        row = rounding._replace(complemented=high, most=total.most + rng.choice((0, 0, 0, 1, 4))).row()
        made.append(inequality(on, made, row))
        found.append(row)
    return found


class Struck:
    """A plan without its useless computations and holdings, computation by computation.

    `order` are the ops that run; `resident[p]` are the values that are resident right after computation p and read
    later or kept; `stage[p]` is the op whose first computation ends the stage of p.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        computes = [step for step in plan.steps if isinstance(step, Compute)]
        order = [step.op for step in computes]
        sources: list[list[int]] = []  # position -> positions that made what it reads
        current: dict[int, int] = {}
        for p, op in enumerate(order):
            sources.append([current[v] for v in graph.op_inputs[op]])
            kept = graph.op_always[op] if computes[p].kept is None else computes[p].kept
            current |= dict.fromkeys(kept, p)
        useful = {order.index(op) for op in range(graph.ops)}
        for p in range(len(order) - 1, -1, -1):
            if p in useful:
                useful |= set(sources[p])
        self.order = [op for p, op in enumerate(order) if p in useful]
        reached = -1
        self.stage = []
        for op in self.order:
            reached = max(reached, op)
            self.stage.append(reached if op == reached and op not in self.order[: len(self.stage)] else reached + 1)
        self.resident: list[set[int]] = [set() for _ in self.order]
        made: dict[int, int] = {}
        for p, op in enumerate(self.order):
            for value in graph.op_inputs[op]:
                for q in range(made[value], p):
                    self.resident[q].add(value)
            made |= dict.fromkeys(graph.op_values[op], p)
        for value in graph.keep:
            for q in range(made[value], len(self.order)):
                self.resident[q].add(value)

    def within(self, on: Relaxation, a: int, b: int) -> list[int]:
        """The positions of coarse stages a … b."""
        return [p for p, stage in enumerate(self.stage) if on.first[a] <= stage <= on.cuts[b]]

    def at(self, on: Relaxation, column: Column) -> int:
        """What a column is for this plan."""
        kind, *rest = column
        numbers = [int(number) for number in rest]
        if kind == "run":
            a, b, op = numbers
            return int(any(self.order[p] == op for p in self.within(on, a, b)))
        c, value = numbers
        if kind == "hold":
            return int(value in self.resident[self.order.index(on.cuts[c - 1])])
        here = self.within(on, c, c)
        made = any(self.order[p] == on.graph.value_op[value] for p in here)
        late = value in self.resident[here[-1]] or value in on.graph.op_inputs[on.cuts[c]]
        return int(late and not made)


def cost_of(graph: Graph, order: Sequence[int]) -> int:
    """ns of a sequence of computations."""
    return sum(graph.op_cost_ns[op] for op in order)


def laminar(cuts: Sequence[int], splits: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Spans as repeated cutting leaves them: any two nested or apart; `splits` choose which are there."""
    found: set[tuple[int, int]] = set()

    def divide(a: int, b: int) -> Iterator[tuple[int, int]]:
        if a < b:
            yield a, b
            middle = a + splits[(a + 3 * b) % len(splits)] % (b - a)
            yield from divide(a, middle)
            yield from divide(middle + 1, b)

    if len(cuts) > 2:
        found |= set(divide(1, len(cuts) - 1))
    return tuple(sorted(span for i, span in enumerate(sorted(found)) if splits[i % len(splits)] % 3))


def relaxation(problem: Problem, cuts: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Relaxation:
    """The checker's relaxation of a problem."""
    return relaxation_of(problem.graph, problem.budget_bytes - problem.graph.fixed_bytes, cuts, spans)


@st.composite
def relaxed(draw: st.DrawFn, most_ops: int = 6) -> tuple[Problem, Relaxation, list[Row]]:
    """A small problem with some cuts and spans, and every row there is, with random covers."""
    problem = draw(problems(most_ops))
    graph = problem.graph
    cuts = tuple(sorted({*draw(st.sets(st.integers(0, graph.ops - 1))), graph.ops - 1}))
    splits = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    on = relaxation(problem, cuts, laminar(cuts, splits))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return problem, on, with_roundings(on, every_row(on, [*random_covers(on, rng), *random_limits(on, rng)]), rng)


def random_limits(on: Relaxation, rng: random.Random) -> list[Row]:
    """Rows of plans that cost less than something, and of none."""
    total = on.graph.total_cost_ns
    return [("cheaper", rng.randint(-1, 2 * total + 1)) for _ in range(rng.choice((0, 0, 1, 2)))]


def random_covers(on: Relaxation, rng: random.Random) -> list[Row]:
    """Sets of values with weights and limits; those that do not hold are refused by the checker."""
    found: list[Row] = []
    for c in range(1, on.stages):
        values = [v for v in range(on.graph.values) if on.is_column(("hold", c, v))]
        for _ in range(6 if values else 0):
            chosen = rng.sample(values, rng.randint(1, len(values)))
            weights = [rng.choice((1, 1, 1, 2, 3)) for _ in chosen]
            most = rng.randint(0, max(0, sum(weights) - 1))
            found.append(("cover", c, most, *(n for pair in zip(chosen, weights, strict=True) for n in pair)))
    return found


def program_of(on: Relaxation, rows: list[Row]) -> tuple[list[Column], np.ndarray, np.ndarray, np.ndarray]:
    made = written(on, rows)
    columns = sorted({column for one in made for column in one.terms})
    place = {column: j for j, column in enumerate(columns)}
    matrix, most = np.zeros((len(made), len(columns))), np.array([float(one.most) for one in made])
    for r, one in enumerate(made):
        for column, a in one.terms.items():
            matrix[r, place[column]] = a
    return columns, np.array([float(on.cost(column)) for column in columns]), matrix, most


def tree_of(on: Relaxation, rows: list[Row], depth: int, denominator: int = 1 << 20) -> tuple[Branch | Leaf, ...]:
    """A tree that branches on what is most fractional, its leaves with rounded duals of linear programs."""
    columns, cost, matrix, most = program_of(on, rows)

    def grow(box: dict[Column, int], left: int) -> tuple[Branch | Leaf, ...]:
        bounds = [(box.get(c, 0), box.get(c, on.upper(c))) for c in columns]
        if not columns:
            infeasible = [r for r in range(len(rows)) if most[r] < 0]
            return (Leaf(((infeasible[0], 1),), True),) if infeasible else (Leaf(()),)
        found = linprog(cost, A_ub=matrix, b_ub=most, bounds=bounds)
        if found.status == 2:
            # the least violation: its duals prove that there is some
            slack = np.hstack([matrix, -np.ones((len(rows), 1))])
            least = linprog([0.0] * len(columns) + [1.0], A_ub=slack, b_ub=most, bounds=[*bounds, (0, None)])
            return (Leaf(rounded(-least.ineqlin.marginals, denominator), True),)
        part = np.where([on.is_column(c) for c in columns], np.abs(found.x - 0.5), 1.0)
        j = int(part.argmin())
        if left and part[j] < 0.499 and columns[j] not in box:
            branch = (Branch(columns[j]),)
            return branch + grow({**box, columns[j]: 0}, left - 1) + grow({**box, columns[j]: 1}, left - 1)
        return (Leaf(rounded(-found.ineqlin.marginals, denominator)),)

    return grow({}, depth)


def rounded(duals: np.ndarray, denominator: int) -> tuple[tuple[int, int], ...]:
    return tuple((r, round(y * denominator)) for r, y in enumerate(duals) if round(y * denominator) > 0)


def proof_of(problem: Problem, on: Relaxation, rows: list[Row], depth: int) -> StageProof:
    spans = tuple((a, b) for a, ends in sorted(on._ends.items()) for b in ends if a < b)
    nodes = tree_of(on, rows, depth)
    if depth % 2:  # a second tree, of what holds for all plans
        plain = [r for r, row in enumerate(rows) if row[0] not in ("cheaper", KIND)]
        for node in tree_of(on, [rows[r] for r in plain], 1):
            again = tuple((plain[r], y) for r, y in node.duals) if isinstance(node, Leaf) else ()
            nodes += (node._replace(duals=again) if isinstance(node, Leaf) else node,)
    return StageProof(problem_digest(problem), on.cuts, spans, tuple(rows), 1 << 20, nodes)
