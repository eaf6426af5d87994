"""The program over blocks as a method of its own."""

from __future__ import annotations

from ..blocks import plans_by_blocks
from ..incumbent import Incumbent
from .staged import polished


def run_blocks(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that the chain program over a graph's blocks leads to, and what the search makes of it."""
    applies = plans_by_blocks(incumbent, polish=polished(incumbent, source="blocks"))
    if not applies:
        incumbent.ends_without_plan("blocks does not apply: the forward pass has no narrow places to cut it at.")
    elif incumbent.plan is None and not incumbent.stopped():
        incumbent.ends_without_plan("blocks has no plan within the budget.")
