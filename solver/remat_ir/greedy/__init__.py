"""A valid plan at once, in plain Python, with nothing proved about it: evict under pressure, recompute on demand.

The ops are run in order inside the budget. Where memory is short, the resident value is evicted that costs the least to
make again per byte and per op until its next use, and missing inputs are recomputed on demand. The idea is that of
dynamic tensor rematerialization (Kirisame et al., 2021, Section 3), with the true next use in place of its staleness,
since the whole step is known here. The verifier never imports this package.
"""

from .plans import WEIGHTS, checkpointed, greedy_plan, greedy_plans, least_memory, peak_of
from .prune import without_needless
from .walk import walk

__all__ = [
    "WEIGHTS",
    "checkpointed",
    "greedy_plan",
    "greedy_plans",
    "least_memory",
    "peak_of",
    "walk",
    "without_needless",
]
