"""Chains with a link to the host: what to keep, recompute or move, first in the fluid model, then tensor by tensor."""

from .bound import makespan_bound
from .fluid import fluid_makespan
from .method import ENOUGH_SLOTS, MOST_SLOTS, PofoOptions, offload_all, pofo, save_on_cpu
from .schedule import Schedule
from .table import OffloadTable
from .tensors import repaired_plan, tensor_plan

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
