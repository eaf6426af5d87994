"""Train inside a memory budget: capture a torch model's training step, have it planned, run it by the plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remat_ir import Answer, Graph, Link, Plan, Problem, verify

if TYPE_CHECKING:
    from .batch.buckets import Buckets
    from .batch.largest import LargestBatch, max_batch
    from .chains.join_training import optimize_join
    from .chains.training import checkpoint_sequential, optimize_chain
    from .compile.backend import backend
    from .compile.inductor.knapsack import MemoryBudgetSolver
    from .distributed.ranks import RankPlanner, RanksDiffer
    from .errors import (
        BudgetTooSmall,
        CaptureError,
        NothingFound,
        PlanMismatch,
        PlanningError,
        RematError,
        ServiceError,
    )
    from .pipelines.pipeline import PipelinePlans, optimize_pipeline
    from .planning.async_client import AsyncRemat
    from .planning.budget import ActivationBytes, Fraction, UnitBytes
    from .planning.coordinator import Coordinator, OneProcess
    from .planning.options import SolveOptions
    from .planning.planner import CoordinatedPlanner, Planner, planner_for
    from .planning.profiles import Profile, ProfileTable
    from .planning.sources import GreedyPlanner, LocalPlanner, ServicePlanner
    from .settings import Settings
    from .target.fit import fit
    from .training.compared import Comparison, check
    from .training.enable import disable, enable
    from .training.module import Rematerialized
    from .training.optimize import optimize
    from .training.planned import Planned
    from .training.report import explain
    from .training.save import save_plans
    from .training.selective import checkpoint_contexts
    from .units.split import UnitPlans
    from .units.units import optimize_units

_HOMES = {
    "AsyncRemat": "planning.async_client",
    "BudgetTooSmall": "errors",
    "CaptureError": "errors",
    "NothingFound": "errors",
    "PlanMismatch": "errors",
    "PlanningError": "errors",
    "RanksDiffer": "distributed.ranks",
    "RankPlanner": "distributed.ranks",
    "RematError": "errors",
    "ServiceError": "errors",
    "ActivationBytes": "planning.budget",
    "UnitBytes": "planning.budget",
    "Fraction": "planning.budget",
    "Planned": "training.planned",
    "Rematerialized": "training.module",
    "explain": "training.report",
    "save_plans": "training.save",
    "optimize": "training.optimize",
    "GreedyPlanner": "planning.sources",
    "LocalPlanner": "planning.sources",
    "Planner": "planning.planner",
    "ServicePlanner": "planning.sources",
    "planner_for": "planning.planner",
    "SolveOptions": "planning.options",
    "CoordinatedPlanner": "planning.planner",
    "Comparison": "training.compared",
    "Coordinator": "planning.coordinator",
    "OneProcess": "planning.coordinator",
    "Profile": "planning.profiles",
    "ProfileTable": "planning.profiles",
    "Settings": "settings",
    "backend": "compile.backend",
    "MemoryBudgetSolver": "compile.inductor.knapsack",
    "check": "training.compared",
    "checkpoint_contexts": "training.selective",
    "fit": "target.fit",
    "checkpoint_sequential": "chains.training",
    "optimize_chain": "chains.training",
    "optimize_join": "chains.join_training",
    "UnitPlans": "units.split",
    "optimize_units": "units.units",
    "PipelinePlans": "pipelines.pipeline",
    "optimize_pipeline": "pipelines.pipeline",
    "LargestBatch": "batch.largest",
    "Buckets": "batch.buckets",
    "max_batch": "batch.largest",
    "disable": "training.enable",
    "enable": "training.enable",
}
"""Where each public name lives; loaded when first asked for, so that `import remat` needs no torch and stays quick.

A public name must not be that of a module here: importing the module would hide it."""

__all__ = [
    "ActivationBytes",
    "Answer",
    "AsyncRemat",
    "Buckets",
    "BudgetTooSmall",
    "CaptureError",
    "Comparison",
    "CoordinatedPlanner",
    "Coordinator",
    "Fraction",
    "Graph",
    "GreedyPlanner",
    "LargestBatch",
    "Link",
    "LocalPlanner",
    "MemoryBudgetSolver",
    "NothingFound",
    "OneProcess",
    "PipelinePlans",
    "Plan",
    "PlanMismatch",
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
    "SolveOptions",
    "UnitBytes",
    "UnitPlans",
    "backend",
    "check",
    "checkpoint_contexts",
    "checkpoint_sequential",
    "disable",
    "enable",
    "explain",
    "fit",
    "max_batch",
    "optimize",
    "optimize_chain",
    "optimize_join",
    "optimize_pipeline",
    "optimize_units",
    "planner_for",
    "save_plans",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
