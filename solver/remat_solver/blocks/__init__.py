"""Decomposition at narrow places: a training graph as a chain of blocks, of which equal ones are solved once."""

from .block import Block, block_of
from .plans import menus_of, plans_by_blocks
from .repeats import Run, joined, runs_of
from .segments import Segments, segments_of

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
