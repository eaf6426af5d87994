"""The local search: plans without proof, by annealing over sets of recomputations."""

from .compiler import await_compiled, compiling, is_compiled
from .downwards import least_plan
from .local import Search, polish

__all__ = ["Search", "await_compiled", "compiling", "is_compiled", "least_plan", "polish"]
