"""Incumbents: plans found without proof, by an eviction greedy at once and by a local search from then on."""

from .greedy import greedy, least_memory

__all__ = ["greedy", "least_memory"]
