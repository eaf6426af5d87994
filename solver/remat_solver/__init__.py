"""From a problem to an answer: bounds, incumbents, programs, engines, and the methods that combine them."""

from .methods import METHODS
from .solve import solve

__all__ = ["METHODS", "solve"]
