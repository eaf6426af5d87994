"""The staged proof against brute force, in the whole space and in the restricted one, and on known optima."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings

from remat_ir import Answer, Problem, Progress, Status, verify
from remat_solver.backends import Engine
from remat_solver.bounds import working_set
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.restrictions import ONE_PER_STAGE
from remat_solver.staged.prove import Proof, Switches
from solver.brute import FIXED_ORDER, optimum
from solver.brute import ONE_PER_STAGE as RESTRICTED
from solver.little import problems


class Engines:
    """Engines that serve many small proofs, since starting one takes longer than they do."""

    def __init__(self) -> None:
        self.highs, self.cpsat = Engine("highs"), Engine("cpsat")

    def prove(self, problem: Problem, switches: Switches) -> tuple[Answer, list[Progress]]:
        news: list[Progress] = []
        incumbent = Incumbent(problem, Deadline(60), 0.0, news.append)
        Proof(incumbent, switches).run(self.highs, getattr(self, switches.engine))
        return incumbent.answer("staged"), news


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    both = Engines()
    yield both
    both.highs.close()
    both.cpsat.close()


def agrees(problem: Problem, engines: Engines, switches: Switches) -> None:
    """Every bound holds in its space, "optimal" is meant there, and infeasible is true."""
    free = optimum(problem, FIXED_ORDER).cost_ns
    within = optimum(problem, RESTRICTED).cost_ns
    answer, news = engines.prove(problem, switches)
    if answer.plan is not None:
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    for one in news:
        if free is not None and one.whole_bound_ns is not None:
            assert one.whole_bound_ns <= free
        if within is not None and one.bound_ns is not None:
            assert one.bound_ns <= within
    if answer.status is Status.INFEASIBLE:
        assert free is None
    elif answer.status is Status.OPTIMAL and not answer.restricted_to:
        assert answer.cost_ns == free
    elif answer.status is Status.OPTIMAL:
        assert answer.restricted_to == (ONE_PER_STAGE,)
        assert within is None or answer.cost_ns is not None
        assert within is None or answer.cost_ns <= within
    else:
        # it ran to its end without a plan: the restricted space holds none
        assert answer.status is Status.NOTHING_FOUND
        assert answer.restricted_to == (ONE_PER_STAGE,)
        assert within is None


@settings(deadline=None, derandomize=True, max_examples=60)
@given(problems(most_ops=6))
def test_bounds_and_optima_agree_with_brute_force(engines: Engines, problem: Problem) -> None:
    assume(problem.budget_bytes >= working_set(problem.graph).least_bytes)  # else solve() says so without a proof
    agrees(problem, engines, Switches())
