"""Keep, recompute or offload: the method for graphs with a link to the host."""

from __future__ import annotations

from ..incumbent import Incumbent
from ..transfers import TransferOptions, keep_recompute_offload

__all__ = ["TransferOptions", "transfers"]


def transfers(incumbent: Incumbent, options: TransferOptions) -> None:
    """Plan a graph with a link, without the general solver's plans for the start."""
    if incumbent.problem.graph.link is None:
        incumbent.ends_without_plan("This graph has no link to the host: give it one.")
        return
    keep_recompute_offload(incumbent, options)
