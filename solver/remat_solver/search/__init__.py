"""The local search: plans without proof, by annealing over sets of recomputations."""

from .downwards import least_plan
from .local import Search, polish
from .starts import Starts

__all__ = ["Search", "Starts", "least_plan", "polish"]
