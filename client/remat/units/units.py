"""One budget for a model whose units are planned apart: what each of them may hold, chosen for the whole.

A step by the plans that hold the least is watched by the allocator's own events, cut where units begin and end: what
is left when the units' own bytes are taken off is the rest of the model's, whatever that is. The plans of each unit at
several bounds give its trade-off, `allot` picks one of each, and the planner is asked for what was picked. A step by
those is watched again; where the budget did not hold, what was seen counts for the next picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from remat_ir import InvalidData

from ..capture.call import example_call
from ..capture.operations import check_functional
from ..distributed.ranks import planner_of
from ..planning.budget import Budget, UnitBytes, read_budget
from ..planning.options import SolveOptions, StepFields, solve_options
from ..planning.planner import Planner
from ..profiling.fixed import resident
from ..profiling.measure import forward_backward
from ..training.compared import undisturbed
from ..training.enable import disable
from ..training.job import Job
from .split import Split, UnitPlans

EACH = SolveOptions(time_limit_s=20.0, max_gap=0.01)
"""The defaults here: several graphs are solved, and one plan of each is picked."""


def optimize_units(
    model: nn.Module,
    units: Iterable[nn.Module],
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> UnitPlans:
    """Train units of a model by plans of their own, in place, inside one budget for the whole model.

    For FSDP2, where each unit is gathered by itself, and for DDP, which can send a unit's gradients while the one
    before it runs. What each unit may hold is chosen so that what all of them hold and what the one at work needs stay
    inside the budget, at the least total cost. Three steps or more are run for that, and the caller's parameters,
    buffers, gradients and random state are left as they were. Call it after `fully_shard`, on every rank, and before
    DDP wraps the model. Calls of other sizes are planned when they are first seen, within what their unit has got.

    Args:
        units: modules of the model that run once in a step, one after the other, such as its blocks.
        example_args, example_kwargs: the largest batch; one call of the model.
        budget: as for `remat.optimize`; a fraction is one of what plain training needs besides the fixed bytes. Bytes
            of an accelerator are those that its driver has to give: three more steps show what is reserved.
        planner: as for `remat.optimize`.
        loss: from the model's output to the scalar that is differentiated; by default the output, its `loss` or its
            first entry.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan, for each solve of the
            planner's; without an object, 20 seconds and a gap of 0.01 for each.

    Raises:
        CaptureError: a unit cannot be captured, or does not run once in a step; the message names it.
        BudgetTooSmall: no choice of plans fits; the message says what is enough.
        NothingFound: the measured peak stayed over the budget.
        InvalidData: not a budget of a whole model, no units of it, not a planner, not an optimizer, or not an option;
            before anything runs.
        RuntimeError: remat is enabled on a unit already.
    """
    asking = solve_options(optimize_units, StepFields, options, fields, default=EACH)
    check_functional(asking.functional_ops)
    budget = read_budget(budget)
    if isinstance(budget, UnitBytes):
        raise InvalidData(f"the budget of a whole model is bytes or a share of what it needs, not {budget!r}")
    job = Job(optimizer)
    split = Split(model, _named(model, units), planner_of(planner, asking), asking, job)
    args, kwargs = example_call(example_args, example_kwargs)
    fixed = sum(resident(model, (args, kwargs), {}).values()) + sum(job.fixed(model).values())
    try:
        with undisturbed(model):
            return split.run(forward_backward(model, args, kwargs, loss), budget, fixed)
    except BaseException:
        for unit in split.units:
            disable(unit.module)
        raise


def _named(model: nn.Module, units: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The units by their names in the model.

    Raises:
        InvalidData: none, one that is no part of the model, or one inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for number, unit in enumerate(units):
        name = names.get(id(unit))
        if not name:
            raise InvalidData(f"unit {number}, a {type(unit).__name__}, is no part of this {type(model).__name__}")
        found[name] = unit
    if not found:
        raise InvalidData(f"there are no units of this {type(model).__name__} to plan")
    for name in found:
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise InvalidData(f"{name} is a part of {outer}: units must not lie inside each other")
    return found
