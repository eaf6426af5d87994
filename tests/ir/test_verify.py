"""The verifier: each way in which a plan can be wrong, an independent replay, and the plans that `plan_of` makes."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, problems, sequences
from remat_ir import (
    Compute,
    Drop,
    Free,
    Graph,
    InvalidPlan,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Step,
    Wait,
    graph_of,
    plain_peak,
    plain_plan,
    plan_of,
    recomputed,
    replay,
    verify,
)

SETTINGS = settings(max_examples=examples(100), deadline=None, derandomize=True)
ROOMY = 2**40

# op 0 makes values 0 and 1 (1 optional), op 1 reads 0 and makes 2 (kept to the end), op 2 is a loss and makes 3,
# op 3 reads 1, 3 and makes nothing
GRAPH = Graph(
    op_cost_ns=(2, 3, 5, 7),
    op_inputs=((), (0,), (0,), (1, 3)),
    value_op=(0, 0, 1, 2),
    value_bytes=(10, 20, 40, 80),
    op_workspace_bytes=(0, 1, 2, 4),
    optional=(1,),
    once=(2,),
    keep=(2,),
    backward_from=3,
    fixed_bytes=1000,
)
GOOD: tuple[Step, ...] = (
    Compute(0),
    Compute(1),
    Compute(2),
    Free(0),
    Compute(0, (1,)),
    Compute(3),
    Free(1),
    Free(3),
)


def refuse(steps: tuple[Step, ...], reason: str, step: int | None, graph: Graph = GRAPH, budget: int = ROOMY) -> None:
    with pytest.raises(InvalidPlan, match=re.escape(reason)) as caught:
        verify(Problem(graph, budget), Plan(steps))
    assert caught.value.step == step
    if step is not None:
        assert str(caught.value).startswith(f"step {step}: ")


def test_a_good_plan_passes_with_its_cost_and_peak() -> None:
    """Memory at op 0 again: value 2, value 3, and both 0 (made though not kept) and 1; at op 3 values 1, 2, 3."""
    verdict = verify(Problem(GRAPH, ROOMY), Plan(GOOD))
    assert verdict == (2 + 3 + 5 + 2 + 7, 1000 + 40 + 80 + 10 + 20)


def test_moments() -> None:
    """Every step has its moment: memory while it runs and after it, workspaces included, and the cost so far."""
    moments = list(replay(GRAPH, Plan(GOOD)))
    assert [m.op for m in moments] == [0, 1, 2, None, 0, 3, None, None]
    assert [m.peak_bytes - 1000 for m in moments] == [10, 51, 132, 130, 150, 144, 140, 120]
    assert [m.resident_bytes - 1000 for m in moments] == [10, 50, 130, 120, 140, 140, 120, 40]
    assert [m.cost_ns for m in moments] == [2, 5, 10, 10, 12, 19, 19, 19]


WRONG: dict[str, tuple[tuple[Step, ...], str, int | None]] = {
    "an op never computed": ((Compute(0), Compute(1)), "op 2 is never computed", None),
    "an empty plan": ((), "op 0 is never computed", None),
    "a once op twice": (
        (Compute(0), Compute(1), Compute(2), Free(3), Compute(2)), "op 2 must be computed exactly once", 4,
    ),
    "first computations out of order": ((Compute(0), Compute(2)), "op 2 is first computed before op 1", 1),
    # the optional value is not made unless it is kept
    "an input never kept": (
        (Compute(0), Compute(1), Compute(2), Compute(3)), "op 3 reads value 1, which is not resident", 3,
    ),
    "an input freed": ((Compute(0), Free(0), Compute(1)), "op 1 reads value 0, which is not resident", 2),
    "an input dropped": ((Compute(0, (1,)), Compute(1)), "op 1 reads value 0, which is not resident", 1),
    "a value made while resident": ((Compute(0), Compute(0)), "op 0 makes value 0 while it is resident", 1),
    # an op makes its non-optional outputs whether it keeps them or not
    "one not kept again": ((Compute(0), Compute(0, (1,))), "op 0 makes value 0 while it is resident", 1),
    "an optional one": ((Compute(0, (1,)), Compute(0, (1,))), "op 0 makes value 1 while it is resident", 1),
    "a kept value freed": ((Compute(0), Compute(1), Free(2)), "value 2 must be kept to the end", 2),
    "a kept value dropped": ((Compute(0), Compute(1, ())), "op 1 drops value 2, which must be kept to the end", 1),
    "a kept value made again": (
        (Compute(0), Compute(1), Compute(1)), "op 1 makes value 2 while it is resident", 2,
    ),
    "a free of what is not resident": ((Compute(0), Free(0), Free(0)), "value 0 is freed but not resident", 2),
    "a free of no value": ((Compute(0), Free(99)), "value 99 is freed but not resident", 1),
    "no op": ((Compute(4),), "there is no op 4", 0),
    "an op below 0": ((Compute(-1),), "there is no op -1", 0),
    "a value of another op kept": ((Compute(0, (2,)),), "op 0 keeps value 2, which it does not make", 0),
    "no value kept": ((Compute(0, (99,)),), "op 0 keeps value 99, which it does not make", 0),
    "a value below 0 kept": ((Compute(0, (-4,)),), "op 0 keeps value -4, which it does not make", 0),
    "a value kept twice": ((Compute(0, (0, 0)),), "op 0 keeps a value twice", 0),
    "an offload without a link": ((Compute(0), Offload(0)), "offload needs a link to the host", 1),
    "a wait without a link": ((Compute(0), Wait(0)), "wait needs a link to the host", 1),
    "a drop without a link": ((Compute(0), Drop(0)), "drop needs a link to the host", 1),
    "a prefetch without a link": ((Compute(0), Prefetch(0)), "prefetch needs a link to the host", 1),
}  # fmt: skip


@pytest.mark.parametrize("rule", WRONG)
def test_a_plan_that_breaks_a_rule(rule: str) -> None:
    refuse(*WRONG[rule])


def test_an_optional_value_may_stay_while_its_op_runs_without_it() -> None:
    steps = (Compute(0), Compute(1), Free(0), Compute(0, (0, 1)), Free(0), Compute(0), Compute(2), Compute(3))
    assert verify(Problem(GRAPH, ROOMY), Plan(steps)).cost_ns == 2 + 3 + 2 + 2 + 5 + 7


def late(stage: int) -> tuple[Graph, Plan]:
    """An update (op 3) consumes what op 1 reads; op 1 runs again before the first computation of op `stage`."""
    graph = Graph((0, 1, 1, 0, 1, 1), ((), (0,), (1,), (0, 2), (2,), (1, 3)), (0, 1, 2, 4), (0, 5, 1, 5), once=(0, 3))
    graph = replace(graph, consumes=(0, 2), op_inputs=((), (0,), (1,), (0, 2), (), (1, 3)))
    return graph, plan_of(graph, (*range(stage), 1, *range(stage, graph.ops)))


def test_a_consumed_value_read_again() -> None:
    for stage in (2, 3):  # the consumer itself has yet to run
        graph, plan = late(stage)
        verify(Problem(graph, ROOMY), plan)
    for stage in (4, 5):
        graph, plan = late(stage)
        with pytest.raises(InvalidPlan, match="op 1 reads value 0, which op 3 has consumed"):
            verify(Problem(graph, ROOMY), plan)
        verify(Problem(replace(graph, consumes=()), ROOMY), plan)


@pytest.mark.parametrize("forgets", ["if value in self.consumed:", "self.consumed |= {"])
def test_a_verifier_that_forgets_what_is_consumed_is_told_apart(forgets: str) -> None:
    """A mutant without either half of the rule takes the plan that the verifier refuses."""
    text = inspect.getsource(sys.modules["remat_ir.replay"])
    assert text.count(forgets) == 1
    mutant: dict[str, Any] = {"__name__": "remat_ir.mutant", "__package__": "remat_ir"}
    exec(text.replace(forgets, "if False:" if forgets.startswith("if") else "{} | {"), mutant)
    assert len(list(mutant["replay"](*late(4)))) > 6


def test_over_the_budget_by_a_byte() -> None:
    assert verify(Problem(GRAPH, 1150), Plan(GOOD)).peak_bytes == 1150
    refuse(GOOD, "memory is 1.12 KiB, 1 B over the budget of 1.12 KiB", 4, budget=1149)


def test_workspace_counts() -> None:
    heavy = replace(GRAPH, op_workspace_bytes=(0, 1, 2, 500))
    refuse(GOOD, "memory is 1.60 KiB, 490 B over the budget of 1.12 KiB", 5, graph=heavy, budget=1150)


def test_fixed_bytes_count() -> None:
    refuse(GOOD, "over the budget", 4, graph=GRAPH.with_fixed(1001), budget=1150)


def test_a_wrong_claim_of_cost_or_peak() -> None:
    problem = Problem(GRAPH, ROOMY)
    assert verify(problem, Plan(GOOD), cost_ns=19, peak_bytes=1150)
    with pytest.raises(InvalidPlan, match="the claimed cost is 18 ns, the replayed one 19 ns"):
        verify(problem, Plan(GOOD), cost_ns=18)
    with pytest.raises(InvalidPlan, match="the claimed peak is 1149 bytes, the replayed one 1150"):
        verify(problem, Plan(GOOD), peak_bytes=1149)


def charges(graph: Graph, plan: Plan) -> list[int]:
    """Memory while each compute runs, from the definition: a sum over the instances alive, made step by step."""
    found = []
    for i, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            continue
        alive = set()
        for earlier in plan.steps[:i]:
            if isinstance(earlier, Compute):
                alive |= set(graph.op_always[earlier.op] if earlier.kept is None else earlier.kept)
            elif isinstance(earlier, Free):
                alive.discard(earlier.value)
        alive |= set(graph.op_always[step.op]) | set(step.kept or ())
        found.append(
            graph.fixed_bytes + graph.op_workspace_bytes[step.op] + sum(graph.value_bytes[v] for v in alive),
        )
    return found


@SETTINGS
@given(graph=graphs(), data=st.data())
def test_memory_is_what_the_definition_says(graph: Graph, data: st.DataObject) -> None:
    plan = plan_of(graph, data.draw(sequences(graph)))
    assert peaks(graph, plan) == charges(graph, plan)


@SETTINGS
@given(problem=problems())
def test_plain_peak_is_the_edge(problem: Problem) -> None:
    """The plain plan passes at the plain peak and above, and nowhere below."""
    graph, plan = problem.graph, plain_plan(problem.graph)
    edge = plain_peak(graph)
    assert verify(Problem(graph, edge), plan).peak_bytes == edge
    if edge:
        with pytest.raises(InvalidPlan, match="over the budget"):
            verify(Problem(graph, edge - 1), plan)


@SETTINGS
@given(graph=graphs(least_ops=2), data=st.data())
def test_broken_plans_are_refused(graph: Graph, data: st.DataObject) -> None:
    """Leaving out a first computation, or a free before its value is made again, never passes."""
    sequence = data.draw(sequences(graph))
    plan = plan_of(graph, sequence)
    first = [i for i, s in enumerate(plan.steps) if isinstance(s, Compute)]
    op = data.draw(st.sampled_from(range(graph.ops)))
    if sequence.count(op) == 1:
        i = first[sequence.index(op)]
        with pytest.raises(InvalidPlan):
            verify(Problem(graph, ROOMY), Plan(plan.steps[:i] + plan.steps[i + 1 :]))
    twice = data.draw(st.sampled_from(range(len(plan.steps))))
    step = plan.steps[twice]
    if isinstance(step, Free) or graph.op_always[step.op]:
        doubled = Plan((*plan.steps[: twice + 1], step, *plan.steps[twice + 1 :]))
        kept = isinstance(step, Free) or (set(graph.op_always[step.op]) if step.kept is None else set(step.kept))
        if kept:
            with pytest.raises(InvalidPlan):
                verify(Problem(graph, ROOMY), doubled)


# --- the least-memory plan of a sequence of ops


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
