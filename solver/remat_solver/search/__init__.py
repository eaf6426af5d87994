"""The local search: plans without proof, by annealing over sets of recomputations."""

from .compiler import await_compiled, compiling, is_compiled
from .downwards import least_plan
from .local import Search, polish
from .starts import Starts

__all__ = ["Search", "Starts", "await_compiled", "compiling", "is_compiled", "least_plan", "polish"]
