"""Chains: the persistent dynamic program over memory slots, its baselines, and what graphs are chains in disguise."""

from .needs import Least
from .network import LinearNetwork, linear_network
from .persistent import slots_for
from .reach import Reach, reach
from .revolve import revolve
from .rotor import RotorOptions, rotor
from .sequential import SequentialOptions, segmented_plan, sequential
from .table import Table

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
