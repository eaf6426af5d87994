"""Every private name of Inductor that the client uses, behind a self-test of its own; imported only when asked for."""

from .code import Event, Generated, alone, generated
from .compiling import (
    Plain,
    compile_graph,
    copied,
    dry_run,
    is_seed,
    plain_code,
    prefers_channels_last,
    run,
)
from .operators import channels_last_cat, force_stride_order, materialized_copy, stored
from .parts import CustomKnapsackSolver, config, is_fusible_node

__all__ = [
    "CustomKnapsackSolver",
    "Event",
    "Generated",
    "Plain",
    "alone",
    "channels_last_cat",
    "compile_graph",
    "config",
    "copied",
    "dry_run",
    "force_stride_order",
    "generated",
    "is_fusible_node",
    "is_seed",
    "materialized_copy",
    "plain_code",
    "prefers_channels_last",
    "run",
    "stored",
]
