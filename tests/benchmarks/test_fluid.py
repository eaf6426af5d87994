"""The fluid replay, which the offload-and-recompute program is measured by: the program is exact in it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from benchmarks.solver.fluid import fluid_makespan
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples
from remat_ir import Chain, InvalidPlan, Problem, Verb, plain_peak, verify
from remat_solver.offload.method import makespan_bound, repaired_plan
from remat_solver.offload.table import OffloadTable, moved_bytes
from solver.offload_brute import all_schedules, tensor_plan

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


def best_fluid(chain: Chain, budget: int, price: int = 0) -> Fraction | None:
    """The least fluid makespan of any schedule that fits, a price in ns for each byte that is moved included."""
    best: Fraction | None = None
    for schedule in all_schedules(chain):
        try:
            found = fluid_makespan(chain, budget, schedule) + price * moved_bytes(chain, schedule)
        except InvalidPlan:
            continue
        if best is None or found < best:
            best = found
    return best


def check_exact(chain: Chain, beta: int, more: int, price: int = 0, *, leaves: bool) -> None:
    chain = replace(chain, link_bytes_per_s=beta * 1_000_000_000, input_may_leave=leaves)
    budget = chain.fixed_bytes + 1 + more % (plain_peak(chain) - chain.fixed_bytes + 1)
    table = OffloadTable(chain, budget, 200, price=price)
    best = best_fluid(chain, budget, price)
    schedule = table.schedule()
    if best is None:
        assert schedule is None
    else:
        assert schedule is not None
        assert table.makespan_ns == pytest.approx(float(best), abs=1e-6)
        assert fluid_makespan(chain, budget, schedule) + price * moved_bytes(chain, schedule) == best


@SETTINGS
@given(
    chains(most_stages=3, most=5),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 999),
    st.sampled_from([0, 0, 1, 5]),
    st.booleans(),
)
def test_exact_in_the_fluid_model(chain: Chain, beta: int, more: int, price: int, leaves: bool) -> None:
    """A byte a slot and whole bytes a ns: nothing is rounded, so the program is exact over its own schedules."""
    check_exact(chain, beta, more, price, leaves=leaves)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(chains(most_stages=4, most=4), st.sampled_from([1, 2]), st.integers(0, 999), st.booleans())
def test_exact_in_the_fluid_model_on_four_stages(chain: Chain, beta: int, more: int, leaves: bool) -> None:
    check_exact(chain, beta, more, leaves=leaves)


@SETTINGS
@given(chains(most_stages=6, most=60), st.integers(3, 20), st.data())
def test_slots_never_promise_too_much(chain: Chain, slots: int, data: st.DataObject) -> None:
    chain = replace(chain, link_bytes_per_s=data.draw(st.integers(1, 10**10)), input_may_leave=data.draw(st.booleans()))
    budget = chain.fixed_bytes + data.draw(st.integers(1, plain_peak(chain) - chain.fixed_bytes + 1))
    table = OffloadTable(chain, budget, slots)
    schedule = table.schedule()
    if schedule is not None:
        assert float(fluid_makespan(chain, budget, schedule)) <= table.makespan_ns * (1 + 1e-9) + 1e-6
        plan = tensor_plan(chain, budget, schedule)
        verdict = verify(Problem(chain, budget), plan)
        # tensor by tensor memory is freed later, so time is never less; but what need not leave is not brought back
        if sum(step.verb is Verb.PREFETCH for step in plan.steps) == len(schedule.moved):
            assert verdict.cost_ns >= float(fluid_makespan(chain, budget, schedule)) - 1e-6
        repaired = repaired_plan(Problem(chain, budget), schedule)
        assert makespan_bound(chain, budget) <= verify(Problem(chain, budget), repaired).cost_ns <= verdict.cost_ns
