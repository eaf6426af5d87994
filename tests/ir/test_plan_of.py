"""`plan_of` makes the least-memory plan of a sequence of ops."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, linear_graphs, sequences
from remat_ir import Compute, Free, Graph, Plan, Problem, graph_of, plain_plan, plan_of, recomputed, replay, verify

SETTINGS = settings(max_examples=examples(100), deadline=None, derandomize=True)
ROOMY = 2**40


def peaks(graph: Graph, plan: Plan) -> list[int]:
    """Memory at each compute, in order."""
    return [moment.peak_bytes for moment in replay(graph, plan) if moment.op is not None]


@SETTINGS
@given(graph=graphs(), data=st.data())
def test_sequences_make_valid_plans(graph: Graph, data: st.DataObject) -> None:
    """Any order in which inputs exist and pinned ops run once gives a plan that the verifier passes; cost is a sum."""
    sequence = data.draw(sequences(graph))
    plan = plan_of(graph, sequence)
    assert list(plan.computes) == sequence
    verdict = verify(Problem(graph, ROOMY), plan)
    assert verdict.cost_ns == sum(graph.op_cost_ns[op] for op in sequence)
    assert recomputed(plan, graph.ops) == [sequence.count(op) - 1 for op in range(graph.ops)]


@SETTINGS
@given(graph=graphs(most_ops=5), data=st.data())
def test_least_memory_of_a_sequence(graph: Graph, data: st.DataObject) -> None:
    """No value can be freed earlier, and none is kept in vain: removing or hastening any free breaks the plan."""
    sequence = data.draw(sequences(graph))
    plan = plan_of(graph, sequence)
    ours = peaks(graph, plan)
    for other in rivals(graph, sequence):
        assert all(a <= b for a, b in zip(ours, peaks(graph, other), strict=True))


def rivals(graph: Graph, sequence: list[int]) -> list[Plan]:
    """Valid plans for the same sequence that free later: after one more compute, or keep unread outputs a while."""
    base = plan_of(graph, sequence)
    found = []
    for i, step in enumerate(base.steps):
        if isinstance(step, Free):
            later = next((j for j in range(i + 1, len(base.steps)) if isinstance(base.steps[j], Compute)), None)
            if later is not None and graph.value_op[step.value] != base.steps[later].op:
                steps = [*base.steps[:i], *base.steps[i + 1 : later + 1], step, *base.steps[later + 1 :]]
                found.append(Plan(tuple(steps)))
        if isinstance(step, Compute) and step.kept is not None:
            extra = [v for v in graph.op_values[step.op] if v not in step.kept]
            found.extend(
                Plan(
                    (
                        *base.steps[:i],
                        Compute(step.op, tuple(sorted({*step.kept, value}))),
                        Free(value),
                        *base.steps[i + 1 :],
                    )
                )
                for value in extra
            )
    return found


@SETTINGS
@given(graph=graphs(), data=st.data())
def test_single_assignment(graph: Graph, data: st.DataObject) -> None:
    """Each instance has one maker and every read sees the latest, between its compute and its last use."""
    sequence = data.draw(sequences(graph))
    plan = plan_of(graph, sequence)
    live: dict[int, int] = {}
    latest: dict[int, int] = {}
    position = -1
    for step in plan.steps:
        if isinstance(step, Compute):
            position += 1
            for value in graph.op_inputs[step.op]:
                assert live[value] == latest[value]
            kept = graph.op_always[step.op] if step.kept is None else step.kept
            for value in kept:
                assert value not in live
                live[value] = position
            latest.update(dict.fromkeys(graph.op_values[step.op], position))
        else:
            del live[step.value]
    assert sorted(live) == list(graph.keep)


def test_an_unread_value_is_not_kept() -> None:
    graph = graph_of([1, 1], [5, 7], [[], []])
    assert plan_of(graph, [0, 1]).steps == (Compute(0, ()), Compute(1, ()))


def test_a_recomputed_value_lives_twice() -> None:
    """Between its uses, a value that is computed again is not resident."""
    graph = graph_of([1, 1, 1], [5, 7, 1], [[], [0], [0, 1]])
    plan = plan_of(graph, [0, 1, 0, 2])
    assert plan.steps == (Compute(0), Compute(1), Free(0), Compute(0), Compute(2, ()), Free(0), Free(1))


@SETTINGS
@given(graph=linear_graphs())
def test_plain_plan_computes_each_op_once(graph: Graph) -> None:
    assert plain_plan(graph).computes == tuple(range(graph.ops))
