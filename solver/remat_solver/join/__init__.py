"""Join networks in memory slots: the optimal dynamic program, its schedules, and the equivalent chain as a baseline."""

from .method import equiv_chain, equivalent_plan, join
from .table import JoinTable, chain_steps, states

__all__ = [
    "JoinTable",
    "chain_steps",
    "equiv_chain",
    "equivalent_plan",
    "join",
    "states",
]
