"""Planners whose plans come when a test says so, or that note what they were asked."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from remat.planning.greedy import greedy_answer
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.sources import GreedyPlanner
from remat_ir import Answer, Problem, budget_at, problem_digest
from remat_ir.greedy import checkpointed


class OnDemand:
    """A tight plan for the first problem, which its like start on; those that cost less come when it is told to go on.

    Args:
        share: the memory that the first plan keeps to, of what plain training needs; None: as little as it can.
        max_gap: the gap at which its greedy walks end.
    """

    def __init__(self, share: float | None = None, max_gap: float = 0.001) -> None:
        self.share, self.max_gap, self.go = share, max_gap, threading.Event()
        self.asked, self.threads = 0, list[str]()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        self.asked += 1
        self.threads.append(threading.current_thread().name)
        if self.asked > 1:
            assert self.go.wait(60)
            return greedy_answer(problem, max_gap=self.max_gap)
        if self.share is None:
            return Answer.of_plan(problem, checkpointed(problem.graph), method="greedy")
        tight = Problem(problem.subject, budget_at(problem.subject, self.share))
        found = greedy_answer(tight, max_gap=self.max_gap)
        return replace(found, budget_bytes=problem.budget_bytes, digest=problem_digest(problem))


class Noting(GreedyPlanner):
    """Which problems it was asked for, and with which options."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.options: list[SolveOptions] = []

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        self.problems.append(problem)
        self.options.append(options)
        return super().plan(problem, options)
