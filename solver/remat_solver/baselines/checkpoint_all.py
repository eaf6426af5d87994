"""Checkpoint all: the plan without rematerialization, which is optimal wherever it fits."""

from __future__ import annotations

from remat_ir import plain_peak, plain_plan, readable

from ..incumbent import Incumbent


def checkpoint_all(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plain plan if it fits; no plan costs less, since every op runs at least once (Checkmate, Table 1)."""
    graph = incumbent.problem.graph
    peak = plain_peak(graph)
    incumbent.suffices(peak)
    if peak <= incumbent.problem.budget_bytes:
        incumbent.offer(plain_plan(graph), "checkpoint-all")
    else:
        incumbent.ends_without_plan(f"Keeping every value needs {readable(peak)}, over the budget.")
