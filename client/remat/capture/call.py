"""One call of a module: as the caller wrote it, as it is planned, and the state of Python that it depends on."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat_ir import InvalidData

from .._compat.module_state import BUFFERS, FORWARD_HOOKS, FORWARD_PRE_HOOKS, MODULES, PARAMETERS
from ..device import AUTOCAST_KINDS

log = logging.getLogger("remat")


def check_module(model: object) -> None:
    """Refuse what is no module to train.

    Raises:
        InvalidData: it is none; the message says what to write.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InvalidData(f"the model must be a module, not the class {model.__name__}: write {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise InvalidData(f"the model must be a torch.nn.Module, not {type(model).__name__}")


def example_call(example_args: object, example_kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call, from what a caller gave.

    Args:
        example_args: a tuple or list of positional arguments; one tensor; or a mapping, such as a tokenizer's batch, of
            keyword arguments.
        example_kwargs: a mapping of keyword arguments, or None.

    Raises:
        InvalidData: anything else; the message says what to write.
    """
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InvalidData(
            f"example_kwargs must be a dict of the call's keyword arguments, not {type(example_kwargs).__name__}: "
            "write optimize(model, (x, y), budget=…) for positional ones"
        )
    kwargs = dict(example_kwargs or {})
    if isinstance(example_args, Mapping):
        if twice := sorted(set(example_args) & set(kwargs)):
            raise InvalidData(f"the example call has {twice[0]} twice: give the batch or example_kwargs, not both")
        return (), {**example_args, **kwargs}
    if isinstance(example_args, torch.Tensor):
        return (example_args,), kwargs
    if isinstance(example_args, (tuple, list)):
        return tuple(example_args), kwargs
    raise InvalidData(
        "the example call must be a tensor, a tuple of positional arguments or a dict of keyword arguments, not "
        f"{type(example_args).__name__}: write optimize(model, (x,), budget=…) or optimize(model, batch, budget=…)"
    )


class CacheSwitch:
    """Leaves a transformers model's key–value cache out of the calls that are planned.

    Such a model returns its cache where its config says `use_cache`, which is the default; training does not read it,
    and a captured step cannot return it. The config stays as it is: a call without gradients has its cache.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(inspect.signature(module.forward).parameters)
        has_config = getattr(getattr(module, "config", None), "use_cache", None) is not None
        self._before = parameters.index("use_cache") if has_config and "use_cache" in parameters else None
        self._name, self._config, self._said = type(module).__name__, getattr(module, "config", None), False

    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keyword arguments of the call as it is planned."""
        left = self._before is None or kwargs.get("use_cache") is not None or len(args) > self._before
        if left or not getattr(self._config, "use_cache", False):
            return kwargs
        if not self._said:
            self._said = True
            log.info("%s trains with use_cache=False: a training step has no use for a key-value cache", self._name)
        return {**kwargs, "use_cache": False}


def install_recorders(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks by which transformers records what parts of a model give, such as routers, where a call does.

    It would install them at that call, behind a lock that no capture goes through. They stay, and `torch.save` refuses
    a model that has them: a call that records nothing has none without a plan, either.
    """
    install: Any = getattr(
        sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None
    )
    if install is None:
        return
    configs = {id(c): c for part in module.modules() if (c := getattr(part, "config", None)) is not None}
    settings = ((n, c) for c in configs.values() for n in dir(c) if n.startswith("output_"))
    given = (*kwargs.items(), *((name, getattr(config, name, None)) for name, config in settings))
    if not any(_asks_for_record(name, value) for name, value in given):
        return
    for part in module.modules():
        forward: Any = type(part).forward
        while forward is not None:
            if install.__name__ in getattr(getattr(forward, "__code__", None), "co_names", ()):
                install(part)
                break
            forward = getattr(forward, "__wrapped__", None)


def _asks_for_record(name: str, value: object) -> bool:
    """Whether an argument or a setting asks a model of transformers for what its parts give, or some of its layers."""
    layers = name == "output_hidden_states" and value is not None and value is not False
    return name.startswith("output_") and (value is True or layers)


def state_of(module: nn.Module) -> tuple[object, ...]:
    """The train mode, the parameters' and buffers' metadata, autocast, the number of hooks and which modules these are,
    as a key."""
    training: list[bool] = []
    parameters: list[object] = []
    buffers: list[object] = []
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
