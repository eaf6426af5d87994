"""Certificates with one thing changed: none proves more than brute force finds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from remat_ir import Problem, plain_peak
from remat_ir.graph import working_set
from remat_ir.proof import Branch, InvalidProof, Leaf, StageProof, check, prove
from remat_ir.proof.check import KIND
from remat_ir.proof.rows import CHEAPER, Relaxation
from remat_ir.proof.transfers import LINK_KINDS
from solver.brute import optimum
from solver.little import little_graph
from solver.proof_rows import every_row, laminar, proof_of, random_covers, random_limits, relaxation, with_roundings

MUTATIONS = (
    "dual", "sign", "cut", "dropped", "row", "rounding", "rounding", "denominator", "empty", "other", "branch", "span",
    "tree",
)  # fmt: skip


def mutant(proof: StageProof, other: StageProof, rng: random.Random) -> StageProof:
    """A certificate with one thing changed, as an error or an attacker might."""
    nodes, rows, cuts = list(proof.nodes), list(proof.rows), list(proof.cuts)
    leaves = [i for i, node in enumerate(nodes) if isinstance(node, Leaf)]
    at = rng.choice(leaves)
    leaf = nodes[at]
    assert isinstance(leaf, Leaf)
    kind = rng.choice(MUTATIONS)
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
        kinds = (*sorted(LINK_KINDS), CHEAPER, KIND)
        changed[j] = rng.choice(kinds) if isinstance(old, str) else old + rng.choice((-1, 1, 1 - 2 * old))
        rows[i] = tuple(changed)
    elif kind == "rounding":
        rounded = [i for i, row in enumerate(rows) if row[0] == KIND]
        if rounded:
            i = rng.choice(rounded)
            numbers = list(rows[i])
            for _ in range(rng.randint(1, 3)):
                j = rng.randrange(1, len(numbers))
                numbers[j] = rng.choice((0, 1, 2, -1, int(numbers[j]) * 1000, int(numbers[j]) - 1, rng.randrange(50)))
            rows[i] = tuple(numbers)
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
        limits = random_limits(on, rng)
        rows = with_roundings(on, every_row(on, [*random_covers(on, rng), *limits]), rng)
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
            assert least is None or (bound is not None and bound <= least), (seed, changed)
        previous = proof
    return made, accepted


MANY = (pytest.mark.slow, pytest.mark.timeout(3000))


@pytest.mark.parametrize(("seeds", "mutants"), [(range(60), 30), pytest.param(range(1000, 3000), 50, marks=MANY)])
def test_no_mutant_proves_too_much(seeds: range, mutants: int) -> None:
    """Of thousands, and of a hundred thousand."""
    made, accepted = attack(seeds, mutants)
    assert made == len(seeds) * mutants
    assert accepted > 100  # a weaker certificate is still one


@pytest.mark.parametrize("where", ["rounding", "check"])
def test_a_checker_that_forgets_which_plans_a_row_holds_for_is_caught(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of a rounded row lost, or that of all rows of a leaf, some certificate is above the optimum."""
    if where == "rounding":
        made = check.rounded
        monkeypatch.setattr(check, "rounded", lambda *given: made(*given)._replace(extra_ns=None))
    else:
        row = Relaxation.inequality
        monkeypatch.setattr(Relaxation, "inequality", lambda on, name: row(on, name)._replace(extra_ns=None))
    with pytest.raises(AssertionError):
        attack(range(300), 1)
