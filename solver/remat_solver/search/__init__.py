"""Incumbents: plans found without proof, by an eviction greedy at once and by a local search from then on."""

from .greedy import greedy, least_memory
from .local import Search, await_compiled, compiling, first_plan, is_compiled, polish

__all__ = ["Search", "await_compiled", "compiling", "first_plan", "greedy", "is_compiled", "least_memory", "polish"]
