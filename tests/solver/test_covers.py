"""Lifted covers: they hold for all that fits, no weight could be greater, and certificates made of them are checked."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Problem, budget_at
from remat_ir.greedy import greedy_plan
from remat_ir.proof import InvalidProof, StageProof, prove
from remat_solver.backends.engine import Engine
from remat_solver.backends.highs_cuts import lifted_cover
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.staged.prove import Proof


def most_of(weight: list[int], room: int, alpha: dict[int, int]) -> int:
    """The most that the weights of what fits add up to, by all subsets."""
    return max(
        sum(alpha.get(i, 0) for i, chosen in enumerate(subset) if chosen)
        for subset in product((0, 1), repeat=len(weight))
        if sum(a for a, chosen in zip(weight, subset, strict=True) if chosen) <= room
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_what_fits_is_within_a_lifted_cover_and_no_weight_could_be_greater(data: st.DataObject) -> None:
    weight = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    room = data.draw(st.integers(0, 40))
    x = data.draw(st.lists(st.sampled_from((0.0, 0.3, 0.7, 1.0)), min_size=len(weight), max_size=len(weight)))
    made = lifted_cover(weight, room, x)
    if made is None:
        assert sum(a for a, there in zip(weight, x, strict=True) if there) <= room
        return
    alpha, most = made
    assert most_of(weight, room, alpha) <= most
    for i, a in enumerate(weight):
        if a <= room:
            assert most_of(weight, room, {**alpha, i: alpha.get(i, 0) + 1}) > most


def test_a_certificate_of_lifted_covers_is_checked_weight_by_weight() -> None:
    graph = instance("unet-2-whole")
    problem = Problem(graph, budget_at(graph, 0.5))
    incumbent = Incumbent(problem, Deadline(120), 0.0, certify=True)
    plan = greedy_plan(problem.graph, problem.budget_bytes)
    assert plan is not None
    incumbent.offer(plan, "greedy")
    proof = Proof(incumbent)
    with Engine("highs") as engine:
        proof._linear(engine)
        proof._grow(engine, 1e-3)
    certificate = incumbent.known.proof
    assert isinstance(certificate, StageProof)
    covers = [r for r, row in enumerate(certificate.rows) if row[0] == "cover"]
    assert covers
    assert prove(problem, certificate).bound_ns == incumbent.bound_ns
    row = certificate.rows[covers[0]]
    tighter = (*row[:2], int(row[2]) - 1, *row[3:])
    rows = (*certificate.rows[: covers[0]], tighter, *certificate.rows[covers[0] + 1 :])
    with pytest.raises(InvalidProof):
        prove(problem, replace(certificate, rows=rows))
