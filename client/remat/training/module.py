"""The module that trains by its plans: one plan for each kind of input, none run that was not made for it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from .. import generators
from .._compat.module_state import CALL_HOOKS, SHARED, has_hooks, hooks_put_back, hooks_set_aside
from ..capture.call import CacheSwitch
from ..capture.dataflow import is_check
from ..capture.guards import Call, Kind, shared_arguments, shared_with_state, what_changed
from ..capture.outstanding import Outstanding
from ..capture.trace import untraced
from ..chains.chained import ChainedModule
from ..device import capturing
from ..device_flags import device_failed
from ..errors import CaptureError
from ..planning.options import DEFAULT, OnFailure
from ..switch import plans_are_off
from .kinds import Kinds
from .planned import Planned
from .selfcheck import SelfCheck, StepPeak

log = logging.getLogger("remat")

MOST_STATES = 8
"""Plans for calls that differ in numbers or in the state of Python alone: one for each value of an annealed factor
would cost more than it saves."""

MOST_NUMBERS = 2
"""Plans for calls that differ in a number among their arguments alone; at further values, only those that come again
get one. A count of steps never does."""

MOST_SEEN = 256
"""Values of numbers that are remembered to see whether one comes again."""

MakePlan: TypeAlias = Callable[[Call, Sequence[Planned | ChainedModule]], Planned | ChainedModule]
Made: TypeAlias = Planned | ChainedModule | None


class Rematerialized(nn.Module):
    """A module that trains by plans and otherwise is the module that it was made from.

    Parameters, buffers, submodules and state_dict are the original's own; both see every change, and an attribute that
    is set here is set there. A call with gradients enabled runs by the plan of its kind: shapes, dtypes, devices and
    strides of its arguments, and all of Python's state that the capture read: attributes, globals, train modes, hooks,
    numbers, autocast. An unknown kind is planned when it is first seen. A call under torch.no_grad() has nothing to
    rematerialize and runs the original. A deep copy is a module of its own that plans anew; pickled, it is the original
    without plans.

    Args:
        make_plan: captures and plans one kind of call, given the plans of other kinds, the latest last; or makes the
            chain that runs it.
        on_failure: "raise" lets a CaptureError out; "plain" runs the original for that kind and logs a warning.
        self_check: whether the first step of each plan measures its peak: see `remat.training.selfcheck`.
        most_plans: how many kinds of calls keep their plan; beyond, the one used least lately is planned anew.
        run: what of the module is planned: all of it, or its forward without the hooks around it.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> trained = remat.optimize(model, x, budget="100%", planner="greedy")
        >>> trained(x).sum().backward()
        >>> len(trained.plans), model[0].weight.grad is not None
        (1, True)
    """

    original: nn.Module
    _kinds: Kinds[Made]
    _check: SelfCheck | None
    _make_plan: MakePlan
    _on_failure: OnFailure

    def __init__(
        self,
        module: nn.Module,
        make_plan: MakePlan,
        on_failure: OnFailure = "raise",
        self_check: bool = True,
        most_plans: int = DEFAULT.most_plans,
        run: Callable[[], Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        for name in SHARED:
            own[name] = module.__dict__[name]
        own["original"] = (
            module  # as an attribute it would be registered: a submodule of the module that stands in for it
        )
        own["_run"] = run or (lambda: module)
        own["_make_plan"], own["_on_failure"] = make_plan, on_failure
        own["_kinds"] = Kinds[Made](most_plans)
        own["_cache"] = CacheSwitch(module)
        own["_check"] = SelfCheck() if self_check else None
        own["_outstanding"] = Outstanding()
        own["_told"] = set()
        own["_seen"] = {}
        own["training"] = module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module; the hooks that are global run inside, around the original."""
        if not has_hooks(self):
            return self.forward(*args, **kwargs)
        with hooks_set_aside() as aside:
            self.__dict__["_aside"] = aside
            try:
                return super().__call__(*args, **kwargs)
            finally:  # a hook before forward may have raised
                self.__dict__.pop("_aside", None)

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns, with a backward pass by the plan."""
        aside = self.__dict__.pop("_aside", None)
        if aside is not None:
            with hooks_put_back(aside):
                return self.forward(*args, **kwargs)
        run = self._run()
        if not torch.is_grad_enabled() or plans_are_off():
            return run(*args, **kwargs)
        given, kwargs = kwargs, dict(self._cache.planned(args, kwargs))
        call = Call(self.original, run, args, kwargs)
        kind, made = self._made_for(call)
        if made is None:
            return run(*args, **given)
        if isinstance(made, ChainedModule):
            return made(*args, **given)
        check, tensors = self._check, made.holders.tensors(call)
        shared = shared_with_state(made.overwritten, tensors, call)
        if made.overwrites_arguments:
            shared = shared or shared_arguments(tensors, call)
        if shared:
            self._refuse(f"{shared}, and the step overwrites it or its like: pass a clone")
            return run(*args, **given)
        if check is None or not check.due or made not in check.due or capturing():
            return self._noted(made, made.run(tensors, args, kwargs))
        before = generators.noted()
        try:
            return self._noted(made, check.watch(made, tensors, call))
        except (RuntimeError, CaptureError) as error:
            if device_failed(error):
                raise
            before.restore_torch()  # a step draws no other numbers after its inputs are read
            if any(map(is_check, made.step.operations.flow.kernels)):
                _raise_what_the_code_raises(call)
            why = str(error).partition("\n")[0]
            if "inference tensor" in why.lower():
                why = (
                    "a parameter, a buffer or an argument was made under torch.inference_mode(), and no such tensor is "
                    f"saved for a backward pass: make it under torch.no_grad(), or pass a clone: {why}"
                )
            elif not isinstance(error, CaptureError):
                why = (
                    f"the captured step does not run, since real tensors do not lie in memory as the traced ones: {why}"
                )
            self._refuse(why, error)
        assert kind is not None
        self._forget(made)
        self._kinds.put(kind, None)
        return run(*args, **given)

    def _noted(self, made: Planned, output: Any) -> Any:
        """The output of a call, which is outstanding from now on; that matters where another plan may take over."""
        if made.better is not None and not made.better.over:
            self._outstanding.note(output)
        return output

    def _refuse(self, text: str, cause: Exception | None = None) -> None:
        """A step that cannot run by its plan.

        Raises:
            CaptureError: unless `on_failure` is "plain".
        """
        if self._on_failure != "plain":
            raise CaptureError(text) from cause
        log.warning("training runs without a plan: %s", text)

    def plan_for(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Planned | None:
        """The plan that a call with these arguments runs by, made now if there is none.

        None: it runs as one of `chains`, or without a plan.

        Raises:
            CaptureError: it cannot be captured, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        kwargs = self._cache.planned(args, kwargs or {})
        _, made = self._made_for(Call(self.original, self._run(), args, kwargs))
        return made if isinstance(made, Planned) else None

    def _made_for(self, call: Call) -> tuple[Kind | None, Made]:
        """What a call runs by, made now if nothing is there."""
        kinds = self._kinds
        kind = kinds.find(call)
        if kind is not None:
            return kind, self._latest(kind)
        if self._ever_new(call):
            return None, None
        known = [_with_answer_found(made) for made in kinds.values() if made is not None]
        try:
            made = self._make_plan(call, known)
        except CaptureError as error:
            if self._on_failure != "plain":
                if error.raised_by_the_code:
                    _raise_what_the_code_raises(call)
                raise
            log.warning("training runs without a plan: %s", error)
            made = None
        if isinstance(made, Planned):
            captured = made.step.captured
            kind = Kind.of(call, captured.guards, captured.returns_numbers, made.gradients, made.outdated)
            self._expected(made)
        else:
            kind = Kind.of(call, None)
        dropped = kinds.put(kind, made)
        if dropped is not None:
            log.info("the plan used least lately is dropped: %d kinds of calls are kept", kinds.most)
        self._forget(dropped)
        return kind, made

    def _ever_new(self, call: Call) -> bool:
        """Tell the log why a call is a new kind; whether its like have had plans enough."""
        alike, last = self._kinds.alike(call), next(reversed(list(self._kinds)), None)
        if not alike:
            if last is not None:
                log.info(
                    "a new kind of call gets a plan of its own: %s", what_changed((call.arguments,), (last.arguments,))
                )
            return False
        broken, number = alike[0].broken(call), alike[0].broken_number(call)
        if number and len(alike) >= MOST_NUMBERS and not self._seen_again(call):
            self._tell_once(
                (*call.arguments, number),
                f"training runs without a plan at each new value of the number {number}: {len(alike)} plans were made "
                "for other values, and a value gets one when it comes again; pass a number that changes from step to "
                "step as a tensor",
            )
            return True
        if len(alike) < MOST_STATES:
            log.info("a new kind of call gets a plan of its own: %s", broken)
            return False
        self._tell_once(
            call.arguments,
            f"training runs without a plan where Python's state is new: {len(alike)} plans were made for calls that "
            f"differ in it alone, at last by {broken}; make a value that changes from step to step a tensor, as an "
            "argument or a buffer",
        )
        return True

    def _seen_again(self, call: Call) -> bool:
        """Whether a call with these numbers has been seen of late; it has, from now on."""
        numbers = (call.arguments, call.numbers)
        if numbers in self._seen:
            return True
        self._seen[numbers] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return False

    def _tell_once(self, about: object, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            log.warning("%s", text)

    def _latest(self, kind: Kind) -> Made:
        """The better plan once it is there. A step that has begun ends by the plan that it began with."""
        made = self._kinds[kind]
        if not isinstance(made, Planned) or made.better is None or made.better.over:
            return made
        found = made.better.take(self._outstanding.may_change())
        if found is None:
            return made
        log.info("a better plan takes over: %s ns in place of %s ns", found.answer.cost_ns, made.answer.cost_ns)
        self.put(kind, found)
        return found

    def _expected(self, planned: Planned) -> None:
        if self._check is not None:
            self._check.expect(planned)

    def put(self, kind: Kind, planned: Planned) -> None:
        """Let calls of a kind that is one of `plans` run by another plan, from the next call on."""
        self._forget(self._kinds[kind])
        self._expected(planned)
        self._kinds.put(kind, planned)

    def _forget(self, made: Made) -> None:
        """What has been made will not be run again; a step that has begun still ends by it."""
        if self._check is not None and isinstance(made, Planned):
            self._check.forget(made)

    @property
    def peaks(self) -> Mapping[Planned, StepPeak]:
        """What the first step of each plan came to, where it has run and was watched."""
        return {} if self._check is None else self._check.found

    @property
    def plans(self) -> Mapping[Kind, Planned | None]:
        """The plans so far by kind of call; None where one runs without."""
        return {kind: made for kind, made in self._kinds.items() if not isinstance(made, ChainedModule)}

    @property
    def chains(self) -> Mapping[Kind, ChainedModule]:
        """The kinds of calls that run by chain plans, with what runs them."""
        return {kind: made for kind, made in self._kinds.items() if isinstance(made, ChainedModule)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        original = copy.deepcopy(self.original, memo)
        copied = Rematerialized(original, self._make_plan, self._on_failure, self._check is not None, self._kinds.most)
        for name in CALL_HOOKS:
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self.original,)

    def train(self, mode: bool = True) -> Rematerialized:
        """Set the train mode, the original's too."""
        self.original.train(mode)
        self.__dict__["training"] = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":
            raise CaptureError(
                "DataParallel makes replicas of a module, which would run by the parameters of their source where it "
                "trains by plans: use DistributedDataParallel"
            )
        if name in self.__dict__ and name not in SHARED and name != "training":
            super().__setattr__(name, value)
        else:
            setattr(self.original, name, value)
            if name == "training":
                self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            return getattr(original, name)


def _with_answer_found(made: Planned | ChainedModule) -> Planned | ChainedModule:
    """What was made, with the better answer that has come for it: its plan takes over at its own next call."""
    found = made.better.found() if isinstance(made, Planned) and made.better is not None else None
    return made if found is None else replace(made, answer=found)  # type: ignore[type-var]


def enabled_plans(model: object) -> Rematerialized | None:
    """The planned side of a module that `remat.enable` was called for; None of any other."""
    found = getattr(getattr(model, "__dict__", {}).get("forward"), "planned", None)
    return found if isinstance(found, Rematerialized) else None


def refuse_enabled(model: nn.Module) -> None:
    """Refuse a module that has plans already.

    Raises:
        RuntimeError: it has.
    """
    if enabled_plans(model) is not None:
        raise RuntimeError(f"remat is enabled on this {type(model).__name__} already; call remat.disable first")


def _raise_what_the_code_raises(call: Call) -> None:
    """Run a call whose code may raise, so that the caller gets that exception and not one about its capture."""
    with torch.no_grad():
        call.run(*call.args, **call.kwargs)
