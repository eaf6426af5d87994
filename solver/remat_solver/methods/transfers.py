"""Keep, recompute or offload: the method for graphs with a link to the host, and baselines."""

from __future__ import annotations

from remat_ir import Chain, Graph

from ..incumbent import Incumbent
from ..offload import method as of_chain
from ..transfers import baselines, method
from ..transfers.method import TransferOptions, keep_recompute_offload, search_of


def transfers(incumbent: Incumbent, options: TransferOptions) -> None:
    """Plan a graph or a chain with a link, without the general solver's plans for the start."""
    if _has_link(incumbent):
        keep_recompute_offload(incumbent, options)


def offload_only(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that computes each op once and moves what memory asks for."""
    if _has_link(incumbent) and search_of(incumbent).offload_only() is None:
        incumbent.ends_without_plan("Moving values is not enough.")


def layer_fractions(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan of fractions of layers by a linear program, and a greedy inside them; of a chain, its lift's plan
    with tapes moved whole.
    """
    if not _has_link(incumbent):
        return
    search = search_of(incumbent)
    baselines.layer_fractions(search.linked)
    if search.linked is not incumbent and search.linked.plan is not None:
        search.adopt(search.linked.plan)
    if incumbent.plan is None:
        incumbent.ends_without_plan(search.linked.reason)


def offload_all(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and recomputes nothing."""
    if _has_link(incumbent):
        method.offload_all(incumbent)


def save_on_cpu(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and waits for each copy."""
    if _has_link(incumbent):
        chained = isinstance(incumbent.problem.subject, Chain)
        (of_chain.save_on_cpu if chained else baselines.save_on_cpu)(incumbent)


def _has_link(incumbent: Incumbent) -> bool:
    """Whether a graph or a chain has a link; says so where it has none."""
    subject = incumbent.problem.subject
    if isinstance(subject, (Graph, Chain)) and subject.link is not None:
        return True
    incumbent.ends_without_plan(f"This {incumbent.problem.kind} has no link to the host: give it one.")
    return False
