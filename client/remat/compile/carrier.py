"""A module that trains by plans behind `torch.compile`, in place: what an enabled module's `forward` is."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from .. import _compat
from .._compat.module_state import called_module, global_hooks
from ..capture.call import CacheSwitch, install_recorders
from ..capture.dataflow import tensors
from ..capture.refused import logging_functions, refuse_flattened, refuse_sharded, untraced
from ..errors import CaptureError
from ..profiling.fixed import here
from ..switch import plans_are_off
from .plans import PlannedSizes
from .sized import Backend, PlannedAhead, is_ahead, planned_ahead

log = logging.getLogger("remat")

B = TypeVar("B", bound=Backend)
T = TypeVar("T")


class Stages(Protocol):
    """Runs the calls of a module whose stages go one after the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Make the plan of a call, without running it."""


S = TypeVar("S", bound=Stages)

NOTHING_CAPTURED = (
    "torch.compile has captured nothing of it that can be planned; a mode of torch's around the call, a backward hook "
    'on a part, torch.compiler.set_stance("force_eager") and code that it skips are the usual causes, and '
    'TORCH_LOGS="graph_breaks" names the place'
)

MOST_ATTEMPTS = 5
"""Captures of one call while another thread changes hooks of all modules."""

MOST_GRAPHS = 64
"""Graphs of one frame: past them Dynamo warns, and runs the frame as it is."""


class Carrier(Generic[B, S]):
    """The `forward` of a module that runs by plans where gradients are enabled, and as it is where they are not.

    It compiles the forward that the module has, one of the instance's own included, under a code object of its own. A
    deep copy of the module gets a carrier of its own, without plans yet; a pickled module comes back without remat.

    Args:
        before: the instance's own forward; None: it has its class's.
        make_backend: makes a backend without plans for a module.
        make_stages: makes what runs a module's calls where they cannot be captured as one graph; None: they run in
            parts.

    Attributes:
        stages: runs the calls instead of the backend's graphs, where it is there.
        planned_calls, unplanned_calls: how many calls that give gradients have run by a plan, and how many without one.
        trainer: what has enabled it for a run that ends by itself; empty where a user has.
        undo: called by `disable`, to switch a key–value cache on again that is off for that run.
    """

    trainer = ""

    @staticmethod
    def undo() -> None:
        """Nothing is to be undone besides."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[..., Any] | None,
        make_backend: Callable[[nn.Module], B],
        make_stages: Callable[[nn.Module], S] | None = None,
    ) -> None:
        self.model, self.before, self._make_backend, self._make_stages = model, before, make_backend, make_stages
        self.backend = make_backend(model)
        self.stages: S | None = None
        self.planned_calls = self.unplanned_calls = 0
        self._run: Callable[..., Any] | None = None
        self._compiling = threading.Lock()
        self._unguarded: tuple[object, ...] = ()
        self._classes: tuple[type[nn.Module], ...] = ()
        functools.update_wrapper(self, self.own())

    def own(self) -> Callable[..., Any]:
        """The forward that the module has without plans."""
        return MethodType(type(self.model).forward, self.model) if self.before is None else self.before

    @functools.cached_property
    def _cache(self) -> CacheSwitch:
        return CacheSwitch(self.model)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = called_module()
        if called is not self.model and called is not None and called.__dict__.get("forward") is self:
            raise CaptureError(
                f"this {type(self.model).__name__} is a shallow copy of the one that remat.enable was called for, and "
                "would run by that one's attributes: call remat.disable on the copy, or use copy.deepcopy"
            )
        if not torch.is_grad_enabled():
            self.backend.shared.rest()
            return self.own()(*args, **kwargs)
        if plans_are_off():
            return self.own()(*args, **kwargs)
        if _compat.inside_transform():
            return self._noted(self.own()(*args, **kwargs), "it is inside a transform of torch.func")
        if self.stages is not None:
            return self._staged(self.stages, args, kwargs)
        with self._compiling:  # once, whichever thread comes first
            unguarded = self._seen()
            install_recorders(self.model, kwargs)
            if self._run is None or unguarded != self._unguarded:
                self._run = self._compiled()
                self._unguarded = self._seen()
            run, backend = self._run, self.backend
        try:
            with _compat.dynamo_settings(self._logging, MOST_GRAPHS):
                before = backend.calls
                output = undisturbed(lambda: run(*args, **self._cache.planned(args, kwargs)))
                return self._noted(output, "" if backend.calls > before else NOTHING_CAPTURED)
        except Exception as error:
            refused = _compat.raised_by_backend(error)
            if self._make_stages is not None and _is_of_the_capture(refused):
                refuse_sharded(self.model)
                log.info("the stages run as a chain: %s", str(refused).partition("\n")[0])
                return self._first_staged(self._make_stages(self.model), args, kwargs)
            if refused is not error:
                raise refused from None
            raise

    def _noted(self, output: Any, why: str) -> Any:
        """The output of a call, which has run by a plan, or without one for this reason: the first time it is said."""
        if not why:
            self.planned_calls += 1
        elif any(tensor.requires_grad for tensor in tensors(output)):
            made = [each for graph in self.backend.graphs for each in graph.made.values()]
            said = any(each is None or each.failed for each in made)
            if not self.unplanned_calls and not said:
                log.warning("a call of this %s runs without a plan: %s", type(self.model).__name__, why)
            self.unplanned_calls += 1
        return output

    def plan(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> PlannedSizes | None:
        """Plan the first graph of a call, without running it.

        None: it has no backward pass, cannot be planned, or runs as stages.

        Raises:
            CaptureError: gradients are disabled, or it cannot be planned, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        if not torch.is_grad_enabled():
            raise CaptureError("gradients are disabled: plan a training step outside of torch.no_grad()")
        refuse_sharded(self.model)
        return planned_ahead(lambda: self(*args, **(kwargs or {})))

    def _first_staged(self, stages: S, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that cannot be captured, by stages, which take all further ones; not where they do not run either:
        such a call may be wrong itself."""
        try:
            output = self._staged(stages, args, kwargs)
        except PlannedAhead:
            self.stages = stages
            raise
        self.stages = stages
        return output

    def _staged(self, stages: S, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_ahead():
            stages.plan(*args, **kwargs)
            raise PlannedAhead(None, False)
        return stages(*args, **kwargs)

    def _compiled(self) -> Callable[..., Any]:
        """The forward compiled anew: nothing of an earlier compilation is found again."""
        refuse_flattened(self.model)
        self._logging = logging_functions(self.model)
        self._classes = tuple({type(part) for part in self.model.modules()})
        before, self.backend = self.backend.shared, self._make_backend(self.model)
        if self.backend.shared is not before:
            before.watching.end()
        split = any(here(p) is not p for p in self.model.parameters())  # Dynamo traces no DTensor of symbolic sizes
        dynamic = False if split else None
        return compiled(self.own(), self.backend, fullgraph=self._make_stages is not None, dynamic=dynamic)

    def _seen(self) -> tuple[object, ...]:
        """What changes a call and no guard of Dynamo's looks at: hooks of all modules, methods of parts' classes."""
        return global_hooks(), tuple((kind.forward, kind.__call__) for kind in self._classes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier[B, S]:
        model = copy.deepcopy(self.model, memo)
        make_backend = copy.deepcopy(self._make_backend, memo)  # with a budget of their own for several modules
        made = Carrier(model, copy.deepcopy(self.before, memo), make_backend, self._make_stages)
        if self.stages is not None and self._make_stages is not None:
            made.stages = self._make_stages(model)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return copy.copy, (self.before,)
        return getattr, (self.model, "forward")


def compiled(
    forward: Callable[..., Any], backend: Backend, *, fullgraph: bool, dynamic: bool | None = None
) -> Callable[..., Any]:
    """A forward behind `torch.compile` with a backend: nothing of an earlier compilation is found again."""
    how: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
    own = with_own_code(forward)
    run: Callable[..., Any] = torch.compile(own.__func__ if isinstance(own, MethodType) else own, **how)
    if isinstance(own, MethodType):  # Dynamo guards what it is given, and not what a method is bound to
        run = functools.partial(run, own.__self__)
    # what Dynamo keeps with a code object holds that, and so the graphs and their plans for good
    weakref.finalize(run, _compat.reset_code, own.__code__).atexit = False
    return run


def undisturbed(call: Callable[[], T]) -> T:
    """A call that Dynamo captures; made again where another thread has changed the hooks of all modules meanwhile, and
    only once no other thread traces a joint graph.

    Dynamo reads them more than once: one that goes in between ends the capture, before anything of the call has run.
    """
    for _ in range(MOST_ATTEMPTS - 1):
        hooks = global_hooks()
        _compat.await_traces()
        try:
            return call()
        except Exception as error:
            if not _compat.is_internal(error) or global_hooks() == hooks:
                raise
            log.info("hooks of all modules were changed while the call was captured: it is captured again")
    return call()


def _is_of_the_capture(error: Exception) -> bool:
    """Whether an error says that a call cannot be captured as one graph, which stages do not need."""
    return error.stages_may_do if isinstance(error, CaptureError) else _compat.is_no_graph(error)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same under a code object that no other has: by these Dynamo counts what it compiles, so
    that many modules of one class would end each other's plans."""
    if isinstance(function, MethodType):
        return MethodType(with_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType) or _compat.is_skipped(function):
        # what Dynamo skips, such as the forward of torch's own modules, it would call from one frame for all of them

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return with_own_code(run)
    code = function.__code__.replace()
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
