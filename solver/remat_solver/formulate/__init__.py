"""Programs of a problem as plain arrays, which know no engine: Checkmate's, a tighter one, and variants."""

from .checkmate import checkmate
from .formulation import SECONDS_PER_ENTRY, Formulation, engine_bytes, entries
from .tight import Reductions, any_order, forward, reordered, tight

__all__ = [
    "SECONDS_PER_ENTRY",
    "Formulation",
    "Reductions",
    "any_order",
    "checkmate",
    "engine_bytes",
    "entries",
    "forward",
    "reordered",
    "tight",
]
