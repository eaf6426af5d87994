"""The plans of a module, written down for the next run of the job."""

from __future__ import annotations

import os

from torch import nn

from ..planning.plan_file import PlannedStep, write_plan_file
from ..profiling.profile import device_kind
from .enable import plans_of


def save_plans(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's plans to a file that `plan=` of `remat.optimize` and `remat.enable` takes.

    A job that is restarted with it runs the same plans, and nothing is solved. The file has the names
    of modules in it, and no weights. Calls that run without a plan, and chains, are left out.

    Args:
        model: one that `remat.optimize` or `remat.enable` was called for.

    Raises:
        InvalidData: it has no plan of a captured step yet, or the file cannot be written.
        RuntimeError: it is not enabled.

    Example:
        >>> import remat, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.ones(4, 8)
        >>> path = tempfile.mkdtemp() + "/plan.json"
        >>> before = remat.plans_of(remat.optimize(model, x, budget="100%", planner="greedy")).plans
        >>> remat.save_plans(model, path)
        >>> pinned = remat.plans_of(remat.optimize(remat.disable(model), x, plan=path)).plans
        >>> pinned[0].answer.plan == before[0].answer.plan
        True
    """
    steps = [
        PlannedStep(made.step.graph, made.answer, device_kind(made.step.operations.flow.kernels))
        for made in plans_of(model).plans
    ]
    write_plan_file(path, steps)
