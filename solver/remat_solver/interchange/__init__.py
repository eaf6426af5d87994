"""Programs and solutions as files: MPS and LP for any engine, and the solution files that engines return."""

from .model import FORMATS, lp, mps
from .solution import read_solution, solution_text

__all__ = ["FORMATS", "lp", "mps", "read_solution", "solution_text"]
