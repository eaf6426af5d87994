"""Auto: checkpoint-all where it fits, else search and proof side by side, by the clock or by work that is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings

from drawn import examples, graphs, posed
from remat_ir import Answer, Graph, InvalidData, Link, Problem, Progress, Status, budget_at, plain_peak, verify
from remat_ir.greedy import greedy_plans
from remat_ir.proof import prove
from remat_solver import solve
from remat_solver.bounds import least_need, pair_need
from remat_solver.deadline import Deadline, Work
from remat_solver.kernels import loading
from remat_solver.portfolio import give_way
from solver.little import little_graph
from solver.processes import printed
from tiers import first


@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(graphs(most_ops=12))
def test_a_budget_for_everything_is_settled_at_once(graph: Graph) -> None:
    answer = solve(Problem(graph, plain_peak(graph)))
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == graph.total_cost_ns


def hard() -> Problem:
    """A problem that is not settled in seconds."""
    return posed(instance("unet-6"), 0.3)


def test_progress_only_improves_and_ends_in_the_answer() -> None:
    news: list[Progress] = []
    answer = solve(
        hard(),
        time_limit_s=200,
        max_gap=0,
        on_progress=news.append,
        cancelled=lambda: len({n.source for n in news}) > 1,
    )
    costs = [one.cost_ns for one in news if one.cost_ns is not None]
    bounds = [one.whole_bound_ns for one in news if one.whole_bound_ns is not None]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert answer.cost_ns == costs[-1]
    assert news[0].source == "greedy"


def test_a_cancelled_solve_returns_its_best_and_leaves_no_process() -> None:
    told = threading.Event()
    answer = solve(
        hard(),
        time_limit_s=200,
        max_gap=0,
        on_progress=lambda news: told.set() if news.cost_ns is not None else None,
        cancelled=told.is_set,
    )
    assert answer.status is Status.CANCELLED
    assert answer.plan is not None
    assert not [child for child in psutil.Process().children() if "remat_solver" in " ".join(child.cmdline())]
    assert not [thread for thread in threading.enumerate() if thread.name == "search"]


def test_the_gap_that_was_asked_for_ends_it() -> None:
    answer = solve(posed(instance("resnet-4"), 0.6), time_limit_s=120, max_gap=0.05)
    assert answer.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert answer.gap <= 0.05


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX process groups")
@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a niceness of its own")
def test_a_thread_that_gives_way_changes_no_other() -> None:
    seen: list[int] = []

    def work() -> None:
        give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert before < seen[0] <= 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.parametrize("method", first(2, ["auto", "staged", "milp", "lp-rounding"]))
def test_an_engine_without_memory_ends_the_proof_and_not_the_solve(method: str) -> None:
    problem = hard()
    options = {"memory_bytes": 20 << 20}
    answer = solve(problem, method=method, time_limit_s=3, options=options)
    assert answer.bound_ns is not None
    if method == "auto":
        assert answer.status is Status.FEASIBLE
        assert answer.limit == "time"
    else:
        assert answer.limit == "memory"
    assert "memory" in answer.message


@pytest.mark.parametrize(("name", "fraction"), first(1, [("gpt-3", 0.75), ("tape-50", 0.6), ("resnet-4-whole", 0.6)]))
def test_within_a_wide_gap_no_answer_is_more_expensive_than_the_greedy_plan(name: str, fraction: float) -> None:
    """The first rule's plan is within the gap, so that the solve could end there; another rule has a cheaper one."""
    loading().wait()
    problem = posed(instance(name), fraction)
    costs = [verify(problem, plan).cost_ns for plan in greedy_plans(problem.graph, problem.budget_bytes)]
    assert costs[-1] < costs[0]
    answer = solve(problem, max_gap=0.1, time_limit_s=30)
    assert answer.cost_ns <= costs[-1]


@pytest.mark.slow
def test_without_a_plan_a_small_budget_that_is_enough_is_looked_for() -> None:
    """A dense random graph at half its peak, where greedy plans need all of it: the answer names far less as enough."""
    graph = instance("dag-250")
    loading().wait()
    answer = solve(Problem(graph, budget_at(graph, 0.5)), time_limit_s=40)
    assert answer.least_budget_bytes < 0.8 * plain_peak(graph)


def test_a_solve_ends_where_the_steps_to_come_gain_less_than_the_time_that_was_spent() -> None:
    """Of a problem that needs minutes: one step ends it with a gap that is left, unless the optimum is asked for."""
    problem = posed(instance("dag-250"), 0.75)
    loading().wait()
    hurried = solve(problem, steps=1, max_gap=1e-9, time_limit_s=60)
    assert hurried.limit == "gap"
    assert hurried.gap > 1e-9
    assert "1 steps could gain" in hurried.message
    assert solve(problem, steps=1, max_gap=0, time_limit_s=1).limit == "time"
    with pytest.raises(InvalidData, match="steps must be at least 1"):
        solve(problem, steps=0)


def test_without_the_proof_nothing_is_proved() -> None:
    """`proof: false` is the search alone: no bound beyond each op once, from no engine."""
    problem = posed(instance("resnet-4"), 0.5)
    sources: set[str] = set()
    answer = solve(problem, time_limit_s=1, options={"proof": False}, on_progress=lambda news: sources.add(news.source))
    assert answer.plan is not None
    assert answer.bound_ns == problem.graph.total_cost_ns
    assert answer.claimed_bound_ns is None
    assert "staged" not in sources


def test_a_certificate_counts_also_where_engines_are_believed() -> None:
    problem = posed(instance("resnet-4"), 0.5)
    proof = solve(problem, time_limit_s=60, max_gap=0.05).proof
    assert proof is not None
    bound = prove(problem, proof).bound_ns
    answer = solve(problem, method="greedy", proof=proof, certify=False)
    assert bound > problem.graph.total_cost_ns
    assert (answer.bound_ns, answer.claimed_by, answer.proof) == (bound, None, proof)


def test_a_cancelled_solve_of_a_hopeless_budget_looks_for_no_other() -> None:
    """The verdict stands by then; the budget that is said to be enough is the one that costs no time."""
    graph = instance("resnet-16")
    answer = solve(Problem(graph, least_need(graph)[0] - 1), cancelled=lambda: True)
    assert answer.status is Status.INFEASIBLE
    assert answer.least_budget_bytes == plain_peak(graph)


@pytest.mark.parametrize(("method", "options"), first(1, [("greedy", {}), ("milp-forward", {"memory_bytes": 1})]))
def test_a_method_without_a_plan_says_a_budget_that_is_enough_for_the_greedy_one(
    method: str, options: dict[str, object]
) -> None:
    graph = instance("densenet-8")
    least = pair_need(graph).least_bytes
    answer = solve(Problem(graph, least), method=method, options=options, time_limit_s=60)
    assert answer.status is Status.NOTHING_FOUND
    enough = answer.least_budget_bytes
    assert least < enough < 1.5 * least < plain_peak(graph)
    assert (
        solve(Problem(graph, enough), method=method if method == "greedy" else "auto", time_limit_s=5).plan is not None
    )


_LARGEST = """
import json, resource
from benchmarks.graphs.instances import instance
from remat_ir import Problem
from remat_solver import solve
from remat_ir.graph import working_set

if __name__ == "__main__":
    graph = instance("gpt-330")
    least = working_set(graph).least_bytes
    answer = solve(Problem(graph, least + least // 20), time_limit_s=40)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps([graph.ops, answer.cost_ns, *peaks]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units elsewhere")
def test_ten_thousand_ops_take_less_than_half_a_gigabyte() -> None:
    """As the docs state it."""
    ops, cost, own_kib, largest_engine_kib = json.loads(printed(_LARGEST))
    assert ops > 9_900
    assert cost is not None
    assert own_kib < 400 * 1024
    assert largest_engine_kib < 500 * 1024


# --- work counted in place of time: the same seed gives the same plan and bound, however busy the machine is

OPTIONS = {"deterministic": True}


@contextmanager
def busy() -> Iterator[None]:
    """Four processes that want all cores."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def counted(problem: Problem, seconds: float, seed: int = 0, **more: object) -> Answer:
    options = {**OPTIONS, "seed": seed, **more}
    return solve(problem, time_limit_s=seconds, max_gap=0.0, options=options)


def alike(one: Answer, other: Answer) -> bool:
    return (one.plan, one.cost_ns, one.bound_ns, one.proof, one.status, one.seconds) == (
        other.plan, other.cost_ns, other.bound_ns, other.proof, other.status, other.seconds
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "share", "seconds"),
    [
        ("little", 0.7, 0.3),
        pytest.param("unet-3", 0.5, 0.5, marks=pytest.mark.thorough),
        pytest.param("dag-100-s1", 0.6, 0.5, marks=pytest.mark.thorough),
        pytest.param("dense-100-s1", 0.75, 0.5, marks=pytest.mark.thorough),
    ],
)
def test_load_changes_nothing(name: str, share: float, seconds: float) -> None:
    problem = posed(little_graph(3, 24) if name == "little" else instance(name), share)
    first = counted(problem, seconds)
    with busy():
        again = counted(problem, seconds)
    assert first.cost_ns is not None
    assert alike(first, again)


@pytest.mark.thorough
def test_it_ends_by_work_with_a_plan_and_a_bound() -> None:
    problem = posed(instance("dag-100-s1"), 0.6)
    little, much = counted(problem, 0.1), counted(problem, 1.0)
    assert little.limit == "time"
    assert much.cost_ns <= little.cost_ns
    assert (much.bound_ns or 0) >= (little.bound_ns or 0)
    assert much.bound_ns > problem.graph.total_cost_ns
    assert "counted" in much.message


def test_it_says_what_it_does_not_take() -> None:
    problem = posed(little_graph(3, 12), 0.7)
    with pytest.raises(InvalidData, match="needs time_limit_s"):
        solve(problem, time_limit_s=None, options=OPTIONS)
    with pytest.raises(InvalidData, match="without a link"):
        solve(Problem(problem.graph.with_link(Link(1, 1)), problem.budget_bytes), options=OPTIONS)


def test_a_deadline_of_work_passes_as_it_is_spent() -> None:
    watch = Deadline(2.0, Work())
    part = watch.within(0.5)
    assert not part.passed()
    watch.spend(0.75)
    assert part.passed()
    assert (watch.elapsed(), watch.remaining(), part.remaining()) == (0.75, 1.25, 0.0)
    with watch.held():
        part.spend(1.25)
    assert watch.passed()
