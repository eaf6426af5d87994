"""Under Inductor a new shape trains at once by a quick plan; the solver's is remembered for the next process."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from client.inductor_models import Layers
from client.test_inductor import compiled, outcome
from remat.planning.greedy import greedy_answer
from remat.planning.memo import Memo
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.planner import FallbackPlanner
from remat.profiling import measure
from remat_ir import Answer, Problem, budget_at, problem_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("own_caches")]


class Held:
    """Tight plans until it is told to hold; from then on plans that cost less, once it is told to go on."""

    def __init__(self) -> None:
        self.held, self.go = False, threading.Event()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        if self.held:
            assert self.go.wait(60)
            return greedy_answer(problem)
        found = greedy_answer(Problem(problem.graph, budget_at(problem.graph, 0.75)))
        return replace(found, budget_bytes=problem.budget_bytes, digest=problem_digest(problem))


@pytest.mark.thorough
def test_no_step_waits_at_a_new_shape_and_the_next_process_has_the_better_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, held = Layers(), Held()
    planner = FallbackPlanner([held], memo=Memo(tmp_path / "answers"))
    small, large = torch.randn(256, 32), torch.randn(512, 32)
    plain = outcome(model, torch.compile(model, fullgraph=True, dynamic=False), large)
    torch._dynamo.reset()
    run, backend = compiled(model, budget=remat.Fraction(1.0), planner=planner)
    outcome(model, run, small)
    held.held = True
    found = outcome(model, run, large)  # the planner is still at work
    assert measure.differences(plain, found) == []
    first, quick = backend.answers
    assert quick.cache == "near"
    assert quick.plan == first.plan
    assert quick.overhead > 0
    held.go.set()
    for _ in range(600):
        if planner.memo is not None and any((tmp_path / "answers" / "alike").glob("*/*")):
            break
        time.sleep(0.1)
    assert measure.differences(found, outcome(model, run, large)) == []
    assert len(backend.answers) == 2, "no step of a process runs by other kernels than the one before"
    torch._dynamo.reset()
    again, later = compiled(model, budget=remat.Fraction(1.0), planner=planner)
    outcome(model, again, small)
    assert measure.differences(plain, outcome(model, again, large)) == []
    assert later.answers[-1].cost_ns < quick.cost_ns
