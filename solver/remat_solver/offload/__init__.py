"""Chains with a link to the host: what to keep, recompute or move, first in the fluid model, then tensor by tensor."""

from .bound import makespan_bound
from .fluid import Schedule, fluid_makespan
from .method import ENOUGH_SLOTS, MOST_SLOTS, PofoOptions, offload_all, pofo, repaired_plan, save_on_cpu, tensor_plan
from .table import OffloadTable

__all__ = [
    "ENOUGH_SLOTS",
    "MOST_SLOTS",
    "OffloadTable",
    "PofoOptions",
    "Schedule",
    "fluid_makespan",
    "makespan_bound",
    "offload_all",
    "pofo",
    "repaired_plan",
    "save_on_cpu",
    "tensor_plan",
]
