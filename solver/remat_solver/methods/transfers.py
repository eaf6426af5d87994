"""Keep, recompute or offload: the method for graphs with a link to the host, and baselines."""

from __future__ import annotations

from collections.abc import Callable

from remat_ir import Chain

from .. import offload
from ..incumbent import Incumbent
from ..transfers import TransferOptions, TransferSearch, baselines, keep_recompute_offload

__all__ = ["TransferOptions", "layer_fractions", "offload_all", "offload_only", "save_on_cpu", "transfers"]


def transfers(incumbent: Incumbent, options: TransferOptions) -> None:
    """Plan a graph with a link, without the general solver's plans for the start."""
    if _has_link(incumbent):
        keep_recompute_offload(incumbent, options)


def offload_only(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that computes each op once and moves what memory asks for."""
    if _has_link(incumbent) and TransferSearch(incumbent).offload_only() is None:
        incumbent.ends_without_plan("Moving values is not enough.")


def layer_fractions(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan of fractions of layers by a linear program, and a greedy inside them."""
    if _has_link(incumbent):
        baselines.layer_fractions(incumbent)


def offload_all(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and recomputes nothing."""
    _either(incumbent, offload.offload_all, baselines.offload_all)


def save_on_cpu(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and waits for each copy."""
    _either(incumbent, offload.save_on_cpu, baselines.save_on_cpu)


def _either(incumbent: Incumbent, of_chain: Callable[[Incumbent], None], of_graph: Callable[[Incumbent], None]) -> None:
    if isinstance(incumbent.problem.subject, Chain):
        of_chain(incumbent)
    elif _has_link(incumbent):
        of_graph(incumbent)


def _has_link(incumbent: Incumbent) -> bool:
    """Whether a graph has a link; says so where it has none."""
    if incumbent.problem.graph.link is None:
        incumbent.ends_without_plan("This graph has no link to the host: give it one.")
        return False
    return True
