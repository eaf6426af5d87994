"""Problems, plans and answers: what is read, what is refused and where, what travels unharmed, and the problem key."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, problems, sequences
from remat_ir import (
    Answer,
    Compute,
    Drop,
    Free,
    Graph,
    InvalidData,
    InvalidPlan,
    Link,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Status,
    Wait,
    budget_at,
    gap_of,
    graph_digest,
    graph_of,
    overhead_of,
    plain_peak,
    plain_plan,
    plan_of,
    problem_digest,
    readable,
    structure_digest,
    verify,
)
from remat_ir.proof import PairProof

SETTINGS = settings(max_examples=examples(80), deadline=None, derandomize=True)
GRAPH = graph_of([1, 2], [3, 4], [[], [0]], fixed_bytes=10)


def plan_json(*steps: Any) -> dict[str, Any]:
    return {"format": "remat-plan/1", "steps": list(steps)}


@pytest.mark.parametrize(
    ("data", "message", "pointer"),
    [
        ({"steps": []}, "plan must have format 'remat-plan/1', not None", "/format"),
        ({"format": "remat-plan/1"}, "plan lacks the key 'steps'", "/steps"),
        ({**plan_json(), "x": 1}, "plan has an unknown key 'x'", "/x"),
        ({"format": "remat-plan/1", "steps": {}}, "steps must be an array, not an object", "/steps"),
        (plan_json(["compute", 0], ["free"]), "step 1 must be [verb, number]", "/steps/1"),
        (plan_json("compute"), "step 0 must be [verb, number]", "/steps/0"),
        (plan_json(["compute", 0, [], 1]), "step 0 must be [verb, number]", "/steps/0"),
        (plan_json(["compute", -1]), "step 0: -1 must be a non-negative integer", "/steps/0/1"),
        (plan_json(["compute", 1.0]), "step 0: 1.0 must be a non-negative integer", "/steps/0/1"),
        (plan_json(["compute", True]), "step 0: True must be a non-negative integer", "/steps/0/1"),
        (plan_json(["compute", 0, [1, 1]]), "step 0: kept values must ascend", "/steps/0/2"),
        (plan_json(["compute", 0, [2, 1]]), "step 0: kept values must ascend", "/steps/0/2"),
        (plan_json(["compute", 0, 5]), "step 0: kept must be an array, not an integer", "/steps/0/2"),
        (plan_json(["compute", 0, ["a"]]), "step 0: kept[0] must be an integer, not a string", "/steps/0/2/0"),
        (plan_json(["run", 0]), "step 0: unknown verb 'run'", "/steps/0/0"),
        (plan_json([0, 0]), "step 0: the verb is an integer", "/steps/0/0"),
        (plan_json(["free", 0, []]), "step 0: free takes one number", "/steps/0"),
        ([], "plan must be an object, not an array", ""),
    ],
)
def test_plans_refused(data: Any, message: str, pointer: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)) as caught:
        Plan.from_json(json.dumps(data))
    assert caught.value.pointer == pointer


def test_every_step_travels() -> None:
    steps = (Compute(0), Compute(1, ()), Compute(2, (3, 5)), Free(3), Offload(5), Wait(5), Drop(5), Prefetch(5))
    plan = Plan(steps)
    assert plan.to_json()["steps"][:3] == [["compute", 0], ["compute", 1, []], ["compute", 2, [3, 5]]]
    assert Plan.from_json(json.dumps(plan.to_json())) == plan


@pytest.mark.parametrize(
    ("change", "message", "pointer"),
    [
        ({"budget_bytes": -1}, "budget_bytes must not be negative", "/budget_bytes"),
        ({"budget_bytes": 2**53 + 1}, "budget_bytes must be at most 2^53", "/budget_bytes"),
        ({"budget_bytes": "12GiB"}, "budget_bytes must be an integer, not a string", "/budget_bytes"),
        ({"budget": 1}, "problem has an unknown key 'budget'", "/budget"),
        ({"graph": None}, "graph must be an object, not null", "/graph"),
        (
            {"graph": {**GRAPH.to_json(), "value_bytes": [1, -1]}},
            "value 1: bytes must not be negative",
            "/graph/value_bytes/1",
        ),
    ],
)
def test_problems_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)) as caught:
        Problem.from_json({"graph": GRAPH.to_json(), "budget_bytes": 20, **change})
    assert caught.value.pointer == pointer


@pytest.mark.parametrize("key", ["graph", "budget_bytes"])
def test_problems_incomplete(key: str) -> None:
    data = {"graph": GRAPH.to_json(), "budget_bytes": 20}
    del data[key]
    with pytest.raises(InvalidData):
        Problem.from_json(data)


@SETTINGS
@given(problem=problems())
def test_problems_round_trip(problem: Problem) -> None:
    assert Problem.from_json(json.dumps(problem.to_json())) == problem


@SETTINGS
@given(graph=graphs())
def test_budget_fractions(graph: Graph) -> None:
    """0 leaves the fixed bytes, 1 is the plain peak, and it rounds down between."""
    peak = plain_peak(graph)
    assert budget_at(graph, 0) == graph.fixed_bytes
    assert budget_at(graph, 1) == peak
    assert budget_at(graph, Fraction(1, 3)) == graph.fixed_bytes + (peak - graph.fixed_bytes) // 3


@pytest.mark.parametrize("fraction", [-0.1, float("nan"), float("inf"), 1e7])
def test_budget_fractions_refused(fraction: float) -> None:
    with pytest.raises(InvalidData, match="a budget fraction must be between 0 and 1"):
        budget_at(GRAPH, fraction)


ANSWER = Answer(
    status=Status.FEASIBLE,
    method="auto",
    budget_bytes=100,
    cost_ns=12,
    bound_ns=11,
    overhead=0.2,
    gap=1 / 12,
    peak_bytes=99,
    seconds=1.5,
    limit="time",
    restricted_to=("persistent-schedules",),
    digest="00",
    message="m",
    plan=Plan((Compute(0), Free(0))),
)


def test_answers_round_trip() -> None:
    assert Answer.from_json(json.dumps(ANSWER.to_json())) == ANSWER
    bare = Answer(Status.QUEUED, "auto", 5)
    assert "plan" not in bare.to_json()
    assert Answer.from_json(json.dumps(bare.to_json())) == bare


def test_a_notebook_shows_neither_the_plan_nor_the_certificate() -> None:
    """Both may have a million numbers."""
    proof = PairProof("0" * 64, op=1, pairs=((12345, 12345),))
    shown = replace(ANSWER, proof=proof)._repr_html_()
    assert "<th>cost_ns</th>" in shown
    assert "12345" not in shown
    assert "<th>proof</th>" not in shown
    assert "<th>plan</th>" not in shown


def test_answers_of_later_versions_are_read() -> None:
    assert Answer.from_json({**ANSWER.to_json(), "colour": "red"}) == ANSWER


@pytest.mark.parametrize(
    ("change", "message", "pointer"),
    [
        ({"status": "done"}, "unknown status 'done'", "/status"),
        ({"cost_ns": 1.5}, "answer: cost_ns must be an integer, not the float 1.5", "/cost_ns"),
        ({"budget_bytes": "1"}, "answer: budget_bytes must be an integer, not a string", "/budget_bytes"),
        ({"gap": "x"}, "answer: gap must be a number, not a string", "/gap"),
        ({"restricted_to": "all"}, "answer: restricted_to must be an array", "/restricted_to"),
        ({"plan": {"format": "remat-plan/1", "steps": [["free", -1]]}}, "step 0", "/plan/steps/0/1"),
    ],
)
def test_answers_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)) as caught:
        Answer.from_json({**ANSWER.to_json(), **change})
    assert caught.value.pointer == pointer


@pytest.mark.parametrize("key", ["status", "method", "budget_bytes"])
def test_answers_incomplete(key: str) -> None:
    data = ANSWER.to_json()
    del data[key]
    with pytest.raises(InvalidData, match=key):
        Answer.from_json(data)


def test_statuses_that_have_ended() -> None:
    assert {status for status in Status if not status.ended} == {Status.QUEUED, Status.RUNNING}


def test_gap_and_overhead() -> None:
    assert gap_of(100, 90) == pytest.approx(0.1)
    assert gap_of(100, 101) == 0
    assert gap_of(0, 0) == 0
    assert overhead_of(150, 100) == pytest.approx(0.5)
    assert overhead_of(0, 0) == 0


# --- an answer made from a plan


THREE = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
AGAIN = plan_of(THREE, [0, 1, 0, 2])


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.data())
def test_what_it_says_follows_from_the_plan_and_the_bound(data: st.DataObject) -> None:
    graph = data.draw(problems()).graph
    plan = plan_of(graph, data.draw(sequences(graph)))
    problem = Problem(graph, verify(Problem(graph, 2**40), plan).peak_bytes)
    cost, peak = verify(problem, plan)
    bound = data.draw(st.one_of(st.none(), st.integers(0, cost)))
    made = Answer.of_plan(problem, plan, method="auto", bound_ns=bound)
    total = sum(graph.op_cost_ns)
    known = total if bound is None else bound
    assert (made.plan, made.cost_ns, made.peak_bytes, made.bound_ns) == (plan, cost, peak, known)
    assert (made.budget_bytes, made.digest) == (problem.budget_bytes, problem_digest(problem))
    assert made.status is (Status.OPTIMAL if known == cost else Status.FEASIBLE)
    assert made.gap == (pytest.approx(float(Fraction(cost - known, cost))) if cost else 0)
    assert made.overhead == (pytest.approx(float(Fraction(cost, total) - 1)) if total else 0)
    assert Answer.from_json(made.to_json()) == made


def test_a_wrong_plan_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="op 1 is first computed before op 0"):
        Answer.of_plan(Problem(THREE, 15), Plan((Compute(1), Compute(0), Compute(2))), method="auto")


def test_a_plan_over_the_budget_is_refused() -> None:
    budget = plain_peak(THREE) - 1
    with pytest.raises(InvalidPlan, match=f"over the budget of {readable(budget)}"):
        Answer.of_plan(Problem(THREE, budget), plain_plan(THREE), method="auto")


def test_a_bound_above_the_cost_is_refused() -> None:
    with pytest.raises(InvalidData, match="the bound of 8 ns is above the cost of the plan, 7 ns"):
        Answer.of_plan(Problem(THREE, 15), AGAIN, method="auto", bound_ns=8)


def test_a_bound_keeps_the_name_of_its_space() -> None:
    made = Answer.of_plan(Problem(THREE, 15), AGAIN, method="auto", bound_ns=6, restricted_to=("stages",), seconds=1.5)
    assert (made.status, made.restricted_to, made.seconds) == (Status.FEASIBLE, ("stages",), 1.5)


def test_without_a_cost_there_is_no_overhead_and_no_gap() -> None:
    nothing = Answer(Status.NOTHING_FOUND, "auto", 15).priced(6, None, 6, None)
    assert (nothing.cost_ns, nothing.bound_ns, nothing.overhead, nothing.gap) == (None, 6, None, None)


# --- the problem key: what is in it changes it, and nothing else does

KEYED = Graph(
    op_cost_ns=(1, 2, 3),
    op_inputs=((), (0,), (1, 2)),
    value_op=(0, 1, 1, 2),
    value_bytes=(5, 6, 7, 8),
    op_workspace_bytes=(0, 1, 0),
    optional=(2,),
    once=(1, 2),
    keep=(3,),
    backward_from=2,
    fixed_bytes=100,
)
IN = {
    "op_cost_ns": (1, 2, 4),
    "op_inputs": ((), (0,), (1,)),
    "value_op": (0, 0, 1, 2),
    "value_bytes": (5, 6, 7, 9),
    "op_workspace_bytes": (0, 1, 1),
    "optional": (),
    "once": (2,),
    "keep": (),
    "consumes": (1,),
    "backward_from": None,
    "link": Link(1, 2),
}


@pytest.mark.parametrize("field", IN)
def test_what_is_in(field: str) -> None:
    other = replace(KEYED, **{field: IN[field]})
    assert graph_digest(other) != graph_digest(KEYED)
    assert problem_digest(Problem(other, 200)) != problem_digest(Problem(KEYED, 200))
    assert (structure_digest(other) == structure_digest(KEYED)) == (field == "op_cost_ns")


def test_the_budget_is_in() -> None:
    assert problem_digest(Problem(KEYED, 200)) != problem_digest(Problem(KEYED, 201))


def test_names_are_out() -> None:
    named = replace(KEYED, op_names=("a", "b", "c"), value_names=("p", "q", "r", "s"))
    assert problem_digest(Problem(named, 200)) == problem_digest(Problem(KEYED, 200))


def test_every_field_is_decided() -> None:
    """A field added to Graph must be put in or left out on purpose."""
    assert set(Graph.__dataclass_fields__) == {*IN, "fixed_bytes", "op_names", "value_names"}


@SETTINGS
@given(problem=problems())
def test_fixed_bytes_shift_the_budget_and_nothing_else(problem: Problem) -> None:
    graph = problem.graph
    more = Problem(graph.with_fixed(graph.fixed_bytes + 17), problem.budget_bytes + 17)
    assert problem_digest(more) == problem_digest(problem)
    assert graph_digest(more.graph) == graph_digest(graph)
    assert re.fullmatch("[0-9a-f]{64}", problem_digest(problem))


def test_the_key_stands_still() -> None:
    """Stores outlive processes: this value may only change together with the format version."""
    graph = graph_of([120, 80, 200], [1024, 4096, 256], [[], [0], [0, 1]], keep=(2,), backward_from=2)
    assert graph_digest(graph) == "a5e22b299eff3ba9e33ee7a8fc02eee2831cd039261a35d5ee57bf774d9d2ce2"
    assert problem_digest(Problem(graph, 6000)) == "67d7e91d52ef3f544d33b3f3e25d1d088d50d0164607fa762b23fb2725acfb8a"


@SETTINGS
@given(problem=problems())
def test_the_digest_is_made_as_the_page_on_certificates_says(problem: Problem) -> None:
    """`docs/proofs.md`, To write another checker."""
    graph = problem.graph
    members = ("backward_from", "keep", "once", "op_cost_ns", "op_inputs", "op_workspace_bytes")
    members += ("optional", "value_bytes", "value_op", *(("consumes",) if graph.consumes else ()))
    said = {"format": "remat-graph/1", "budget_bytes": problem.budget_bytes - graph.fixed_bytes}
    said |= {name: getattr(graph, name) for name in members}
    written = json.dumps(said, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert hashlib.sha256(written).hexdigest() == problem_digest(problem)
