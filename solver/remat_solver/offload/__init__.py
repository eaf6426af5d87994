"""Chains with a link to the host: what to keep, recompute or move, first in the fluid model, then tensor by tensor."""

from .method import (
    ENOUGH_SLOTS,
    MOST_SLOTS,
    PofoOptions,
    makespan_bound,
    offload_all,
    pofo,
    repaired_plan,
    save_on_cpu,
    tensor_plan,
)
from .table import OffloadTable, Schedule

__all__ = [
    "ENOUGH_SLOTS",
    "MOST_SLOTS",
    "OffloadTable",
    "PofoOptions",
    "Schedule",
    "makespan_bound",
    "offload_all",
    "pofo",
    "repaired_plan",
    "save_on_cpu",
    "tensor_plan",
]
