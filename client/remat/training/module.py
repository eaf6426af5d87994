"""The module that trains by its plans: one plan for each kind of input, none run that was not made for it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from .. import generators
from .._compat.module_state import SHARED
from ..capture.call import CacheSwitch
from ..capture.guards import kind_of_call, what_changed
from ..capture.trace import untraced
from ..chains.chained import ChainedModule
from ..device import device_failed
from ..errors import CaptureError
from ..planning.options import DEFAULT, OnFailure
from .planned import Planned
from .selfcheck import SelfCheck, StepPeak

log = logging.getLogger("remat")


_UNKNOWN: Any = object()

MakePlan: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Planned]], Planned | ChainedModule]


class Rematerialized(nn.Module):
    """A module that trains by plans and otherwise is the module that it was made from.

    Parameters, buffers, submodules and state_dict are the original's own; both see every change. A call with gradients
    enabled runs by the plan of its kind: shapes, dtypes, devices, strides and values of its arguments, the train mode
    of every submodule, which parameters require gradients, and autocast. An unknown kind is planned when it is first
    seen. A call under torch.no_grad() has nothing to rematerialize and runs the original.

    Args:
        make_plan: captures and plans one kind of call, given the plans of other kinds, the latest last; or makes the
            chain that runs it.
        on_failure: "raise" lets a CaptureError out; "plain" runs the original for that kind and logs a warning.
        self_check: whether the first step of each plan measures its peak: see `remat.training.selfcheck`.
        most_plans: how many kinds of calls keep their plan; beyond, the one used least lately is planned anew.
    """

    original: nn.Module

    def __init__(
        self,
        module: nn.Module,
        make_plan: MakePlan,
        on_failure: OnFailure = "raise",
        self_check: bool = True,
        most_plans: int = DEFAULT.most_plans,
    ) -> None:
        super().__init__()
        for name in SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["original"] = module  # as an attribute it would be registered: a submodule of its own twin
        self._plans: OrderedDict[Any, Planned | None] = OrderedDict()
        self._chains: OrderedDict[Any, ChainedModule] = OrderedDict()
        self._make_plan = make_plan
        self._cache = CacheSwitch(module)
        self._on_failure = on_failure
        self._most_plans = most_plans
        self._check = SelfCheck() if self_check else None
        self.training = module.training

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, with a backward pass by the plan."""
        original = self.original
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        given, kwargs = kwargs, dict(self._cache.planned(args, kwargs))
        planned = self.plan_for(args, kwargs)
        if planned is None:
            chains = self._chains
            return (chains.get(kind_of_call(original, args, given), original) if chains else original)(*args, **given)
        check, tensors = self._check, planned.holders.tensors(self)
        if check is None or not check.due or planned not in check.due:
            return planned.run(*tensors, *args, **kwargs)
        before = generators.noted()
        try:
            return check.watch(planned, lambda: planned.run(*tensors, *args, **kwargs))
        except RuntimeError as error:
            if device_failed(error):
                raise
            before.restore()
            self._refused(args, kwargs, error)
        return original(*args, **given)

    def _refused(self, args: Sequence[Any], kwargs: Mapping[str, Any], error: RuntimeError) -> None:
        """A kernel does not take what was traced for it, as stock aot_eager's would not: no plan of this kind runs.

        Raises:
            CaptureError: unless `on_failure` is "plain".
        """
        why = str(error).partition("\n")[0]
        text = f"the captured step does not run, since real tensors do not lie in memory as the traced ones: {why}"
        if self._on_failure != "plain":
            raise CaptureError(text) from error
        log.warning("training runs without a plan: %s", text)
        self._plans[kind_of_call(self.original, args, kwargs)] = None

    def plan_for(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Planned | None:
        """The plan that a call with these arguments runs by, made now if there is none.

        None: it runs as one of `chains`, or plainly.

        Raises:
            CaptureError: it cannot be captured, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        kwargs = self._cache.planned(args, kwargs or {})
        plans = self._plans
        key = kind_of_call(self.original, args, kwargs)
        found = plans.get(key, _UNKNOWN)
        if found is not _UNKNOWN:
            latest = self._latest(found)
            if latest is not found:
                plans[key] = latest
            if len(plans) > 1:
                plans.move_to_end(key)
            return latest
        if key in self._chains:
            self._chains.move_to_end(key)
            return None
        if plans:
            log.info("a new kind of call gets a plan of its own: %s", what_changed(key, next(reversed(plans))))
        for other in plans:
            plans[other] = self._latest(plans[other])
        known = [planned for planned in plans.values() if planned is not None]
        try:
            made = self._make_plan(args, kwargs, known)
        except CaptureError as error:
            if self._on_failure != "plain":
                raise
            log.warning("training runs without a plan: %s", error)
            plans[key] = None
            return None
        if isinstance(made, ChainedModule):
            self._chains[key] = made
            if len(self._chains) > self._most_plans:
                self._chains.popitem(last=False)
            return None
        plans[key] = self._expected(made)
        while len(plans) > self._most_plans:
            _, oldest = plans.popitem(last=False)
            log.info("the plan used least lately is dropped: %d kinds of calls are kept", self._most_plans)
            if self._check is not None:
                self._check.forget(oldest)
        return made

    def _latest(self, planned: Planned | None) -> Planned | None:
        """The better plan once it is there. A step that has begun ends by the plan that it began with."""
        if planned is None or planned.better is None or not planned.better.done():
            return planned
        found = planned.better.result()
        if found is None:
            return planned
        log.info("a better plan takes over: %s ns in place of %s ns", found.answer.cost_ns, planned.answer.cost_ns)
        return self._expected(found)

    def _expected(self, planned: Planned) -> Planned:
        if self._check is not None:
            self._check.expect(planned)
        return planned

    def put(self, kind: Any, planned: Planned) -> None:
        """Let calls of a kind that is one of `plans` run by another plan, from the next call on."""
        self._plans[kind] = self._expected(planned)

    @property
    def peaks(self) -> Mapping[Planned, StepPeak]:
        """What the first step of each plan came to, where it has run and was watched."""
        return {} if self._check is None else self._check.found

    @property
    def plans(self) -> Mapping[Any, Planned | None]:
        """The plans so far by kind of call; None where one runs plainly."""
        return self._plans

    @property
    def chains(self) -> Mapping[Any, ChainedModule]:
        """The kinds of calls that run by chain plans, with what runs them."""
        return self._chains

    def train(self, mode: bool = True) -> Rematerialized:
        """Set the train mode, the original's too."""
        self.original.train(mode)
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
