"""Plans come back from what a subject is taken as: verified on the subject itself, no worse than there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples, linear_graphs, sequences
from remat_ir import Chain, Graph, Problem, plan_of, verify
from remat_ir.problem import plain_plan_of
from remat_solver.chain.network import linear_network
from remat_solver.lift import Lift

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)
ROOMY = 2**50


@SETTINGS
@given(chain=chains(most_stages=6), data=st.data())
def test_plans_of_the_lift_are_plans_of_the_chain(chain: Chain, data: st.DataObject) -> None:
    taken = Lift.apply(chain)
    graph = taken.graph
    plan = plan_of(graph, data.draw(sequences(graph)))
    there, here = verify(Problem(graph, ROOMY), plan), verify(Problem(chain, ROOMY), taken.invert(plan))
    assert here.cost_ns <= there.cost_ns
    assert here.peak_bytes <= there.peak_bytes
    plain = taken.lift(plain_plan_of(chain))
    assert verify(Problem(graph, ROOMY), plain) == verify(Problem(chain, ROOMY), plain_plan_of(chain))


@SETTINGS
@given(graph=linear_graphs(most_layers=8), data=st.data())
def test_sequences_of_stages_are_plans_of_a_linear_network(graph: Graph, data: st.DataObject) -> None:
    taken = linear_network(graph)
    if taken is not None:
        sequence = data.draw(sequences(graph))
        verdict = verify(Problem(graph, ROOMY), taken.invert(sequence))
        assert graph.total_cost_ns <= verdict.cost_ns <= sum(graph.op_cost_ns[op] for op in sequence)
