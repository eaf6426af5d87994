"""The staged proof against brute force, in the whole space and in the restricted one, and on known optima."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import examples, posed
from remat_ir import Answer, Graph, Problem, Progress, Status, plain_peak, verify_answer
from remat_ir.graph import working_set
from remat_ir.greedy import greedy_plan
from remat_solver import solve
from remat_solver.array_view import trace, view_of
from remat_solver.backends.engine import Engine
from remat_solver.backends.outcome import Outcome
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.methods.heuristics import polished
from remat_solver.staged.prove import Proof
from remat_solver.staged.relaxation import in_order, point
from remat_solver.staged.rows import Rows, write
from remat_solver.staged.scale import balance_of, balanced, scale_of
from solver.brute import FIXED_ORDER, optimum
from solver.little import little_graph, little_problems, problems
from tiers import first

GRAPHS = Path(__file__).resolve().parent.parent / "graphs"


def prove(problem: Problem, engine: Engine, *, certify: bool = True) -> tuple[Answer, list[Progress]]:
    news: list[Progress] = []
    incumbent = Incumbent(problem, Deadline(60), 0.0, news.append, certify=certify)
    Proof(incumbent).run(engine)
    return incumbent.answer("staged"), news


def agrees(problem: Problem, engine: Engine, *, certify: bool = True) -> None:
    """Every bound holds, "optimal" and infeasible are true; certificates prove them."""
    free = optimum(problem, FIXED_ORDER).cost_ns
    answer, news = prove(problem, engine, certify=certify)
    proved = verify_answer(problem, answer)
    for one in news:
        if free is not None and one.whole_bound_ns is not None:
            assert one.whole_bound_ns <= free
        if free is not None and one.bound_ns is not None:
            assert one.bound_ns <= free
    assert free is None or proved.bound_ns <= free
    if answer.status is Status.INFEASIBLE:
        assert proved.infeasible
        assert free is None
    elif answer.status is Status.OPTIMAL:
        assert answer.cost_ns == free
        assert not certify or proved.bound_ns == free
    assert not answer.restricted_to


@pytest.mark.parametrize("certify", [False, True])
@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(problem=problems(most_ops=6))
def test_bounds_and_optima_agree_with_brute_force(engine: Engine, problem: Problem, certify: bool) -> None:
    assume(problem.budget_bytes >= working_set(problem.graph).least_bytes)  # else solve() says so without a proof
    agrees(problem, engine, certify=certify)


@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(problems(most_ops=7), st.lists(st.integers(0, 6), max_size=6, unique=True))
def test_a_cut_more_never_lowers_the_linear_bound(engine: Engine, problem: Problem, cuts: list[int]) -> None:
    assume(problem.budget_bytes >= working_set(problem.graph).least_bytes)
    view = view_of(problem)
    assume(view.tight_from < view.ops)
    scale = scale_of(view)
    best = optimum(problem, FIXED_ORDER).cost_ns
    last = view.ops - 1
    rows = Rows({min(max(0, view.tight_from - 1), last), last})
    reached = 0.0
    for cut in [*(cut for cut in cuts if cut < last and cut not in rows.cuts), None]:
        program = write(view, rows, scale).program
        if program.rows:
            outcome = engine.lp(program, deadline=Deadline(20))
            if outcome.status == "infeasible":
                assert best is None
                return
            assert outcome.bound >= reached - 1e-6
            reached = outcome.bound
            assert best is None or scale.bound_ns(view, outcome.bound, whole=False) <= best
        if cut is not None:
            rows.cut(cut)


@settings(deadline=None, derandomize=True, max_examples=examples(300))
@given(st.data(), st.integers(0, 10_000), st.booleans())
def test_charged_recomputations_exclude_no_plan(engine: Engine, data: st.DataObject, seed: int, rich: bool) -> None:
    """Any sequence, in a budget of just its peak, satisfies every row (h) that can be written."""
    graph = little_graph(seed, data.draw(st.integers(5, 9)), rich=rich)
    ops = st.integers(1, graph.ops - 1)
    extra = data.draw(st.lists(st.tuples(ops, ops), min_size=2, max_size=20))
    sequence = in_order(graph.ops, [(stage, op) for stage, op in extra if op < stage <= graph.last_stage[op]])
    cuts = data.draw(st.sets(ops, min_size=1)) | {graph.ops - 1}
    view = view_of(Problem(graph, plain_peak(graph) + sum(graph.value_bytes)))
    run = trace(view, sequence)
    view = view_of(Problem(graph, run.peak + graph.fixed_bytes))
    rows = Rows(cuts, recomputations={cut: set(range(graph.ops)) for cut in cuts})
    written = write(view, rows, scale_of(view))
    assume(written.program.columns)
    x = point(view, written.columns, run)
    lower, upper = written.program.lower.copy(), written.program.upper.copy()
    lower[: len(x)] = upper[: len(x)] = x
    fixed = replace(written.program, lower=lower, upper=upper)
    assert engine.lp(fixed, deadline=Deadline(20)).status == "optimal"


def test_the_spans_are_why(engine: Engine) -> None:
    view = view_of(posed(Graph.from_json((GRAPHS / "made-resnet50.json").read_text()), 0.2))
    last, bounds = view.ops - 1, {}
    for nested in (False, True):
        rows = Rows({view.tight_from - 1, last})
        reached: list[float] = []
        for cut in (181, 313, 305, 335, 210, None):
            program = write(view, rows, scale_of(view), nested=nested).program
            outcome = engine.lp(balanced(program), deadline=Deadline(20))
            reached.append(outcome.bound / balance_of(program))
            if cut is not None:
                rows.cut(cut)
        bounds[nested] = reached
    assert all(b >= a - 1e-6 * abs(a) - 1.0 for a, b in zip(bounds[True], bounds[True][1:], strict=False))
    assert min(bounds[False][2:]) < bounds[False][1]
    assert bounds[True][-1] > bounds[False][-1]


def test_linear_programs_look_ahead_where_no_memory_is_broken(engine: Engine) -> None:
    problem = posed(instance("unet-2-whole"), 0.5)
    bounds = {}
    for certify in (False, True):
        incumbent = Incumbent(problem, Deadline(60), 0.0, certify=certify)
        if certify:
            # only where a plan is known there is a gap to close
            plan = greedy_plan(problem.graph, problem.budget_bytes)
            assert plan is not None
            incumbent.offer(plan, "greedy")
        proof = Proof(incumbent)
        proof._linear(engine)
        bounds[certify] = incumbent.bound_ns
        if not certify:
            rows = proof.refinement.rows
            before = set(rows.cuts), list(rows.spans)
            assert rows.with_cut(max(rows.cuts) - 1) != rows
            assert (rows.cuts, rows.spans) == before
    assert bounds[True] > bounds[False] > problem.graph.total_cost_ns


def known(name: str, fraction: float, percent: float, *, slow: bool = False) -> object:
    return pytest.param(name, fraction, percent, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("name", "fraction", "percent"),
    [
        known("made-gpt12", 0.5, 5.794),
        known("made-resnet50", 0.5, 7.340),
        known("made-unet", 0.75, 1.828),
        known("made-unet", 0.5, 4.352),
        known("made-gpt12", 0.75, 2.408, slow=True),
        known("made-gpt12", 0.4, 10.942, slow=True),
        known("made-resnet50", 0.75, 3.042, slow=True),
        known("made-rt100", 0.75, 4.293, slow=True),
        known("made-rt100", 0.5, 27.193, slow=True),
        known("made-rt250", 0.75, 3.357, slow=True),
    ],
)
def test_known_optima(engine: Engine, name: str, fraction: float, percent: float) -> None:
    problem = posed(Graph.from_json((GRAPHS / f"{name}.json").read_text()), fraction)
    # what HiGHS says is within its tolerance, so to the last ns it proves none of these
    incumbent = Incumbent(problem, Deadline(240), 1e-6)
    Proof(incumbent, polish=polished(incumbent)).run(engine)
    answer = incumbent.answer("staged")
    assert not answer.restricted_to
    assert answer.gap <= 1e-6
    assert round(100 * answer.overhead, 3) == percent


def test_a_point_of_the_relaxation_costs_what_its_plan_recomputes() -> None:
    """Every plan maps to a feasible point of the relaxation that costs no more, whatever the cuts."""
    for seed in range(20):
        for problem in little_problems(seed, 7, budgets=3):
            plan = optimum(problem, FIXED_ORDER).plan
            view = view_of(problem)
            if plan is None or view.tight_from == view.ops:
                continue
            run = trace(view, plan.computes)
            if run.peak > view.capacity:
                continue  # an optimum that frees and keeps more cleverly than its bare sequence says
            extra = sum(problem.graph.op_cost_ns[op] for op in plan.computes) - problem.graph.total_cost_ns
            for cuts in (
                {view.ops - 1},
                {0, view.ops - 1},
                {1, view.ops // 2, view.ops - 1},
                set(range(view.ops)),
            ):
                written = write(view, Rows(cuts), scale_of(view))
                x = point(view, written.columns, run)
                assert written.program.violation(x) <= 0
                assert scale_of(view).cost_ns * written.program.objective(x) <= extra


@pytest.mark.parametrize("certify", [True, False])
@pytest.mark.parametrize(("name", "fraction"), first(1, [("random-70", 0.5), ("random-90", 0.5), ("dag-60", 0.6)]))
def test_what_the_time_ends_says_so(name: str, fraction: float, certify: bool) -> None:
    """Engines end before the time is up, for their last word; an answer without a limit would count as final."""
    problem = posed(instance(name), fraction)
    answer = solve(problem, method="staged", time_limit_s=2, max_gap=0, certify=certify)
    assert answer.status in (Status.FEASIBLE, Status.NOTHING_FOUND)
    assert (answer.limit, answer.ran_to_its_end) == ("time", False)


def test_a_tree_whose_last_word_does_not_come_in_time_ends_nothing() -> None:
    """On a busy machine an engine may be ended before it has written its tree: a point alone settles no rows."""

    class Late(Engine):
        def tree(self, *arguments: Any, **more: Any) -> Outcome:
            return super().tree(*arguments, **more)._replace(tree=None)

    problem = posed(instance("random-70"), 0.5)
    proof = Proof(Incumbent(problem, Deadline(3), 0.0, certify=True))
    with Late("highs") as late:
        proof._grow(late)
    assert proof.out_of_time
