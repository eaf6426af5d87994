"""Incumbents: plans found without proof, by an eviction greedy at once and by a local search from then on."""

from .local import Search, await_compiled, compiling, first_plan, is_compiled, polish

__all__ = ["Search", "await_compiled", "compiling", "first_plan", "is_compiled", "polish"]
