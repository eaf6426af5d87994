"""The local search as a method of its own: the best plans, and nothing proved."""

from __future__ import annotations

from dataclasses import dataclass

from ..incumbent import Incumbent
from ..search import Search
from .greedy import first_plan


@dataclass(frozen=True)
class SearchOptions:
    """The seed, and how many moves to make; without a number, until the time is up."""

    seed: int = 0
    iterations: int | None = None

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be an integer from 0 to 2^31 - 1, not {self.seed}")
        if self.iterations is not None and (type(self.iterations) is not int or self.iterations < 1):
            raise ValueError(f"iterations must be a positive integer or null, not {self.iterations}")


def run_search(incumbent: Incumbent, options: SearchOptions) -> None:
    """Offer the greedy plan, then whatever the local search finds."""
    first_plan(incumbent)
    if not incumbent.stopped():
        problem = incumbent.problem
        Search(problem.graph, problem.budget_bytes, options.seed).run(incumbent, options.iterations)
