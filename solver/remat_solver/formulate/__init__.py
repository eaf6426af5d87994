"""Programs of a problem as plain arrays, which know no engine: Checkmate's, a tighter one, and variants."""

from .checkmate import checkmate
from .formulation import Formulation
from .order import any_order, reordered
from .size import SECONDS_PER_ENTRY, engine_bytes, entries
from .tight import Reductions, forward, tight

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
