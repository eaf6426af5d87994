"""Real architectures train exactly, by random plans and by a planner's, in the memory that was predicted."""

from __future__ import annotations

import pytest
import torch

from client.test_exact import callable_of, everything_again, outcome, peak, random_plan
from client.zoo import ZOO, build
from remat import measure
from remat.greedy import greedy_answer, least_plan
from remat.profiles import MemoryProfiles
from remat.step import running_peak, training_step
from remat_ir import Plan, Problem, plain_peak, plain_plan, verify

TABLE = MemoryProfiles()
QUICK = ("gpt2",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(ZOO)])
def test_an_architecture_trains_exactly_within_its_budget(name: str) -> None:
    torch.set_num_threads(1)
    case = build(name)
    step = training_step(case.module, case.args, case.kwargs, table=TABLE)
    graph = step.graph
    stock = outcome(case, callable_of(case, step, plain_plan(graph)))
    plans: list[Plan] = [plain_plan(graph), everything_again(step), random_plan(step, 1)]
    plain = plain_peak(graph)
    tightest = least_plan(graph, time_limit_s=5)
    least = verify(Problem(graph, plain), tightest).peak_bytes
    assert least < plain
    for quarters in (3, 2, 1):
        budget = least + (plain - least) * quarters // 4
        found = greedy_answer(Problem(graph, budget), time_limit_s=10, max_gap=0.01).plan
        assert isinstance(found, Plan)
        plans.append(found)
        assert running_peak(step, found) <= budget
    plans.append(tightest)
    for plan in plans:
        function = callable_of(case, step, plan)
        assert measure.differences(stock, outcome(case, function)) == []
    for plan in (plans[0], plans[-1]):
        predicted = running_peak(step, plan) - graph.fixed_bytes
        assert peak(case, callable_of(case, step, plan)) == pytest.approx(predicted, rel=0.01, abs=256)
