"""Hooks on the copy of a stage that is measured: they leave the caller's lists, counters and loggers as they are."""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .._compat.module_state import CALL_HOOKS

_CONTAINERS = (list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter)

_STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"})


def copied_apart(module: nn.Module) -> nn.Module:
    """A deep copy of a module whose hooks write to nothing of the caller's.

    A hook that gives nothing, and stores nothing, only looks on: the copy is without it. Any other may be a part of
    what the module computes: it runs, on copies of the containers and objects that it has in its closure, among its
    defaults and globals, and on loggers that say nothing. What it reaches by way of other functions is the caller's.
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(module, memo)
    apart = _Apart(memo)
    for part in copied.modules():
        for name in CALL_HOOKS:
            hooks = part.__dict__.get(name) or {}
            for key, hook in list(hooks.items()):
                if _looks_on(hook):
                    del hooks[key]
                else:
                    hooks[key] = apart.of(hook)
    return copied


def _looks_on(hook: Any) -> bool:
    """Whether a hook is a function of the caller's that always returns None, and neither stores nor writes in place."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType) or _of_torch(function):
        return False
    ops = list(dis.get_instructions(function))
    returned = [before for before, now in pairwise(ops) if now.opname == "RETURN_VALUE"]
    constants = [op for op in ops if op.opname == "RETURN_CONST"]
    gives_none = all(op.opname == "LOAD_CONST" and op.argval is None for op in returned)
    gives_none = gives_none and all(op.argval is None for op in constants)
    in_place = any(name == "setattr" or (name.endswith("_") and name[:1] != "_") for name in function.__code__.co_names)
    return gives_none and not in_place and not any(op.opname in _STORES for op in ops)


def _of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Apart:
    """What stands for the caller's objects in hooks of a copy.

    Args:
        memo: of the deep copy: what modules and tensors have become.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, tuple[Any, Any]] = {}  # the caller's objects stay alive with it

    def of(self, value: Any) -> Any:
        """What stands for an object; the object itself where nothing can be written to it."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, (nn.Module, torch.Tensor)):
            return self._memo.get(id(value), value)
        made: Any = value
        if isinstance(value, FunctionType) and not _of_torch(value):
            return self._function(value)
        if isinstance(value, MethodType):
            made = MethodType(self.of(value.__func__), value.__self__)
        elif isinstance(value, functools.partial):
            made = functools.partial(self.of(value.func), *map(self.of, value.args), **self._each(value.keywords))
        elif isinstance(value, logging.Logger):
            made = logging.Logger(value.name, logging.CRITICAL + 1)
        elif isinstance(value, _CONTAINERS):
            made = copy.copy(value)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, type(copy))):
            with suppress(Exception):  # whatever its class does when it is copied
                made = copy.copy(value)
                for name, item in vars(made).items():
                    if isinstance(item, (*_CONTAINERS, logging.Logger)):
                        made.__dict__[name] = self.of(item)
        self._made[id(value)] = value, made
        return made

    def _each(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self.of(item) for name, item in values.items()}

    def _function(self, function: FunctionType) -> FunctionType:
        names = set(_names(function.__code__)) & function.__globals__.keys() - vars(builtins).keys()
        found = {name: function.__globals__[name] for name in sorted(names)}
        own = {name: self.of(v) for name, v in found.items() if not isinstance(v, (FunctionType, type, type(copy)))}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__,
            {**function.__globals__, **own} if own else function.__globals__,
            function.__name__,
            tuple(map(self.of, function.__defaults__ or ())) or None,
            cells,
        )
        made.__kwdefaults__ = self._each(function.__kwdefaults__ or {}) or None
        self._made[id(function)] = function, made
        for cell, theirs in zip(cells, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty yet
                cell.cell_contents = self.of(theirs.cell_contents)
        return made
