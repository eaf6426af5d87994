"""What is known about a problem, put together in any order, gives the answer that its parts allow: no more, no less."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Answer, Problem, Status, Verdict, gap_of, graph_of, plain_plan
from remat_ir.restrictions import ONE_PER_STAGE, PERSISTENT
from remat_solver.knowledge import Bound, Ending, Known, sentence
from remat_solver.sweep import Curve

GRAPH = graph_of([10, 20, 30], [4, 5, 6], [[], [0], [0, 1]])
TOTAL = GRAPH.total_cost_ns
SPACES = ((), (ONE_PER_STAGE,), (PERSISTENT,), (ONE_PER_STAGE, PERSISTENT))
FACTS = st.one_of(
    st.builds(Verdict, st.integers(TOTAL, 3 * TOTAL), st.integers(1, 100)),
    st.builds(Bound, st.integers(0, 3 * TOTAL), st.sampled_from(SPACES)),
)
SETTINGS = settings(max_examples=examples(200), deadline=None, derandomize=True)


def known_of(facts: list[Verdict | Bound], budget: int = 100) -> Known:
    known = Known(Problem(GRAPH, budget))
    for fact in facts:
        known = known.with_plan(fact) if isinstance(fact, Verdict) else known.with_bound(fact)
    return known


@SETTINGS
@given(facts=st.lists(FACTS, max_size=6), gap=st.sampled_from((0.0, 0.1, 0.5)), order=st.randoms(use_true_random=False))
def test_the_order_of_what_is_learnt_does_not_matter(facts: list[Verdict | Bound], gap: float, order: object) -> None:
    costs = [fact.cost_ns for fact in facts if isinstance(fact, Verdict)]
    known = known_of(facts)
    order.shuffle(facts)
    other = known_of(facts)
    assert (known.cost_ns, known.bounds, known.enough_bytes) == (other.cost_ns, other.bounds, other.enough_bytes)
    assert known.cost_ns == min(costs, default=None)
    assert known.bound(gap) == other.bound(gap)


@SETTINGS
@given(facts=st.lists(FACTS, max_size=6), gap=st.sampled_from((0.0, 0.1, 0.5)))
def test_a_bound_is_never_more_than_was_proved_in_its_own_space(facts: list[Verdict | Bound], gap: float) -> None:
    known = known_of(facts)
    bound = known.bound(gap)
    proved = [fact.ns for fact in facts if isinstance(fact, Bound) and fact.within == bound.within]
    assert bound.ns <= max(proved, default=0) or (not bound.within and bound.ns <= max(TOTAL, *proved, 0))
    if known.cost_ns is not None:
        assert bound.ns <= known.cost_ns
        if bound.within:
            assert gap_of(known.cost_ns, known.whole_ns) > gap, "the whole space's bound is enough, and says more"


@SETTINGS
@given(
    facts=st.lists(FACTS, max_size=6),
    gap=st.sampled_from((0.0, 0.1, 0.5)),
    limit=st.sampled_from((None, "time", "cancel", "memory")),
    infeasible=st.booleans(),
)
def test_an_answer_says_what_its_numbers_say(
    facts: list[Verdict | Bound], gap: float, limit: str | None, infeasible: bool
) -> None:
    known = known_of(facts)
    if infeasible:
        known = Known(known.problem, bounds=known.bounds, least_bytes=101, infeasible=True)
    answer = known.answer("auto", gap, Ending(limit))
    if infeasible:
        assert (answer.status, answer.cost_ns, answer.bound_ns) == (Status.INFEASIBLE, None, None)
        assert "needs at least 101 B" in answer.message
    elif answer.cost_ns is None:
        assert answer.status is (Status.CANCELLED if limit == "cancel" else Status.NOTHING_FOUND)
        assert answer.limit == limit
    else:
        assert (answer.status is Status.OPTIMAL) == (answer.bound_ns == answer.cost_ns)
        assert (answer.limit == "gap") == (0 < answer.gap <= gap)
        assert known.settled(gap) == (answer.gap <= gap)
        if answer.gap > gap:
            assert answer.limit == limit
            assert (answer.status is Status.CANCELLED) == (limit == "cancel")
    assert answer.message == sentence(answer)


def test_the_space_that_was_searched_names_the_bound_where_there_is_no_plan() -> None:
    """Bounds of larger spaces hold there too; those of others, and of smaller ones, say nothing about it."""
    known = known_of([Bound(70), Bound(80, (ONE_PER_STAGE,)), Bound(90, (PERSISTENT,))])
    assert known.bound(searched=(ONE_PER_STAGE,)) == Bound(80, (ONE_PER_STAGE,))
    assert known.bound(searched=(ONE_PER_STAGE, PERSISTENT)) == Bound(90, (ONE_PER_STAGE, PERSISTENT))
    assert known.bound() == Bound(90, (PERSISTENT,))
    answer = known.answer("milp", ending=Ending("time", (ONE_PER_STAGE,), "None fits there."))
    assert (answer.status, answer.limit, answer.message) == (Status.NOTHING_FOUND, None, "None fits there.")
    assert (answer.bound_ns, answer.restricted_to) == (80, (ONE_PER_STAGE,))


def test_what_turned_out_wrong_is_forgotten() -> None:
    known = known_of([Bound(70), Bound(80, (ONE_PER_STAGE,))])
    assert known.without_bound((ONE_PER_STAGE,)).bound() == Bound(70)
    assert known.without_bound(()).bound() == Bound(80, (ONE_PER_STAGE,))
    assert known.without_bound(()).whole_ns == TOTAL


@pytest.mark.parametrize(("at", "asked"), list(product((14, 15, 20), repeat=2)))
def test_plans_serve_larger_budgets_and_bounds_smaller_ones(at: int, asked: int) -> None:
    curve = Curve(GRAPH)
    plan = plain_plan(GRAPH)
    curve.add(Answer(Status.FEASIBLE, "auto", at, cost_ns=TOTAL + 9, bound_ns=TOTAL + 7, peak_bytes=at, plan=plan))
    curve.bounded(at, TOTAL + 5)
    known = curve.at(asked)
    assert known.plan is (plan if asked >= at else None)
    assert known.whole_ns == (TOTAL + 5 if asked <= at else TOTAL)
    assert curve.bound(asked) == known.whole_ns
    assert known.infeasible == (asked < 15)
    assert known.enough_bytes == at
    if asked < at:
        curve.add(Answer(Status.INFEASIBLE, "auto", asked))
        assert curve.at(asked).infeasible
        assert curve.at(at).infeasible == (at < 15)
