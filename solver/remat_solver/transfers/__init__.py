"""Graphs and chains with a link to the host: what to keep, recompute or move; of graphs, a bound on every makespan."""

from .method import TransferOptions, keep_recompute_offload, search_of

__all__ = ["TransferOptions", "keep_recompute_offload", "search_of"]
