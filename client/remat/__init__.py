"""Train inside a memory budget: capture a torch model's training step, have it planned, run it by the plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remat_ir import Answer, Graph, Plan, Problem, verify

if TYPE_CHECKING:
    from .batch import LargestBatch, max_batch
    from .buckets import Buckets
    from .budget import ActivationBytes, Fraction
    from .chain_training import checkpoint_sequential, optimize_chain
    from .dynamo import backend
    from .errors import BudgetTooSmall, CaptureError, NothingFound, PlanningError, RematError, ServiceError
    from .execute import Planned, Rematerialized
    from .inplace import disable, enable
    from .join_training import optimize_join
    from .planner import GreedyPlanner, LocalPlanner, Planner, ServicePlanner, planner_for, profile_table
    from .profiles import Profile, ProfileTable
    from .ranks import RankPlanner, RanksDiffer
    from .report import explain
    from .settings import Settings
    from .training import optimize

_HOMES = {
    "BudgetTooSmall": "errors",
    "CaptureError": "errors",
    "NothingFound": "errors",
    "PlanningError": "errors",
    "RanksDiffer": "ranks",
    "RankPlanner": "ranks",
    "RematError": "errors",
    "ServiceError": "errors",
    "ActivationBytes": "budget",
    "Fraction": "budget",
    "Planned": "execute",
    "Rematerialized": "execute",
    "explain": "report",
    "optimize": "training",
    "GreedyPlanner": "planner",
    "LocalPlanner": "planner",
    "Planner": "planner",
    "ServicePlanner": "planner",
    "planner_for": "planner",
    "profile_table": "planner",
    "Profile": "profiles",
    "ProfileTable": "profiles",
    "Settings": "settings",
    "backend": "dynamo",
    "checkpoint_sequential": "chain_training",
    "optimize_chain": "chain_training",
    "optimize_join": "join_training",
    "LargestBatch": "batch",
    "Buckets": "buckets",
    "max_batch": "batch",
    "disable": "inplace",
    "enable": "inplace",
}
"""Where each public name lives; loaded when first asked for, so that `import remat` needs no torch and stays quick.

A public name must not be that of a module here: importing the module would hide it."""

__all__ = [
    "ActivationBytes",
    "Answer",
    "Buckets",
    "BudgetTooSmall",
    "CaptureError",
    "Fraction",
    "Graph",
    "GreedyPlanner",
    "LargestBatch",
    "LocalPlanner",
    "NothingFound",
    "Plan",
    "Planned",
    "Planner",
    "PlanningError",
    "Problem",
    "Profile",
    "ProfileTable",
    "RankPlanner",
    "RanksDiffer",
    "RematError",
    "Rematerialized",
    "ServiceError",
    "ServicePlanner",
    "Settings",
    "backend",
    "checkpoint_sequential",
    "disable",
    "enable",
    "explain",
    "max_batch",
    "optimize",
    "optimize_chain",
    "optimize_join",
    "planner_for",
    "profile_table",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
