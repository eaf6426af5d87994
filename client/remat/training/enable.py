"""Plans for a module that stays itself: for trainers that look at its class, its config and its forward's signature."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from typing import Any, TypeVar, Unpack

from torch import nn

from .._compat.module_state import CALL_HOOKS
from ..capture.trace import untraced
from ..distributed.refused import fsdp_module
from ..planning.budget import Budget
from ..planning.options import SolveOptions, TrainingFields, solve_options
from ..planning.planner import Planner
from ..planning.sources import OnProgress
from .module import Rematerialized
from .optimize import planned_module

M = TypeVar("M", bound=nn.Module)

_PLANNED = "_remat_planned"


def enable(
    model: M,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> M:
    """Train this module by plans from now on, in place: the counterpart of `gradient_checkpointing_enable()`.

    The module keeps its class, attributes, hooks and state_dict. A call in train mode with gradients enabled runs by
    the plan of its kind, planned when it is first seen; any other call runs as before. Wrap in DDP after this.

    Args:
        budget, planner, optimizer, on_progress, options, fields: as for `remat.optimize`.

    Returns:
        The same module.

    Raises:
        RuntimeError: it is enabled already.
        InvalidData: as for `remat.optimize`, before anything is captured.
    """
    refuse_enabled(model)
    asking = solve_options(enable, TrainingFields, options, fields)
    planned = planned_module(
        twin_of(model), budget, asking, planner=planner, optimizer=optimizer, on_progress=on_progress
    )
    return install(model, planned)


def refuse_enabled(model: nn.Module) -> None:
    """Refuse a module that has plans already.

    Raises:
        RuntimeError: it has.
    """
    if _PLANNED in model.__dict__:
        raise RuntimeError(f"remat is enabled on this {type(model).__name__} already; call remat.disable first")


def install(model: M, planned: Rematerialized) -> M:
    """Let a module run by the plans of its twin when it trains."""

    @untraced
    @functools.wraps(type(model).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        planned.original.training = planned.training = model.training
        if not model.training:
            return type(model).forward(model, *args, **kwargs)
        return planned(*args, **kwargs)

    model.__dict__[_PLANNED] = planned
    model.__dict__["forward"] = forward
    return model


def disable(model: M) -> M:
    """Undo `enable`; the module trains plainly again."""
    if model.__dict__.pop(_PLANNED, None) is not None:
        del model.__dict__["forward"]
    return model


def plans_of(model: nn.Module) -> Rematerialized:
    """The planned side of an enabled module: its plans, answers and predictions.

    Raises:
        RuntimeError: it is not enabled.
    """
    planned = model.__dict__.get(_PLANNED)
    if planned is None:
        raise RuntimeError(f"remat is not enabled on this {type(model).__name__}")
    return planned  # type: ignore[no-any-return]


def twin_of(model: nn.Module) -> nn.Module:
    """The same module once more: it shares every tensor and submodule, but not the hooks, which run around the call.

    What is captured and planned is the twin, whose forward is still that of its class.
    """
    sharded = fsdp_module()
    if sharded and isinstance(model, sharded):  # copied as what it was before fully_shard gave it another class
        plain = next(c for c in type(model).__mro__ if not issubclass(c, sharded))
        twin: Any = object.__new__(plain)
        twin.__dict__.update(model.__dict__)
    else:
        twin = copy.copy(model)
    for name in CALL_HOOKS:
        twin.__dict__[name] = OrderedDict()
    made: nn.Module = twin
    return made
