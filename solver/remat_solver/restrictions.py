"""Names of the restricted spaces that a search may be confined to, as they appear in `Answer.restricted_to`.

The whole space is: the fixed op order, any number of recomputations, any subset of outputs kept at each computation.
A bound proved inside a restriction is a bound there only, and never leaves it.
"""

from __future__ import annotations

ONE_PER_STAGE = "one-recomputation-per-stage"
"""Between the first computations of two successive ops, each op is recomputed at most once, and in op order (Checkmate,
Section 4.2)."""


def recomputations_per_stage(sweeps: int) -> str:
    """The name of the space of `sweeps` such passes between two first computations (Checkmate, Section 4.10)."""
    return ONE_PER_STAGE if sweeps == 1 else f"{sweeps}-recomputations-per-stage"


FORWARD_OPS = "forward-ops-in-backward-stages"
"""Only ops before `backward_from` are recomputed, and only once all of them have run."""

PERSISTENT = "persistent-schedules"
"""A saved value stays until its backward op has used it (RR-9302, Section 4.1)."""

MEMORY_SLOTS = "memory-slots"
"""Sizes are rounded up to whole memory slots (RR-9302, Section 5.2)."""

NO_TRANSFERS = "no-transfers"
"""Nothing is moved to the host, although the chain has a link."""

CHAIN_STAGES = "chain-stages"
"""A linear graph is taken as a chain: a forward step that keeps its tape comes before each backward step."""
