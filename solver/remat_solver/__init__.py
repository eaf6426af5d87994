"""From a problem to an answer: bounds, incumbents, programs, engines, and the methods that combine them."""

from remat_ir.batch import LargestBatch

from .batch import max_batch
from .least import least_budget
from .methods import METHODS
from .solve import solve
from .sweep import sweep

__all__ = ["METHODS", "LargestBatch", "least_budget", "max_batch", "solve", "sweep"]
