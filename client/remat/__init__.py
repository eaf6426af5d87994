"""Train inside a memory budget: capture a torch model's training step, have it planned, run it by the plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remat_ir import Answer, Graph, Plan, Problem, verify

if TYPE_CHECKING:
    from .chains.join_training import optimize_join
    from .chains.training import checkpoint_sequential, optimize_chain
    from .errors import BudgetTooSmall, CaptureError, NothingFound, PlanningError, RematError, ServiceError
    from .planning.budget import ActivationBytes, Fraction, UnitBytes
    from .planning.planner import Planner, planner_for, profile_table
    from .planning.profiles import Profile, ProfileTable
    from .planning.sources import GreedyPlanner, LocalPlanner, ServicePlanner
    from .settings import Settings
    from .training.backend import backend
    from .training.batch import LargestBatch, max_batch
    from .training.buckets import Buckets
    from .training.execute import Planned, Rematerialized
    from .training.inplace import disable, enable
    from .training.optimize import optimize
    from .training.ranks import RankPlanner, RanksDiffer
    from .training.report import explain
    from .training.split import UnitPlans
    from .training.units import optimize_units

_HOMES = {
    "BudgetTooSmall": "errors",
    "CaptureError": "errors",
    "NothingFound": "errors",
    "PlanningError": "errors",
    "RanksDiffer": "training.ranks",
    "RankPlanner": "training.ranks",
    "RematError": "errors",
    "ServiceError": "errors",
    "ActivationBytes": "planning.budget",
    "UnitBytes": "planning.budget",
    "Fraction": "planning.budget",
    "Planned": "training.execute",
    "Rematerialized": "training.execute",
    "explain": "training.report",
    "optimize": "training.optimize",
    "GreedyPlanner": "planning.sources",
    "LocalPlanner": "planning.sources",
    "Planner": "planning.planner",
    "ServicePlanner": "planning.sources",
    "planner_for": "planning.planner",
    "profile_table": "planning.planner",
    "Profile": "planning.profiles",
    "ProfileTable": "planning.profiles",
    "Settings": "settings",
    "backend": "training.backend",
    "checkpoint_sequential": "chains.training",
    "optimize_chain": "chains.training",
    "optimize_join": "chains.join_training",
    "UnitPlans": "training.split",
    "optimize_units": "training.units",
    "LargestBatch": "training.batch",
    "Buckets": "training.buckets",
    "max_batch": "training.batch",
    "disable": "training.inplace",
    "enable": "training.inplace",
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
    "UnitBytes",
    "UnitPlans",
    "backend",
    "checkpoint_sequential",
    "disable",
    "enable",
    "explain",
    "max_batch",
    "optimize",
    "optimize_chain",
    "optimize_join",
    "optimize_units",
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
