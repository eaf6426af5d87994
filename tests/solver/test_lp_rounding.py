"""Two-phase rounding of the linear relaxation."""

from __future__ import annotations

import pytest
from benchmarks.graphs.architectures import ARCHITECTURES, training_graph

from remat_ir import Graph, Problem, Status, plain_peak
from remat_ir.restrictions import ONE_PER_STAGE
from remat_ir.working_set import working_set
from remat_solver import solve
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.methods.milp import has_room


def between(graph: Graph, part: float) -> Problem:
    """A budget so far of the way from the least need to the plain peak."""
    least, most = working_set(graph).least_bytes, plain_peak(graph)
    return Problem(graph, least + int(part * (most - least)))


def test_with_room_it_is_checkpoint_all() -> None:
    """Where the plain plan fits, the relaxation is integral and costs what each op once costs."""
    graph = training_graph(ARCHITECTURES["vgg16"](), 1)
    answer = solve(Problem(graph, plain_peak(graph)), method="lp-rounding", max_gap=0)
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == graph.total_cost_ns


@pytest.mark.thorough
def test_close_to_the_bound_on_a_linear_network() -> None:
    """The search over ε comes within 1 % of the relaxation's bound on VGG16, the paper's own factor; twice the same."""
    problem = between(training_graph(ARCHITECTURES["vgg16"](), 8), 0.6)
    answer = solve(problem, method="lp-rounding")
    assert answer.bound_ns <= answer.cost_ns <= 1.01 * answer.bound_ns
    assert answer.restricted_to in ((), (ONE_PER_STAGE,))
    assert solve(problem, method="lp-rounding").plan == answer.plan


@pytest.mark.slow
def test_the_search_over_epsilon_is_no_worse_than_the_printed_one() -> None:
    problem = between(training_graph(ARCHITECTURES["unet"](), 8), 0.75)
    printed = solve(problem, method="lp-rounding", max_gap=0, options={"epsilon": 0.1, "threshold": 0.5})
    searched = solve(problem, method="lp-rounding", max_gap=0)
    assert searched.cost_ns is not None
    assert printed.cost_ns is None or searched.cost_ns <= printed.cost_ns


def test_no_rounding_that_fits_is_said() -> None:
    """An ε so large that its relaxation has no solution: no plan is found, and none is claimed impossible."""
    problem = between(training_graph(ARCHITECTURES["vgg16"](), 1), 0.5)
    answer = solve(problem, method="lp-rounding", options={"epsilon": 0.9})
    assert answer.status is Status.NOTHING_FOUND
    assert answer.message == "No rounding of the relaxations tried fits the budget."


def test_a_relaxation_that_memory_cannot_hold_is_not_written() -> None:
    """As of the stage programs: the answer says which limit it was; of a linear network it has the chain's plan."""
    problem = between(training_graph(ARCHITECTURES["vgg16"](), 8), 0.6)
    answer = solve(problem, method="lp-rounding", max_gap=0, options={"memory_bytes": 100_000_000})
    assert (answer.status, answer.limit) == (Status.FEASIBLE, "memory")
    assert "chain program's (rotor)" in answer.message


@pytest.mark.thorough
def test_a_program_that_takes_longer_than_is_left_is_not_written() -> None:
    """Its size is known before: the answer says that it was the time."""
    problem = between(training_graph(ARCHITECTURES["vgg16"](), 8), 0.6)
    incumbent = Incumbent(problem, Deadline(60.0))
    assert has_room(incumbent, 10**6, 2**60)
    assert not has_room(incumbent, 10**9, 2**60)
    answer = incumbent.answer("milp")
    assert (answer.status, answer.limit) == (Status.NOTHING_FOUND, "time")
