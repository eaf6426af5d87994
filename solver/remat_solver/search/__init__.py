"""The local search: plans without proof, by annealing over sets of recomputations."""

from .every import MOST_VALUES, try_every_plan
from .local import Search, Starts, least_plan, move_s, polish

__all__ = ["MOST_VALUES", "Search", "Starts", "least_plan", "move_s", "polish", "try_every_plan"]
