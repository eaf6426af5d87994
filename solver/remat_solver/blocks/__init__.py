"""Decomposition at narrow places: a training graph as a chain of blocks, of which equal ones are solved once."""

from .plans import menus_of, plans_by_blocks
from .segments import Block, Run, Segments, block_of, joined, runs_of, segments_of

__all__ = [
    "Block",
    "Run",
    "Segments",
    "block_of",
    "joined",
    "menus_of",
    "plans_by_blocks",
    "runs_of",
    "segments_of",
]
