"""The module that trains by its plans: one plan for each kind of input, none run that was not made for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from remat_ir import Answer

from .errors import CaptureError
from .step import TrainingStep

OnFailure: TypeAlias = Literal["raise", "plain"]
log = logging.getLogger("remat")

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class Planned:
    """One kind of training step that has its plan.

    Attributes:
        step: what was captured and profiled.
        answer: the planner's answer, verified on `step.graph`.
        run: the step by the plan, a function of (parameters, buffers, arguments).
        predicted_bytes: the peak of the running step as lowered, fixed bytes included; at most the plan's peak.
        better: the plan that is still being looked for, where training started on a quick one; None in it: none was.
    """

    step: TrainingStep
    answer: Answer
    run: Callable[..., Any] = field(repr=False)
    predicted_bytes: int
    better: Future[Planned | None] | None = field(default=None, repr=False)

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.step.graph.fixed_bytes


class Rematerialized(nn.Module):
    """A module that trains by plans and otherwise is the module that it was made from.

    Parameters, buffers, submodules and state_dict are the original's own; both see every change. A call with gradients
    enabled runs by the plan of its kind: shapes, dtypes, devices, strides and values of its arguments, the train mode
    of every submodule, which parameters require gradients, and autocast. An unknown kind is planned when it is first
    seen. A call under torch.no_grad() has nothing to rematerialize and runs the original.

    Args:
        make_plan: captures and plans one kind of call.
        on_failure: "raise" lets a CaptureError out; "plain" runs the original for that kind and logs a warning.
    """

    def __init__(
        self,
        module: nn.Module,
        make_plan: Callable[[Sequence[Any], Mapping[str, Any]], Planned],
        on_failure: OnFailure = "raise",
    ) -> None:
        super().__init__()
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["original"] = module
        self.__dict__["_plans"] = {}
        self._make_plan = make_plan
        self._on_failure = on_failure
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, with a backward pass by the plan."""
        original = self.__dict__["original"]
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        planned = self.plan_for(args, kwargs)
        if planned is None:
            return original(*args, **kwargs)
        return planned.run(*self._tensors(planned), *args, **kwargs)

    def plan_for(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Planned | None:
        """The plan that a call with these arguments runs by, made now if there is none; None: it runs plainly.

        Raises:
            CaptureError: it cannot be captured, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        kwargs = kwargs or {}
        plans: dict[Any, Planned | None] = self.__dict__["_plans"]
        key = kind_of_call(self.__dict__["original"], args, kwargs)
        if key in plans:
            plans[key] = _latest(plans[key])
            return plans[key]
        if plans:
            log.info("a new kind of call gets a plan of its own: %s", _what_changed(key, next(reversed(plans))))
        try:
            plans[key] = self._make_plan(args, kwargs)
        except CaptureError as error:
            if self._on_failure != "plain":
                raise
            log.warning("training runs without a plan: %s", error)
            plans[key] = None
        return plans[key]

    @property
    def plans(self) -> Mapping[Any, Planned | None]:
        """The plans so far by kind of call; None where one runs plainly."""
        return self.__dict__["_plans"]  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Rematerialized:
        """Set the train mode, the original's too."""
        self.__dict__["original"].train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            return getattr(original, name)

    def _tensors(self, planned: Planned) -> Iterator[torch.Tensor]:
        captured = planned.step.captured
        for name in (*captured.params, *captured.buffers):
            yield captured.constants[name] if name in captured.constants else _tensor(self, name)


def _latest(planned: Planned | None) -> Planned | None:
    """The better plan once it is there. A step that has begun ends by the plan that it began with."""
    if planned is None or planned.better is None or not planned.better.done():
        return planned
    found = None
    try:
        found = planned.better.result()
    except Exception as error:  # the planner's trouble is no reason to stop training
        log.warning("no better plan came, training goes on by the quick one: %s", error)
    if found is None:
        return replace(planned, better=None)
    log.info("a better plan takes over: %s ns in place of %s ns", found.answer.cost_ns, planned.answer.cost_ns)
    return found


def kind_of_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that a captured step takes for granted, as a key."""
    leaves: list[Any] = []
    seen: dict[int, int] = {}
    _describe(tuple(args), leaves, seen)
    _describe(dict(kwargs), leaves, seen)
    return (
        tuple(leaves),
        tuple(part.training for part in module.modules()),
        tuple((p.requires_grad, p.dtype, p.device, p.shape) for p in module.parameters()),
        tuple((b.dtype, b.device, b.shape) for b in module.buffers()),
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()),
    )


def _describe(thing: Any, leaves: list[Any], seen: dict[int, int]) -> None:
    if isinstance(thing, torch.Tensor):
        same = seen.setdefault(id(thing), len(leaves))
        leaves.append((thing.shape, thing.stride(), thing.dtype, thing.device, thing.requires_grad, same))
    elif isinstance(thing, Mapping):
        leaves.append((type(thing), len(thing)))
        for key, value in thing.items():
            leaves.append(key)
            _describe(value, leaves, seen)
    elif isinstance(thing, (tuple, list)):
        leaves.append((type(thing), len(thing)))
        for value in thing:
            _describe(value, leaves, seen)
    elif isinstance(thing, (int, float, str, bool, complex, bytes, type(None), torch.dtype, torch.device)):
        leaves.append((type(thing), thing))
    else:
        leaves.append((type(thing), id(thing)))


_ASPECTS = ("arguments", "train mode", "parameters", "buffers", "autocast", "hooks")


def _what_changed(new: tuple[Any, ...], old: tuple[Any, ...]) -> str:
    return ", ".join(name for name, a, b in zip(_ASPECTS, new, old, strict=True) if a != b)


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        module = module._modules[parent]  # type: ignore[assignment]
    found = module._parameters.get(name)
    tensor = found if found is not None else module._buffers[name]
    assert tensor is not None
    return tensor
