"""Plans come back from what a subject is taken as: verified on the subject itself, no worse than there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import linear_graphs, sequences
from remat_ir import Chain, Graph, Join, Problem, Subject, plain_peak, plan_of, verify
from remat_ir.subject import plain_plan_of
from remat_solver.chain import LinearNetwork
from remat_solver.join import Homogenized, JoinTable
from remat_solver.lift import Lift
from remat_solver.reduction import Reduction
from solver.little import little_graph

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
ROOMY = 2**50
REDUCTIONS: tuple[type[Reduction[Any]], ...] = (Lift, LinearNetwork, Homogenized)


@SETTINGS
@given(chain=chains(most_stages=6), data=st.data())
def test_plans_of_the_lift_are_plans_of_the_chain(chain: Chain, data: st.DataObject) -> None:
    taken = Lift.apply(chain)
    assert taken is not None
    graph = taken.graph
    plan = plan_of(graph, data.draw(sequences(graph)))
    there, here = verify(Problem(graph, ROOMY), plan), verify(Problem(chain, ROOMY), taken.invert(plan))
    assert here.cost_ns <= there.cost_ns
    assert here.peak_bytes <= there.peak_bytes
    plain = taken.lift(plain_plan_of(chain))
    assert plain is not None
    assert verify(Problem(graph, ROOMY), plain) == verify(Problem(chain, ROOMY), plain_plan_of(chain))


@SETTINGS
@given(graph=linear_graphs(most_layers=8), data=st.data())
def test_sequences_of_stages_are_plans_of_a_linear_network(graph: Graph, data: st.DataObject) -> None:
    taken = LinearNetwork.apply(graph)
    if taken is not None:
        sequence = data.draw(sequences(graph))
        verdict = verify(Problem(graph, ROOMY), taken.invert(sequence))
        assert graph.total_cost_ns <= verdict.cost_ns <= sum(graph.op_cost_ns[op] for op in sequence)


@pytest.mark.parametrize("lengths", [(2, 3), (2, 2, 3), (4, 4)])
def test_plans_of_the_join_are_plans_of_the_branches(lengths: tuple[int, ...]) -> None:
    graph = Join(lengths, 10, 20, 5, slots=1, slot_bytes=1).to_graph()
    taken = Homogenized.apply(graph)
    assert taken is not None
    assert taken.within is None
    table = JoinTable(lengths, taken.join.slots)
    for slots in range(1, taken.join.slots + 1):
        steps = table.plan(slots)
        if steps is not None:
            verify(Problem(graph, 2 * plain_peak(graph)), taken.invert(steps))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_accepted_is_taken_and_nothing_else(reduction: type[Reduction[Any]]) -> None:
    subjects: list[Subject] = [little_graph(seed, 6) for seed in range(30)]
    subjects += [
        Join((2, 3), 10, 20, 5, slots=9, slot_bytes=1),
        Join((2, 3), 10, 20, 5, slots=1, slot_bytes=1).to_graph(),
    ]
    for subject in subjects:
        taken = reduction.apply(subject)
        assert reduction.accepts(subject) == (taken is not None)
