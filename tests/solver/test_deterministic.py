"""Work counted in place of time: the same seed gives the same plan and bound, however busy the machine is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from benchmarks.graphs.instances import instance

from drawn import posed
from remat_ir import Answer, InvalidData, Link, Problem
from remat_solver import solve
from remat_solver.deadline import Deadline, Work
from solver.little import little_graph

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
