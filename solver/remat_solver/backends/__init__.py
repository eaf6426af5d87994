"""Engines that solve programs, each in a child process that can be killed: HiGHS and CBC."""

from .engine import ENGINES, Engine, check_engine, check_memory, free_memory
from .outcome import CoverRow, Cutting, DerivedRow, Ending, Improvement, Outcome, Tree

__all__ = [
    "ENGINES",
    "CoverRow",
    "Cutting",
    "DerivedRow",
    "Ending",
    "Engine",
    "Improvement",
    "Outcome",
    "Tree",
    "check_engine",
    "check_memory",
    "free_memory",
]
