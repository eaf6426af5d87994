"""From a problem to an answer: bounds, incumbents, programs, engines, and the methods that combine them."""

from .batch import LargestBatch, max_batch
from .methods import METHODS
from .solve import solve
from .sweep import sweep

__all__ = ["METHODS", "LargestBatch", "max_batch", "solve", "sweep"]
