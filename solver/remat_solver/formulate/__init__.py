"""Programs of a problem as plain arrays, which know no engine: Checkmate's, a tighter one, and variants."""

from .checkmate import checkmate
from .formulation import Formulation
from .order import any_order, reordered
from .size import engine_bytes
from .tight import Reductions, forward, tight

__all__ = [
    "Formulation",
    "Reductions",
    "any_order",
    "checkmate",
    "engine_bytes",
    "forward",
    "reordered",
    "tight",
]
