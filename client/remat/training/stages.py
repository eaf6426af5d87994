"""Calls of an `nn.Sequential` that run by chain plans, one for each kind of input."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..capture.call import state_of
from ..chains.chained import ChainedModule
from ..errors import CaptureError
from ..planning.options import SolveOptions

log = logging.getLogger("remat")


class ChainPlans:
    """What runs the calls of a module by chain plans; at most `most_plans` of them, the ones used last.

    Args:
        make: plans the stages for a call with a tensor, given the plans of other calls.
        asking: of which `on_failure` and `most_plans` are followed here.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[nn.Sequential, torch.Tensor, Sequence[ChainedModule]], ChainedModule],
        asking: SolveOptions,
    ) -> None:
        self._model, self._make, self._asking = model, make, asking
        self._made: OrderedDict[tuple[Any, ...], ChainedModule | None] = OrderedDict()

    @property
    def plans(self) -> tuple[ChainedModule, ...]:
        """What has a plan now."""
        return tuple(made for made in self._made.values() if made is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call by its plan.

        Raises:
            CaptureError: it is no call of stages, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        made = self._found(args, kwargs)
        return type(self._model).forward(self._model, *args, **kwargs) if made is None else made(*args)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Make the plan of a call, without running it; it raises as a call does."""
        self._found(args, kwargs)

    def _found(self, args: Sequence[Any], kwargs: Any) -> ChainedModule | None:
        given = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in args if isinstance(t, torch.Tensor)]
        key = (*given, len(args), *kwargs, state_of(self._model))
        if key not in self._made:
            self._made[key] = self._planned(args, kwargs)
            if len(self._made) > self._asking.most_plans:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _planned(self, args: Sequence[Any], kwargs: Any) -> ChainedModule | None:
        model = self._model
        try:
            if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
                given = f"{len(args) + len(kwargs)} arguments"
                raise CaptureError(f"mode='chain' takes an nn.Sequential and one tensor, not a Sequential and {given}")
            return self._make(model, args[0], self.plans)  # type: ignore[arg-type]
        except CaptureError as error:
            if self._asking.on_failure != "plain":
                raise
            log.warning("training runs without a plan: %s", error)
            return None


def is_sequential(model: nn.Module) -> bool:
    """Whether a module runs stages one after the other, and does nothing else."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
