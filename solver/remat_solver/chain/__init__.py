"""Chains: the persistent dynamic program over memory slots, its baselines, and what graphs are chains in disguise."""

from .linear import LinearGraph, linear_graph
from .needs import Least
from .revolve import revolve
from .rotor import RotorOptions, rotor
from .sequential import SequentialOptions, segmented_plan, sequential
from .table import Table

__all__ = [
    "Least",
    "LinearGraph",
    "RotorOptions",
    "SequentialOptions",
    "Table",
    "linear_graph",
    "revolve",
    "rotor",
    "segmented_plan",
    "sequential",
]
