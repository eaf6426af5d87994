"""The plans of a module, written down for the next run of the job."""

from __future__ import annotations

import os

from torch import nn

from remat_ir import Answer, InvalidData, Problem, verify

from ..compile.plans import UNBOUNDED
from ..planning.plan_file import PlannedStep, write_plan_file
from ..profiling.profile import device_kind
from .enable import backend_of, plans_of
from .step import TrainingStep
from .traced import Trained


def save_plans(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's plans to a file that `plan=` of `remat.optimize` and `remat.enable` takes.

    A job that is restarted with it runs the same plans, and nothing is solved. The file has the names
    of modules in it, and no weights. Calls that run without a plan, and chains, are left out. Where a step has several
    calls, the file has the plan of each and the budget that they share, once it has been divided.

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
    backend = backend_of(model)
    division = backend.division
    if division is None and backend.shared.several:
        raise InvalidData("the calls of a step share a budget that has not been divided yet: train a few steps first")
    if division is None:
        write_plan_file(path, [_row(made.step, made.answer) for made in plans_of(model).plans])
        return
    shared = division.fixed_bytes + division.allowed_bytes
    rows = []
    for each, plan in backend.shared.chosen():
        if isinstance(each, Trained):
            graph = each.graph
            peak = verify(Problem(graph, UNBOUNDED), plan).peak_bytes  # of groups of kernels: a little above the step's
            answer = Answer.of_plan(Problem(graph, max(shared, peak)), plan, method="division")
            rows.append(_row(each.planned.step, answer))
    write_plan_file(path, rows, shared)


def _row(step: TrainingStep, answer: Answer) -> PlannedStep:
    return PlannedStep(step.graph, answer, device_kind(step.operations.flow.kernels))
