"""Chains: the persistent dynamic program over memory slots, its baselines, and what graphs are chains in disguise."""

from .network import LinearNetwork, linear_network
from .persistent import slots_for
from .reach import Reach, reach
from .rotor import RotorOptions, SequentialOptions, revolve, rotor, segmented_plan, sequential
from .table import Least, Table

__all__ = [
    "Least",
    "LinearNetwork",
    "Reach",
    "RotorOptions",
    "SequentialOptions",
    "Table",
    "linear_network",
    "reach",
    "revolve",
    "rotor",
    "segmented_plan",
    "sequential",
    "slots_for",
]
