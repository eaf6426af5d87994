"""Chains: the persistent dynamic program over memory slots, its baselines, and what graphs are chains in disguise."""

from .linear import LinearGraph, linear_graph
from .needs import Least
from .reach import Reach, reach
from .revolve import revolve
from .rotor import RotorOptions, rotor
from .sequential import SequentialOptions, segmented_plan, sequential
from .table import Table

__all__ = [
    "Least",
    "LinearGraph",
    "Reach",
    "RotorOptions",
    "SequentialOptions",
    "Table",
    "linear_graph",
    "reach",
    "revolve",
    "rotor",
    "segmented_plan",
    "sequential",
]
