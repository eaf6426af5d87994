"""A module that trains by plans behind `torch.compile`, in place: what an enabled module's `forward` is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.module_state import called_module, global_hooks
from ..capture.call import CacheSwitch, install_recorders
from ..capture.trace import logging_functions, untraced
from ..errors import CaptureError
from .sized import SizedBackend

MOST_GRAPHS = 64
"""Graphs of one frame: past them Dynamo warns, and runs the frame as it is."""


class Carrier:
    """The `forward` of a module that runs by plans where gradients are enabled, and as it is where they are not.

    It compiles the forward that the module has, one of the instance's own included, under a code object of its own. A
    deep copy of the module gets a carrier of its own, without plans yet; a pickled module comes back without remat.

    Args:
        before: the instance's own forward; None: it has its class's.
        make_backend: a backend without plans.

    Attributes:
        trainer: what has enabled it for a run that ends by itself; empty where a user has.
        undo: called by `disable`, to switch a key–value cache on again that is off for that run.
    """

    trainer = ""

    @staticmethod
    def undo() -> None:
        """Nothing is to be undone besides."""

    def __init__(
        self, model: nn.Module, before: Callable[..., Any] | None, make_backend: Callable[[], SizedBackend]
    ) -> None:
        self.model, self.before, self._make_backend = model, before, make_backend
        self.backend = make_backend()
        self._run: Callable[..., Any] | None = None
        self._unguarded: tuple[Any, ...] = ()
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
            return self.own()(*args, **kwargs)
        unguarded = self._seen()
        install_recorders(self.model, kwargs)
        if self._run is None or unguarded != self._unguarded:
            self._run = self._compiled()
            self._unguarded = self._seen()
        with _compat.dynamo_settings(self._logging, MOST_GRAPHS):
            return self._run(*args, **self._cache.planned(args, kwargs))

    def _compiled(self) -> Callable[..., Any]:
        """The forward compiled anew: nothing of an earlier compilation is found again."""
        self._logging = logging_functions(self.model)
        self._classes = tuple({type(part) for part in self.model.modules()})
        self.backend = self._make_backend()
        own = with_own_code(self.own())
        if isinstance(own, MethodType):  # Dynamo guards what it is given, and not what a method is bound to
            compiled = torch.compile(own.__func__, backend=self.backend)
            return functools.partial(compiled, own.__self__)
        return torch.compile(own, backend=self.backend)

    def _seen(self) -> tuple[Any, ...]:
        """What changes a call and no guard of Dynamo's looks at: hooks of all modules, methods of parts' classes."""
        return global_hooks(), tuple((kind.forward, kind.__call__) for kind in self._classes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier:
        model = copy.deepcopy(self.model, memo)
        return Carrier(model, copy.deepcopy(self.before, memo), self._make_backend)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return copy.copy, (self.before,)
        return getattr, (self.model, "forward")


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same under a code object that no other has: by these Dynamo counts what it compiles, so
    that many modules of one class would end each other's plans."""
    if isinstance(function, MethodType):
        return MethodType(with_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return with_own_code(run)
    code = function.__code__.replace()
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
