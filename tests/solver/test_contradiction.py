"""Which plans lie in a restricted space, what happens to a proof that one of them refutes, and what refutes what."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples, graphs, problems, sequences
from remat_ir import (
    Answer,
    Chain,
    ChainPlan,
    ChainStep,
    Compute,
    Graph,
    InvalidPlan,
    Plan,
    Problem,
    Status,
    Verb,
    graph_of,
    plain_plan,
    plan_of,
    verify,
)
from remat_ir.restrictions import (
    FORWARD_OPS,
    NO_TRANSFERS,
    ONE_PER_STAGE,
    PERSISTENT,
    contains,
    recomputations_per_stage,
)
from remat_solver import solve
from remat_solver.contradiction import LOG, Contradiction, Evidence, RaiseContradictions
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from solver.brute import optimum
from solver.chain_brute import best_cost
from solver.little import little_graph

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


# --- membership


@SETTINGS
@given(data=st.data(), graph=graphs(most_ops=5, most_values=2))
def test_a_plan_inside_a_space_costs_no_less_than_its_optimum(data: st.DataObject, graph: Graph) -> None:
    order = data.draw(sequences(graph))
    plan = plan_of(graph, order)
    peak = verify(Problem(graph, 2**50), plan).peak_bytes
    problem = Problem(graph, peak)
    for sweeps in (1, 2):
        if contains(graph, plan, (recomputations_per_stage(sweeps),)):
            best = optimum(problem, "one-per-stage", sweeps).cost_ns
            assert best <= verify(problem, plan).cost_ns


def test_spaces_of_graph_plans() -> None:
    graph = graph_of([1, 1, 1, 1], [1, 1, 1, 1], [[], [0], [1], [0, 1]], backward_from=2)
    one, other = plan_of(graph, [0, 1, 2, 0, 1, 3]), plan_of(graph, [0, 1, 2, 1, 0, 1, 3])
    assert contains(graph, one, (ONE_PER_STAGE,))
    assert contains(graph, one, (FORWARD_OPS, ONE_PER_STAGE))
    assert not contains(graph, other, (ONE_PER_STAGE,))
    assert contains(graph, other, (recomputations_per_stage(2),))
    assert not contains(graph, plan_of(graph, [0, 0, 1, 2, 3]), (FORWARD_OPS,))
    assert contains(graph, plain_plan(graph), ())
    assert not contains(graph, plain_plan(graph), ("a-space-of-tomorrow",))


@SETTINGS
@given(chain=chains(most_stages=4), data=st.data())
def test_a_persistent_plan_costs_no_less_than_the_best(chain: Chain, data: st.DataObject) -> None:
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from([Verb.F_ALL, Verb.F_CK, Verb.F_NONE]), st.integers(1, 4)), max_size=8)
    )
    plan = _completed(chain, steps)
    try:
        verdict = verify(Problem(chain, 2**50), plan)
    except InvalidPlan:
        return
    if contains(chain, plan, (PERSISTENT, NO_TRANSFERS)):
        best = best_cost(chain, verdict.peak_bytes)
        assert best <= verdict.cost_ns


def _completed(chain: Chain, steps: list[tuple[Verb, int]]) -> ChainPlan:
    """Forward steps at random, then all that is missing with every tape."""
    taken = [ChainStep(verb, stage) for verb, stage in steps if stage <= chain.stages]
    more = [ChainStep(Verb.F_ALL, stage) for stage in range(1, chain.stages + 1)]
    more += [ChainStep(Verb.B, back) for back in range(chain.stages, 0, -1)]
    kept: list[ChainStep] = []
    for step in [*taken, *more]:
        try:
            verify(Problem(chain, 2**50), ChainPlan((*kept, step)))
        except InvalidPlan as error:
            if "is never computed" not in str(error):
                continue
        kept.append(step)
    return ChainPlan(tuple(kept))


# --- contradictions


def _little() -> tuple[Problem, Problem]:
    graph = graph_of([5, 5, 5, 5], [4, 4, 4, 1], [[], [0], [1], [0, 2]])
    return Problem(graph, 100), Problem(graph, 9)


def test_a_plan_refutes_a_bound(said: list[str]) -> None:
    """The false bound goes, whichever comes first; its source is not believed again; the instance is written out."""
    problem, _ = _little()
    plan = plain_plan(problem.graph)
    for first in ("bound", "plan"):
        incumbent = Incumbent(problem, Deadline(None))
        if first == "plan":
            incumbent.offer(plan, "search")
        incumbent.raise_bound(21, "wrong")
        if first == "bound":
            incumbent.offer(plan, "search")
        incumbent.raise_bound(19, "wrong")
        answer = incumbent.answer("auto")
        assert (answer.cost_ns, answer.bound_ns, answer.status) == (20, 20, Status.OPTIMAL)
    assert len(said) == 2
    path = Path(re.search(r"instance in (\S+)$", said[0])[1])
    instance = json.loads(path.read_text())
    assert instance["bound_ns"] == 21
    assert verify(Problem.from_json(instance["problem"]), plan).cost_ns == 20


def test_a_plan_refutes_a_restricted_bound_only_in_its_space(said: list[str]) -> None:
    problem, tight = _little()
    inside = plan_of(problem.graph, [0, 1, 2, 0, 3])
    incumbent = Incumbent(tight, Deadline(None))
    incumbent.raise_bound(26, "wrong", (ONE_PER_STAGE,))
    incumbent.raise_bound(27, "unknown", ("a-space-of-tomorrow",))
    incumbent.offer(inside, "search")
    assert len(said) == 1
    assert incumbent.known.within(("a-space-of-tomorrow",)) == 27
    answer = incumbent.answer("auto")
    assert answer.restricted_to == (), "of a plan outside of a space its bound says nothing"
    incumbent.nothing_within((ONE_PER_STAGE,), "None is there.")
    assert len(said) == 2
    assert not incumbent.exhausted


def test_a_plan_refutes_infeasibility_and_a_least_budget(said: list[str]) -> None:
    problem, tight = _little()
    plan = plan_of(problem.graph, [0, 1, 2, 0, 3])
    incumbent = Incumbent(tight, Deadline(None))
    incumbent.prove_infeasible("No plan fits.", 10)
    incumbent.offer(plan, "search")
    assert len(said) == 2
    incumbent.prove_infeasible("No plan fits.", 10)
    answer = incumbent.answer("auto")
    assert len(said) == 3
    assert answer.status is Status.FEASIBLE
    assert answer.least_budget_bound_bytes is None


def test_tests_and_benchmarks_end_at_a_contradiction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(LOG, "handlers", [RaiseContradictions()])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    problem, _ = _little()
    incumbent = Incumbent(problem, Deadline(None))
    incumbent.raise_bound(21, "wrong")
    with pytest.raises(Contradiction, match="wrong claims that no plan costs less than 21 ns, and one costs 20 ns"):
        incumbent.offer(plain_plan(problem.graph), "search")


def test_the_instance_is_the_owners_and_follows_no_link(said: list[str], tmp_path: Path) -> None:
    """The folder is shared: what another user leaves there under the name is not written through."""
    problem, _ = _little()

    def refuted() -> Path:
        incumbent = Incumbent(problem, Deadline(None))
        incumbent.raise_bound(21, "wrong")
        incumbent.offer(plain_plan(problem.graph), "search")
        (path,) = tmp_path.glob("remat-contradiction-*.json")
        return path

    path = refuted()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    other = tmp_path / "other"
    other.write_text("theirs")
    path.symlink_to(other)
    refuted()
    assert "instance in nowhere, since" in said[-1]
    assert other.read_text() == "theirs"


# --- invalid plans of methods


def test_an_invalid_plan_of_a_method_is_dropped_logged_and_named(said: list[str]) -> None:
    graph = graph_of([1, 2, 3], [4, 8, 4], [[], [0], [0, 1]])
    problem = Problem(graph, 16)
    incumbent = Incumbent(problem, Deadline(None))
    assert incumbent.offer(plain_plan(graph), "greedy")
    assert not incumbent.offer(plan_of(graph, (0, 1)), "rotor")
    assert incumbent.offer_or_suffices(Plan((Compute(1),)), "search") > problem.budget_bytes
    answer = incumbent.answer("auto")
    assert answer.plan == plain_plan(graph)
    assert answer.dropped_methods == ("rotor", "search")
    assert "An invalid plan was dropped, of: rotor, search." in answer.message
    assert [re.match("a method is wrong: a plan of (rotor|search) does not verify", line) for line in said]
    assert Answer.from_json(answer.to_json()).dropped_methods == answer.dropped_methods
    older = {name: value for name, value in answer.to_json().items() if name != "dropped_methods"}
    assert Answer.from_json(older).dropped_methods == ()


def test_the_plan_of_a_person_is_refused_where_it_is_invalid() -> None:
    graph = graph_of([1, 2, 3], [4, 8, 4], [[], [0], [0, 1]])
    with pytest.raises(InvalidPlan):
        solve(Problem(graph, 16), start=Plan((Compute(1),)))


# --- bounds and plans of one subject under several budgets, from several sources


GRAPH = little_graph(3, 6, rich=False)
PLAIN = plain_plan(GRAPH)
COST, PEAK = verify(Problem(GRAPH, 2**53), PLAIN)


def evidence() -> Evidence:
    """A plan of known cost and peak."""
    found = Evidence(GRAPH)
    found.plan(PLAIN, "plain")
    return found


def test_what_agrees_is_not_refuted() -> None:
    """A bound at the cost, one above it under a budget below the peak, and a restricted one that cannot be compared."""
    found = evidence()
    found.bound(PEAK, COST, (), "a")
    found.bound(PEAK - 1, COST + 1, (), "b")
    found.infeasible(PEAK - 1, (), "c")
    found.needs(PEAK, "d")
    found.bound(PEAK, COST + 1, ("a-space-of-tomorrow",), "e")
    found.known(PEAK, COST, "f")
    assert found.refutations() == ()


def test_a_budget_that_is_enough_and_not_enough() -> None:
    """Two claims without a plan contradict each other."""
    found = Evidence(GRAPH)
    found.known(PEAK - 1, None, "a")
    found.needs(PEAK, "b")
    (refutation,) = found.refutations()
    assert str(refutation) == f"b: no plan within {PEAK - 1} bytes exists; a: a plan needs {PEAK - 1} bytes"


@pytest.mark.parametrize(
    "claim",
    [
        lambda e: e.bound(PEAK, COST + 1, (), "x"),
        lambda e: e.bound(PEAK + 100, COST + 1, (), "x"),
        lambda e: e.bound(PEAK, COST + 1, (ONE_PER_STAGE,), "x"),
        lambda e: e.infeasible(PEAK, (), "x"),
        lambda e: e.infeasible(PEAK, (ONE_PER_STAGE,), "x"),
        lambda e: e.needs(PEAK + 1, "x"),
    ],
)
def test_each_kind_of_claim_is_refuted(claim: object) -> None:
    found = evidence()
    claim(found)
    (refutation,) = found.refutations()
    assert refutation.bound.source == "x"
    instance = refutation.to_json()
    problem = Problem.from_json(instance["problem"])
    assert verify(problem, Plan.from_json(instance["plan"])).cost_ns == COST
    assert instance["bound_ns"] is None or instance["bound_ns"] > COST


def test_a_noted_cost_without_its_plan_refutes_too() -> None:
    found = Evidence(GRAPH)
    found.known(PEAK, COST, "noted")
    found.bound(PEAK, COST + 1, (), "x")
    found.bound(PEAK, COST + 1, (ONE_PER_STAGE,), "its space is not known")
    assert [each.bound.source for each in found.refutations()] == ["x"]


def test_a_wrong_plan_is_refused() -> None:
    with pytest.raises(InvalidPlan):
        Evidence(GRAPH).plan(plan_of(GRAPH, [0, 1]), "wrong")


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problem=problems(graphs(most_ops=5, most_values=2)))
def test_brute_force_contradicts_no_method(problem: Problem) -> None:
    """The optimum of the whole space, as a plan, next to what three methods say; a bound raised by one is found."""
    best = optimum(problem)
    found = Evidence(problem.subject)
    if best.plan is not None:
        found.plan(best.plan, "brute force")
    for method in ("auto", "lp-rounding", "greedy"):
        found.answer(solve(problem, method=method, max_gap=0, time_limit_s=5), method)
    assert not found.refutations()
    if best.cost_ns is not None:
        found.bound(problem.budget_bytes, best.cost_ns + 1, (), "mutant")
        assert [each.bound.source for each in found.refutations()] == ["mutant"]
