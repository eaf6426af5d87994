"""What tells one kind of call from another: looked at before every step, so it has to be quick."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.module_state import (
    BUFFERS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    MODULES,
    PARAMETERS,
    buffers_of,
    global_hooks,
    modules_of,
    parameters_of,
)
from ..device import AUTOCAST_KINDS
from .dataflow import tensors as tensors_in

ASPECTS = ("arguments", "train mode", "parameters", "buffers", "autocast", "hooks", "submodules")
OF_A_TENSOR = ("shape", "strides", "dtype", "device", "requires_grad", "which of them are one tensor")
"""In the order of `_describe`. A tensor that is passed twice is told from two: some modules, such as
nn.MultiheadAttention, look whether their arguments are one, and run other kernels."""


class Call:
    """One call of a module, looked at once.

    Attributes:
        module: whose parameters and buffers the call uses.
        run: what is called: the module, hooks included, or its forward alone.
        arguments: the arguments as a key, numbers by their type alone.
        numbers: the values of the integers and floats among the arguments.
    """

    __slots__ = ("args", "arguments", "kwargs", "module", "numbers", "run")

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.module, self.run, self.args, self.kwargs = module, run, tuple(args), dict(kwargs)
        leaves: list[Any] = []
        numbers: list[int | float] = []
        seen: dict[int, int] = {}
        _describe(self.args, leaves, seen, numbers)
        _describe(self.kwargs, leaves, seen, numbers)
        self.arguments, self.numbers = tuple(leaves), tuple(numbers)

    def finds_gradients(self) -> bool:
        """Whether some parameter has a gradient: then the step adds to gradients that stay."""
        own = (p for part in parts(self.module) for p in part.__dict__[PARAMETERS].values())
        return any(p is not None and p.is_leaf and p.grad is not None for p in own)


@dataclass(frozen=True, eq=False)
class Kind:
    """The calls that may run by one plan, or by none.

    Attributes:
        arguments: what they have in common of their arguments: see `Call`.
        numbers: the numbers among the arguments, where the guards do not tell whether they matter; else None.
        guards: what the capture read of Python's state; None where nothing was captured, and `state` stands for it.
        code: the classes of the submodules, with the code that was captured.
        hooks: those that ran around every module's call.
        gradients: whether there are gradients before the step, where the plan's budget holds for such calls only.
        outdated: says why the plan counts too little from now on, where something may make it so.
    """

    arguments: tuple[Any, ...]
    numbers: tuple[int | float, ...] | None
    guards: _compat.CallGuards | None = field(repr=False)
    state: tuple[Any, ...] | None = field(repr=False)
    code: tuple[tuple[type[nn.Module], Any], ...] = field(repr=False)
    hooks: tuple[Any, ...]
    gradients: bool | None = None
    outdated: Callable[[], str] = str

    @classmethod
    def of(
        cls,
        call: Call,
        guards: _compat.CallGuards | None,
        numbers_matter: bool = True,
        gradients: bool | None = None,
        outdated: Callable[[], str] = str,
    ) -> Kind:
        """The kind of a call that was captured with these guards; without, all that it is told by is its state."""
        types = dict.fromkeys(type(part) for part in parts(call.module))
        return cls(
            arguments=call.arguments,
            numbers=call.numbers if numbers_matter else None,
            guards=guards,
            state=None if guards else state_of(call.module),
            code=tuple((t, t.forward) for t in types),
            hooks=global_hooks(),
            gradients=gradients,
            outdated=outdated,
        )

    def holds(self, call: Call) -> bool:
        """Whether a call with these arguments is one of this kind."""
        if self.numbers is not None and self.numbers != call.numbers:
            return False
        if self.hooks != global_hooks() or any(t.forward is not code for t, code in self.code):
            return False
        if self.gradients is not None and self.gradients != call.finds_gradients():
            return False
        if self.outdated():
            return False
        if self.guards is None:
            return self.state == state_of(call.module)
        return self.guards.hold(call.run, call.args, call.kwargs)

    def broken(self, call: Call) -> str:
        """In what a call with these arguments differs, for the log."""
        if self.numbers is not None and self.numbers != call.numbers:
            return f"the numbers {call.numbers} among the arguments, not {self.numbers}"
        if self.hooks != global_hooks():
            return "the hooks of all modules"
        for t, code in self.code:
            if t.forward is not code:
                return f"{t.__name__}.forward"
        if self.gradients is not None and self.gradients != call.finds_gradients():
            return "gradients that are not there any more" if self.gradients else "gradients that stay from before"
        if self.outdated():
            return self.outdated()
        if self.guards is None:
            assert self.state is not None
            return what_changed(((), *state_of(call.module)), ((), *self.state))
        return self.guards.broken(call.run, call.args, call.kwargs)

    def broken_number(self, call: Call) -> str:
        """The number among a call's arguments by which it differs; empty where it differs in something else."""
        if self.numbers is not None and self.numbers != call.numbers:
            return "numbers"
        return "" if self.guards is None else self.guards.number(call.run, call.args, call.kwargs)


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """The train mode, the parameters' and buffers' metadata, autocast, the number of hooks and which modules these are,
    as a key."""
    training: list[bool] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    hooks = 0
    modules = tuple(parts(module))
    for part in modules:
        state = part.__dict__
        training.append(state["training"])
        for p in state[PARAMETERS].values():
            if p is not None:
                parameters += (p.requires_grad, p.dtype, p.device, p.shape)
        for b in state[BUFFERS].values():
            if b is not None:
                buffers += (b.dtype, b.device, b.shape)
        hooks += len(state[FORWARD_HOOKS]) + len(state[FORWARD_PRE_HOOKS])
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_KINDS)
    return tuple(training), tuple(parameters), tuple(buffers), autocast, hooks, tuple(map(weakref.ref, modules))


def shared_with_state(overwritten: Sequence[int], tensors: Sequence[torch.Tensor], call: Call) -> str:
    """Which of a module's tensors that a step overwrites shares memory with an argument, in words; empty: none does.

    Args:
        overwritten: their positions among `tensors`.
    """
    if not overwritten:
        return ""
    given = frozenset(_compat.storage_keys(tensors_in((call.args, call.kwargs))))
    if given.isdisjoint(_compat.storage_keys([tensors[position] for position in overwritten])):
        return ""
    for position in overwritten:
        if _compat.storage_key(tensors[position]) in given:
            names = [name for name, t in call.module.named_buffers() if t is tensors[position]]
            return f"an argument shares memory with {names[0] if names else 'a tensor of the module'}"
    return ""


def shared_arguments(tensors: Sequence[torch.Tensor], call: Call) -> str:
    """Which argument lies in the memory of another tensor that a step takes, in words; empty: none does.

    Args:
        tensors: the module's. The same tensor twice is no such case: the kind of a call tells it from two.
    """
    seen = dict(zip(_compat.storage_keys(tensors), tensors, strict=True))
    given = list(tensors_in((call.args, call.kwargs)))
    for number, (key, tensor) in enumerate(zip(_compat.storage_keys(given), given, strict=True)):
        if seen.setdefault(key, tensor) is not tensor:
            return f"tensor {number} of the arguments shares memory with another tensor of the step"
    return ""


def what_changed(new: tuple[Any, ...], old: tuple[Any, ...]) -> str:
    """The aspects in which two kinds differ, for the log."""
    found = [name for name, a, b in zip(ASPECTS, new, old, strict=False) if a != b]
    details = _of_arguments(new[0], old[0])
    return ", ".join(f"{name} ({details})" if name == "arguments" and details else name for name in found)


def _of_arguments(new: tuple[Any, ...], old: tuple[Any, ...]) -> str:
    """In what the tensors of two calls differ; empty where the calls are not built alike."""
    pairs = list(zip(new, old, strict=False))
    if len(new) != len(old) or any(_is_tensor(a) != _is_tensor(b) or (a != b and not _is_tensor(a)) for a, b in pairs):
        return ""
    return ", ".join(
        name for i, name in enumerate(OF_A_TENSOR) if any(_is_tensor(a) and a[i] != b[i] for a, b in pairs)
    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == len(OF_A_TENSOR)


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all modules in it, each once, in an order of its own: `modules()` without names takes longer."""
    seen: set[nn.Module] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is not None and part not in seen:
            seen.add(part)
            yield part
            stack.extend(part.__dict__[MODULES].values())


class Holders:
    """Tensors of a module by name, found again without walking their paths while the modules on them are the same.

    Args:
        names: of parameters and buffers, and of what `guards` reads.
    """

    def __init__(self, names: Sequence[str], guards: _compat.CallGuards | None = None) -> None:
        self.names, self._guards = tuple(names), guards
        self._links: list[tuple[Mapping[str, Any], str, nn.Module]] = []
        """For each module on a path: what its parent holds, under which name, and the module."""
        self._found: list[tuple[Mapping[str, Any] | None, str]] = []
        """For each name what holds it now; None: it is read in each call, and not kept alive."""

    def tensors(self, call: Call) -> list[torch.Tensor]:
        """What the names stand for now."""
        read = {} if self._guards is None else self._guards.read(call.run, call.args, call.kwargs)
        if not self._found or not self._as_found(call.module):
            links: dict[tuple[int, str], tuple[Mapping[str, Any], str, nn.Module]] = {}
            self._found = [
                _holder(call.module, name, links) if name not in read else (None, name) for name in self.names
            ]
            self._links, self._module = list(links.values()), call.module
        return [read[name] if holder is None else holder[name] for holder, name in self._found]

    def _as_found(self, module: nn.Module) -> bool:
        """Whether the modules on all paths are the ones that were found."""
        if module is not self._module:
            return False
        for held, name, part in self._links:
            if held[MODULES].get(name) is not part:
                return False
        return all(holder is None or name in holder for holder, name in self._found)


def _holder(
    module: nn.Module, path: str, links: dict[tuple[int, str], tuple[Mapping[str, Any], str, nn.Module]]
) -> tuple[Mapping[str, Any], str]:
    *parents, name = path.split(".")
    for parent in parents:
        held, part = module.__dict__, modules_of(module)[parent]
        assert part is not None
        links[id(held), parent] = held, parent, part
        module = part
    own = parameters_of(module)
    return (buffers_of(module) if own.get(name) is None else own), name


def _describe(thing: Any, leaves: list[Any], seen: dict[int, int], numbers: list[int | float]) -> None:
    if isinstance(thing, torch.Tensor):
        same = seen.setdefault(id(thing), len(leaves))
        leaves.append((thing.shape, thing.stride(), thing.dtype, thing.device, thing.requires_grad, same))
    elif isinstance(thing, Mapping):
        leaves.append((type(thing), len(thing)))
        for key, value in thing.items():
            leaves.append(key)
            _describe(value, leaves, seen, numbers)
    elif isinstance(thing, (tuple, list)):
        leaves.append((type(thing), len(thing)))
        for value in thing:
            _describe(value, leaves, seen, numbers)
    elif isinstance(thing, (int, float)) and not isinstance(thing, bool):
        leaves.append(type(thing))
        numbers.append(thing)
    elif isinstance(thing, (int, str, complex, bytes, type(None), torch.dtype, torch.device)):
        leaves.append((type(thing), thing))
    else:
        leaves.append((type(thing), id(thing)))
