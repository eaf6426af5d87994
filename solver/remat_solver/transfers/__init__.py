"""Graphs with a link to the host: what to keep, recompute or move, and a bound on the makespan of every plan."""

from .method import TransferOptions, keep_recompute_offload
from .search import TransferSearch

__all__ = ["TransferOptions", "TransferSearch", "keep_recompute_offload"]
