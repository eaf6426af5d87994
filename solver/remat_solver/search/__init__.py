"""The local search: plans without proof, by annealing over sets of recomputations."""

from .local import Search, Starts, least_plan, polish

__all__ = ["Search", "Starts", "least_plan", "polish"]
