"""Certificates against brute force: rows hold for every plan, bounds for every optimum, and no mutant proves more."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from remat_ir import Compute, Free, Graph, InvalidData, Plan, Problem, plain_peak, problem_digest, verify
from remat_ir.proof import Branch, InvalidProof, Leaf, PairProof, StageProof, carried, prove, read_proof
from remat_ir.proof.certificate import Column, Row
from remat_ir.proof.pairs import PairCheck
from remat_ir.proof.rows import KINDS, Relaxation
from remat_ir.working_set import working_set
from solver.brute import optimum
from solver.little import little_graph, problems
from solver.proof_rows import Struck, cost_of, every_row, laminar, relaxation


@st.composite
def relaxed(draw: st.DrawFn, most_ops: int = 6) -> tuple[Problem, Relaxation, list[Row]]:
    """A small problem with some cuts and spans, and every row there is, with random covers."""
    problem = draw(problems(most_ops))
    graph = problem.graph
    cuts = tuple(sorted({*draw(st.sets(st.integers(0, graph.ops - 1))), graph.ops - 1}))
    splits = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    on = relaxation(problem, cuts, laminar(cuts, splits))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return problem, on, every_row(on, random_covers(on, rng))


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


def any_plan(problem: Problem, seed: int) -> Plan | None:
    """A plan by random steps, with recomputations and holdings that nothing needs; None where it gets stuck."""
    graph, rng = problem.graph, random.Random(seed)
    pinned = {*graph.once, *(graph.value_op[v] for v in graph.keep)}
    resident: set[int] = set()
    steps: list[Compute | Free] = []
    done = 0
    for _ in range(60 * graph.ops):
        if done == graph.ops:
            break
        able = [op for op in range(done + 1) if op == done or op not in pinned]
        op = done if rng.random() < 0.4 else rng.choice(able)
        free = [v for v in resident if v not in graph.keep and v not in graph.op_inputs[op]]
        for value in free:
            if rng.random() < 0.25 or (op == done and graph.value_op[value] == op):
                resident.remove(value)
                steps.append(Free(value))
        always = graph.op_always[op]
        if any(v not in resident for v in graph.op_inputs[op]) or any(v in resident for v in always):
            continue
        optional = [v for v in graph.op_values[op] if v not in always and v not in resident and rng.random() < 0.7]
        made = tuple(sorted((*always, *optional)))
        during = graph.fixed_bytes + graph.op_workspace_bytes[op]
        during += sum(graph.value_bytes[v] for v in (*resident, *made))
        if during > problem.budget_bytes:
            continue
        steps.append(Compute(op, made))
        resident |= set(made)
        done = max(done, op + 1)
    return Plan(tuple(steps)) if done == graph.ops else None


@settings(max_examples=400, deadline=None)
@given(relaxed(), st.integers(0, 2**32))
def test_one_point_satisfies_all_rows_and_costs_no_more(
    drawn: tuple[Problem, Relaxation, list[Row]], seed: int
) -> None:
    problem, on, rows = drawn
    for plan in (any_plan(problem, seed), optimum(problem).plan):
        if plan is None:
            continue
        struck = Struck(problem.graph, plan)
        assert cost_of(problem.graph, struck.order) <= verify(problem, plan).cost_ns
        charged = {
            ("run", c, c, op): struck.at(on, ("run", c, c, op))
            for c in range(1, on.stages)
            for op in range(on.first[c])
        }
        paid = sum(problem.graph.op_cost_ns[int(column[3])] for column, there in charged.items() if there)
        assert problem.graph.total_cost_ns + paid <= cost_of(problem.graph, struck.order)
        for c in range(1, on.stages):  # what is taken to be certain is so
            for op in range(on.first[c]):
                if isinstance(on.run(c, c, op), int):
                    assert struck.at(on, ("run", c, c, op)) == 0
            for value in range(problem.graph.values):
                if problem.graph.value_op[value] < on.first[c] and isinstance(certain := on.hold(c, value), int):
                    assert struck.at(on, ("hold", c, value)) == certain
        for row in rows:
            made = on.inequality(row)
            assert sum(a * struck.at(on, column) for column, a in made.terms.items()) <= made.most, row


def program_of(on: Relaxation, rows: list[Row]) -> tuple[list[Column], np.ndarray, np.ndarray, np.ndarray]:
    made = [on.inequality(row) for row in rows]
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
        bounds = [(box.get(c, 0), box.get(c, 1)) for c in columns]
        if not columns:
            infeasible = [r for r in range(len(rows)) if most[r] < 0]
            return (Leaf(((infeasible[0], 1),), True),) if infeasible else (Leaf(()),)
        found = linprog(cost, A_ub=matrix, b_ub=most, bounds=bounds)
        if found.status == 2:
            # the least violation: its duals prove that there is some
            slack = np.hstack([matrix, -np.ones((len(rows), 1))])
            least = linprog([0.0] * len(columns) + [1.0], A_ub=slack, b_ub=most, bounds=[*bounds, (0, None)])
            return (Leaf(rounded(-least.ineqlin.marginals, denominator), True),)
        part = np.abs(found.x - 0.5)
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
    return StageProof(problem_digest(problem), on.cuts, spans, tuple(rows), 1 << 20, nodes)


@settings(max_examples=150, deadline=None)
@given(relaxed(5), st.integers(0, 6))
def test_no_certificate_is_above_the_optimum(drawn: tuple[Problem, Relaxation, list[Row]], depth: int) -> None:
    problem, on, rows = drawn
    proof = proof_of(problem, on, rows, depth)
    try:
        bound = prove(problem, proof).bound_ns
    except InvalidProof:
        assert any(isinstance(node, Leaf) and node.empty for node in proof.nodes)  # rounding may lose a proof
        return
    least = optimum(problem).cost_ns
    if bound is None:
        assert least is None
    elif least is not None:
        assert bound <= least
    assert read_proof(proof.to_json()) == proof


def test_certificates_reach_the_optimum_of_most_small_problems() -> None:
    reached = total = 0
    for seed in range(60):
        graph = little_graph(seed, 6)
        budget = graph.fixed_bytes + 9 + seed % 8
        problem = Problem(graph, budget)
        on = relaxation(problem, tuple(range(graph.ops)), ())
        proof = proof_of(problem, on, every_row(on), 30)
        least = optimum(problem).cost_ns
        try:
            proved = prove(problem, proof).bound_ns
        except InvalidProof:
            proved = graph.total_cost_ns
        assert least is None or (proved is not None and proved <= least)
        total += 1
        reached += proved == least
    assert reached >= 0.6 * total, f"{reached} of {total}"


MUTATIONS = ("dual", "sign", "cut", "dropped", "row", "denominator", "empty", "other", "branch", "span", "tree")


def mutant(proof: StageProof, other: StageProof, rng: random.Random) -> StageProof:
    """A certificate with one thing changed, as an error or an attacker might."""
    nodes, rows, cuts = list(proof.nodes), list(proof.rows), list(proof.cuts)
    leaves = [i for i, node in enumerate(nodes) if isinstance(node, Leaf)]
    at = rng.choice(leaves)
    leaf = nodes[at]
    assert isinstance(leaf, Leaf)
    kind = rng.choice(
        ("dual", "sign", "cut", "dropped", "row", "denominator", "empty", "other", "branch", "span", "tree")
    )
    if kind in ("dual", "sign") and leaf.duals:
        duals = list(leaf.duals)
        i = rng.randrange(len(duals))
        r, y = duals[i]
        more = rng.choice((2 * y, y * 1000, y + 1, max(0, y - 1), 0, 1 << 40))
        duals[i] = (rng.choice((r, rng.randrange(len(rows)))), -y if kind == "sign" else more)
        nodes[at] = leaf._replace(duals=tuple(duals))
    elif kind == "cut" and cuts:
        i = rng.randrange(len(cuts))
        cuts[i] = rng.choice((cuts[i] - 1, cuts[i] + 1, 0))
    elif kind == "dropped":
        del nodes[at]
    elif kind == "row" and rows:
        i = rng.randrange(len(rows))
        changed = list(rows[i])
        j = rng.randrange(len(changed))
        old = changed[j]
        changed[j] = rng.choice(sorted(KINDS)) if isinstance(old, str) else max(0, old + rng.choice((-1, 1)))
        rows[i] = tuple(changed)
    elif kind == "denominator":
        return replace(proof, denominator=rng.choice((1, proof.denominator // 2, -1, 0)))
    elif kind == "empty":
        nodes[at] = leaf._replace(empty=not leaf.empty)
    elif kind == "other":
        return replace(other, digest=rng.choice((proof.digest, other.digest)))
    elif kind == "branch":
        branches = [i for i, node in enumerate(nodes) if isinstance(node, Branch)]
        if branches:
            i = rng.choice(branches)
            nodes[i] = rng.choice((Branch(nodes[rng.choice(branches)].column), Branch(("hold", 1, 0)), leaf))
    elif kind == "span":
        return replace(proof, spans=(*proof.spans, (rng.randint(0, 3), rng.randint(0, 4))))
    else:
        rng.shuffle(nodes)
    return replace(proof, nodes=tuple(nodes), rows=tuple(rows), cuts=tuple(cuts))


def attack(seeds: range, mutants: int) -> tuple[int, int]:
    """How many mutants were made and how many are still certificates; asserts that none proves too much."""
    made = accepted = 0
    previous: StageProof | None = None
    for seed in seeds:
        rng = random.Random(seed)
        graph = little_graph(seed, 3 + seed % 4)
        low, high = working_set(graph).least_bytes - 1, plain_peak(graph)
        problem = Problem(graph, max(0, rng.randint(low, max(low, high))))
        cuts = tuple(sorted({*rng.sample(range(graph.ops), rng.randint(0, graph.ops)), graph.ops - 1}))
        on = relaxation(problem, cuts, laminar(cuts, [rng.randrange(9) for _ in range(4)]))
        rows = every_row(on, random_covers(on, rng))
        proof = proof_of(problem, on, rows, rng.randint(0, 5))
        least = optimum(problem).cost_ns
        for _ in range(mutants):
            changed = mutant(proof, previous or proof, rng)
            made += 1
            try:
                bound = prove(problem, changed).bound_ns
            except InvalidProof:
                continue
            accepted += 1
            assert (bound is None and least is None) or bound is not None, (seed, changed)
            assert least is None or bound is None or bound <= least, (seed, changed)
        previous = proof
    return made, accepted


def test_no_mutant_proves_too_much() -> None:
    made, accepted = attack(range(60), 30)
    assert made == 1800
    assert accepted > 100  # a weaker certificate is still one


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_mutant_of_a_hundred_thousand_proves_too_much() -> None:
    made, _ = attack(range(1000, 3000), 50)
    assert made == 100_000


@settings(max_examples=100, deadline=None)
@given(relaxed(5), st.integers(0, 4), st.integers(-6, 6), st.integers(0, 2**32))
def test_a_carried_certificate_holds_and_is_no_weaker_at_smaller_budgets(
    drawn: tuple[Problem, Relaxation, list[Row]], depth: int, more: int, seed: int
) -> None:
    problem, on, rows = drawn
    proof = proof_of(problem, on, rows, depth)
    rng = random.Random(seed)
    costs = tuple(rng.randint(0, 2 * cost + 1) for cost in problem.graph.op_cost_ns)
    budget = max(0, problem.budget_bytes + more)
    for graph in (problem.graph, replace(problem.graph, op_cost_ns=costs)):
        target = Problem(graph, budget)
        moved = carried(proof, target)
        try:
            bound = prove(target, moved).bound_ns
        except InvalidProof:
            continue
        least = optimum(target).cost_ns
        assert bound is not None or least is None
        assert least is None or bound is None or bound <= least
        if graph is problem.graph and more <= 0:
            before = prove(problem, proof).bound_ns if not any_empty_fails(problem, proof) else None
            assert bound is None or before is None or bound >= before - 1  # scaling rounds multipliers


def any_empty_fails(problem: Problem, proof: StageProof) -> bool:
    try:
        return prove(problem, proof).bound_ns is None
    except InvalidProof:
        return True


def pair_proof(problem: Problem) -> PairProof | None:
    """By brute force over sets of pairs: the largest consistent one, and an op that it makes impossible."""
    graph = problem.graph
    never = {(u, v) for u in range(graph.values) for v in range(u, graph.values)}
    for _ in range(len(never) + 1):
        good = {pair for pair in never if holds(problem, PairProof("", 0, tuple(sorted(never))), pair)}
        if good == never:
            break
        never = good
    for op in range(graph.ops):
        proof = PairProof(problem_digest(problem), op, tuple(sorted(never)))
        try:
            prove(problem, proof)
        except InvalidProof:
            continue
        return proof
    return None


def holds(problem: Problem, proof: PairProof, pair: tuple[int, int]) -> bool:
    """Whether one pair follows from all of them, told by the checker's own complaint about others."""
    return PairCheck(problem.graph, problem.budget_bytes - problem.graph.fixed_bytes, proof).apart(*pair)


def test_pairs_prove_only_what_brute_force_confirms() -> None:
    proved = 0
    for seed in range(150):
        graph = little_graph(seed, 3 + seed % 4)
        for budget in range(graph.fixed_bytes + 1, graph.fixed_bytes + 16, 3):
            problem = Problem(graph, budget)
            proof = pair_proof(problem)
            if proof is not None:
                proved += 1
                assert optimum(problem).cost_ns is None
    assert proved > 100


def test_pairs_with_one_too_many_are_refused() -> None:
    refused = 0
    for seed in range(40):
        graph = little_graph(seed, 5)
        problem = Problem(graph, graph.fixed_bytes + 14)
        if optimum(problem).cost_ns is None:
            continue
        every = [(u, v) for u in range(graph.values) for v in range(u, graph.values)]
        for count in (1, 2, 3):
            for pairs in list(combinations(every, count))[:60]:
                for op in range(graph.ops):
                    with pytest.raises(InvalidProof):
                        prove(problem, PairProof(problem_digest(problem), op, pairs))
                    refused += 1
    assert refused > 1000


def test_a_certificate_is_for_its_problem_alone() -> None:
    problem = Problem(Graph((1, 2), ((), (0,)), (0, 1), (3, 4)), 9)
    proof = StageProof(problem_digest(problem), (1,), (), (), 1, (Leaf(()),))
    assert prove(problem, proof).bound_ns == 3
    with pytest.raises(InvalidProof, match="another problem"):
        prove(Problem(problem.graph, 8), proof)


@pytest.mark.parametrize("multiplier", [-1, 0])
def test_multipliers_are_positive(multiplier: int) -> None:
    graph = Graph((1, 2), ((), (0,)), (0, 1), (3, 4))
    proof = StageProof(problem_digest(Problem(graph, 90)), (0, 1), (), (("memory", 1),), 1, (Leaf(((0, multiplier),)),))
    with pytest.raises(InvalidProof, match="positive"):
        prove(Problem(graph, 90), proof)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "remat-proof/2"),
        ("by", "magic"),
        ("problem", "x"),
        ("cuts", [0.5]),
        ("spans", [[1]]),
        ("rows", [[1, 2]]),
        ("rows", [["read", -1]]),
        ("rows", [["read", True]]),
        ("denominator", 0),
        ("nodes", [["bound", [1]]]),
        ("nodes", [["leaf", []]]),
        ("extra", 1),
    ],
)
def test_malformed_certificates_are_refused(path: str, value: object) -> None:
    data = StageProof("0" * 64, (1,), (), (("memory", 1),), 1, (Leaf(((0, 1),)),)).to_json()
    assert read_proof(data)
    with pytest.raises(InvalidData):
        read_proof({**data, path: value})
    assert math.isfinite(len(str(data)))
