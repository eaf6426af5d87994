"""Plans for a module that stays itself: for trainers that look at its class, its config and its forward's signature."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar, Unpack

from torch import nn

from .._compat.module_state import called_module
from ..capture.call import check_module
from ..capture.trace import untraced
from ..compile.carrier import Carrier
from ..compile.sized import SizedBackend
from ..errors import CaptureError
from ..planning.budget import Budget, read_budget
from ..planning.options import SolveOptions, TrainingFields, solve_options
from ..planning.planner import Planner
from ..planning.sources import OnProgress
from ..settings import settings
from .module import MakePlan, Rematerialized, enabled_plans, refuse_enabled
from .optimize import check_training, planning

log = logging.getLogger("remat")

M = TypeVar("M", bound=nn.Module)


class PlannedForward:
    """What an enabled module's `forward` is, and all that `enable` leaves on it.

    What is captured is the module's own forward, without the hooks that run around the call. A deep copy of the module
    gets a planned forward of its own, without plans yet; a pickled module comes back with the forward of its class.

    Attributes:
        trainer: what has enabled it for a run that ends by itself; empty where a user has.
        undo: called by `disable`, to switch a key–value cache on again that is off for that run.
    """

    trainer = ""

    @staticmethod
    def undo() -> None:
        """There was no cache."""

    def __init__(
        self, model: nn.Module, before: Callable[..., Any] | None, make_plan: MakePlan, settings: Mapping[str, Any]
    ) -> None:
        self.model, self.before = model, before
        self._make_plan, self._settings = make_plan, settings
        functools.update_wrapper(self, self.own())

    @functools.cached_property
    def planned(self) -> Rematerialized:
        """The module's plans, and what runs by them."""
        return Rematerialized(self.model, self._make_plan, run=self.own, **self._settings)

    def own(self) -> Callable[..., Any]:
        """The forward that the module has without plans."""
        return MethodType(type(self.model).forward, self.model) if self.before is None else self.before

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = called_module()
        if called is not self.model and called is not None and called.__dict__.get("forward") is self:
            raise CaptureError(
                f"this {type(self.model).__name__} is a shallow copy of the one that remat.enable was called for, and "
                "would run by that one's attributes: call remat.disable on the copy, or use copy.deepcopy"
            )
        return self.planned.forward(*args, **kwargs) if self.model.training else self.own()(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        model = copy.deepcopy(self.model, memo)
        return PlannedForward(model, copy.deepcopy(self.before, memo), self._make_plan, self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "forward")


def enable(
    model: M,
    *,
    budget: Budget | None = None,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> M:
    """Train this module by plans from now on, in place: the counterpart of `gradient_checkpointing_enable()`.

    The module keeps its class, attributes, hooks and state_dict. A call in train mode with gradients enabled runs by
    the plan of its kind, planned when it is first seen; any other call runs as before. Wrap in DDP after this.

    Args:
        budget, plan, planner, optimizer, ema, on_progress, options, fields: as for `remat.optimize`.

    Returns:
        The same module.

    Raises:
        RuntimeError: it is enabled already.
        InvalidData: as for `remat.optimize`, before anything is captured.

    A first call for which a plan file has no plan raises `PlanMismatch`.
    """
    check_module(model)
    refuse_enabled(model)
    asking = solve_options(enable, TrainingFields, options, fields)
    if settings().front_door and carried(model, budget, planner, asking, on_progress, (plan, optimizer, ema)):
        return model
    make_plan = planning(
        budget, asking, plan=plan, planner=planner, optimizer=optimizer, ema=ema, on_progress=on_progress
    )
    install(model, make_plan, on_failure=asking.on_failure, self_check=asking.self_check, most_plans=asking.most_plans)
    return model


def carried(
    model: nn.Module,
    budget: Budget | None,
    planner: Planner | str | None,
    asking: SolveOptions,
    on_progress: OnProgress | None,
    more: tuple[Any, ...],
) -> bool:
    """Let a module run by plans behind `torch.compile`; False: it was asked for what only plans of kinds of calls have.

    Raises:
        RuntimeError: it does already.
        InvalidData: as for `enable`.
    """
    if isinstance(model.__dict__.get("forward"), Carrier):
        raise RuntimeError(f"remat is enabled on this {type(model).__name__} already; call remat.disable first")
    counted = asking.accumulate > 1 or asking.clip_grad_norm or asking.release_gradients or asking.mode == "chain"
    if budget is None or counted or any(given is not None for given in more):
        log.info(
            "plan, optimizer, ema, accumulate, clip_grad_norm, release_gradients and chains plan by kinds of calls"
        )
        return False
    found = check_training(budget, asking, planner, None)
    make = functools.partial(SizedBackend, read_budget(budget), found, asking, on_progress)
    model.__dict__["forward"] = Carrier(model, model.__dict__.get("forward"), make)
    return True


def install(model: nn.Module, make_plan: MakePlan, **settings: Any) -> Rematerialized:
    """Let a module run by plans when it trains; `settings` are those of `Rematerialized`."""
    forward = PlannedForward(model, model.__dict__.get("forward"), make_plan, settings)
    model.__dict__["forward"] = forward
    return forward.planned


def disable(model: M) -> M:
    """Undo `enable`; the module trains without plans again.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> disable(remat.enable(model, budget="100%", planner="greedy")) is model
        True
    """
    forward = model.__dict__.get("forward")
    if isinstance(forward, PlannedForward | Carrier):
        del model.__dict__["forward"]
        if forward.before is not None:
            model.__dict__["forward"] = forward.before
        forward.undo()
    return model


def enable_for(trainer: str, model: nn.Module, **given: Any) -> None:
    """Enable plans for one run of a trainer; its callback calls `disable_left` before.

    Args:
        trainer: the kind of trainer.
        given: as for `enable`.

    Raises:
        RuntimeError: they are enabled already.
    """
    enable(model, **given)
    model.__dict__["forward"].trainer = trainer
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False
        model.__dict__["forward"].undo = functools.partial(setattr, config, "use_cache", True)


def disable_left(trainer: str, model: nn.Module) -> None:
    """Undo what a run of a trainer has left that an exception has ended, of which it tells no callback.

    Plans that the user has enabled stay.
    """
    left = model.__dict__.get("forward")
    if isinstance(left, PlannedForward | Carrier) and left.trainer == trainer:
        disable(model)


def plans_of(model: nn.Module) -> Rematerialized:
    """The planned side of an enabled module: its plans, answers and predictions.

    Raises:
        RuntimeError: it is not enabled.
    """
    found = enabled_plans(model)
    if found is None:
        raise RuntimeError(f"remat is not enabled on this {type(model).__name__}")
    return found
