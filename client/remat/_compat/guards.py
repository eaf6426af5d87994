"""Dynamo's guards: what it read of Python's state while it traced a call, checked and read again at a later one."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.guards as _dynamo_guards
from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder, GuardManagerType
from torch._dynamo.source import AttrSource, RandomValueSource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._guards import Source

from .versions import lacking, require

__all__ = ["CallGuards", "Guards", "Values", "globals_of"]

require(
    lacking(
        ((get_traced_fn, ("mod",)),),
        (
            (CheckFunctionManager, "build_guards"),
            (GuardBuilder, "requires_key_order_guarding"),
            (GuardBuilder, "_set_guard_export_info"),
            (AttrSource, "_name_template"),
            (_dynamo_config, "skip_nnmodule_hook_guards"),
        ),
    )
)


def globals_of(call: Callable[..., Any]) -> dict[str, Any]:
    """The globals of the code that a call runs first."""
    return get_traced_fn(call)[0].__globals__


class Values:
    """What sources stand for now, each read once.

    Args:
        scope: the local variables as "L", the globals as "G".
        variables: what else sources may name.
    """

    def __init__(self, scope: dict[str, Any], variables: Mapping[str, Any]) -> None:
        self._scope, self._variables = scope, dict(variables)
        self._held: dict[int, tuple[Source, Any]] = {}
        """By the identity of a source, which is kept alive for it."""
        self._equal: dict[Source, Any] = {}

    def of(self, source: Any) -> Any:
        """What a source stands for; raises what reading it does."""
        held = self._held.get(id(source))
        if held is None:
            if source not in self._equal:
                self._equal[source] = self._read(source)
            held = self._held[id(source)] = source, self._equal[source]
        return held[1]

    def _read(self, source: Any) -> Any:
        if type(source)._name_template is _ATTRIBUTE:  # what most sources are: reading the expression takes longer
            return getattr(self.of(source.base), source.member)
        return source.get_value(self._scope, self._variables, self._equal)


_ATTRIBUTE = AttrSource._name_template


class _Builder(GuardBuilder):
    """Builds the guards that Dynamo's builder does, and does not read again, for each guard, what it has read."""

    _values: Values | None = None

    def get(self, guard_or_source: Any, closure_vars: dict[str, Any] | None = None) -> Any:
        if closure_vars is not None:
            return super().get(guard_or_source, closure_vars)
        if self._values is None:
            self._values = Values(self.scope, _dynamo_guards._get_closure_vars())
        return self._values.of(
            guard_or_source if isinstance(guard_or_source, Source) else guard_or_source.originating_source
        )

    def requires_key_order_guarding(self, source: Source) -> bool:
        return bool(self.key_order_guarded_dict_ids) and super().requires_key_order_guarding(source)

    def getattr_on_nn_module(
        self,
        source: Any,
        base_guard_manager: Any,
        base_example_value: Any,
        example_value: Any,
        base_source_name: str,
        source_name: str,
        guard_manager_enum: Any,
    ) -> Any:
        held = vars(base_example_value)
        given = (source, base_guard_manager, base_example_value, example_value, base_source_name, source_name)
        if source.member not in held:
            return super().getattr_on_nn_module(*given, guard_manager_enum)
        own = base_guard_manager.get_generic_dict_manager(
            source=f"{base_source_name}.__dict__",
            example_value=self._get_generic_dict_manager_example_value(held),
            guard_manager_enum=GuardManagerType.GUARD_MANAGER,
        )
        if isinstance(own, DictGuardManager):
            return super().getattr_on_nn_module(*given, guard_manager_enum)
        return own.dict_getitem_manager(
            key=source.member,
            source=source_name,
            example_value=example_value,
            guard_manager_enum=self.get_guard_manager_type(source, example_value),
        )

    def _set_guard_export_info(self, guard: Any, code_list: list[str], *_: Any, **__: Any) -> None:
        guard.code_list = [*(guard.code_list or ()), *code_list]


class Guards(CheckFunctionManager):
    """Dynamo's guards of a frame, by `_Builder`.

    Args:
        code: of the frame.
        state: what Dynamo has noted of it.

    Raises:
        AssertionError: they do not hold for the local variables that the state has.
    """

    def __init__(self, code: types.CodeType, state: Any) -> None:
        unchecked = copy.copy(state)
        unchecked.skip_guards_check = True  # with it goes a measurement of how long they take, of 0.1 s
        super().__init__(code, unchecked)
        if not (state.skip_guards_check or self.guard_manager.check(state.local_scope)):
            raise AssertionError("guards do not hold for what they were built on")

    build_guards = types.FunctionType(
        CheckFunctionManager.build_guards.__code__,
        {**vars(_dynamo_guards), "GuardBuilder": _Builder},
        argdefs=CheckFunctionManager.build_guards.__defaults__,
    )


class CallGuards:
    """What the capture of one call read, besides the parameters and buffers that the graph takes.

    Args:
        call: what was captured: a module, or a method of one.
        root: makes the guards of the code that it runs and of the local variables that this begins with.

    Attributes:
        names: of the tensors that the traced code reads elsewhere, as buffers of the graph.
        drawing: whether reading them draws numbers from Python's `random`, as the call does.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        root: Callable[[types.CodeType, dict[str, Any]], Any],
    ) -> None:
        self._function, owner = get_traced_fn(call)
        self._bound = owner is not None
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        parameters = self._signature.parameters.values()
        self._plain = all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        """Whether arguments bind by position and name alone; `inspect` takes its time, before every step."""
        self._positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._read: dict[int, str] = {}
        self._inputs: Callable[..., Any] | None = None
        self.names: tuple[str, ...] = ()
        self.drawing = False
        local = self.local(call, args, kwargs)
        assert local is not None
        with get_metrics_context(), dynamo_timed("remat_guards"), _dynamo_config.patch(skip_nnmodule_hook_guards=False):
            self._root = root(self._function.__code__, local)

    @classmethod
    def of_graph(
        cls, graph: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallGuards:
        """Those of a graph as `strict_graph` made it; tensors that the traced code reads elsewhere become buffers."""
        made = graph._dynamo_bytecode_flatten.out
        captured = made.graph_capture_output
        guards = cls(call, args, kwargs, lambda code, _: Guards(code, captured.output_graph).guard_manager.root)
        sources = captured.output_graph.export_metadata.graph_input_idx_to_local_source
        arguments = list(guards._signature.parameters)[guards._bound :]
        guards._read = _lifted(graph, [str(source.name) for source in sources.values()], args, kwargs, arguments)
        guards._inputs = guards._up_to_the_graph(made) if guards._read else None
        guards.names = tuple(guards._read.values())
        guards.drawing = any(isinstance(source, RandomValueSource) for source in sources.values())
        return guards

    def _up_to_the_graph(self, made: Any) -> Callable[..., Any]:
        """The captured frame as a function that raises `_Found` where it calls its graph.

        It reads the globals of the caller's code as they are then; `forward_callable` would read a copy of them.
        """
        found = made.graph_capture_output
        scope, called = found.f_globals, made.backend_input.backend_id
        for alias, name in found.import_sources.items():
            scope.setdefault(alias, importlib.import_module(name))
        scope[called] = _Found.give
        weakref.finalize(self, scope.pop, called, None).atexit = False
        function = types.FunctionType(found.bytecode, scope, closure=found.closure, argdefs=found.argdefs)
        function.__kwdefaults__ = found.kwdefaults
        return function

    def local(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The local variables that the call begins with; None where it runs another function now."""
        function, owner = get_traced_fn(call)
        if function is not self._function:
            return None
        every = (owner, *args) if self._bound else args
        if self._plain:
            found = {**self._defaults, **dict(zip(self._positional, every, strict=False)), **kwargs}
        else:
            given = self._signature.bind(*every, **kwargs)
            given.apply_defaults()
            found = dict(given.arguments)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found[name] = cell.cell_contents
        return found

    def hold(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether all that tracing read is as it was."""
        scope = self.local(call, args, kwargs)
        return scope is not None and bool(self._root.check(scope))

    def broken(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What is no longer as it was, in Python's words; empty where everything is."""
        scope = self.local(call, args, kwargs)
        if scope is None:
            return "the function that a call runs"
        found = self._root.check_verbose(scope)
        return "" if found.result else "; ".join(map(_readable, found.verbose_code_parts[:1])) or "a guard of Dynamo's"

    def number(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The number among the arguments that is no longer as it was; empty where it is something else."""
        scope = self.local(call, args, kwargs)
        parts = [] if scope is None else self._root.check_verbose(scope).verbose_code_parts[:1]
        arguments = list(self._signature.parameters)[self._bound :]
        for found in filter(None, (re.match(r"L((?:\['\w+'\]|\[\d+\])+) == [-+.\w]+", part) for part in parts)):
            path = re.findall(r"\w+", found[1])
            if path[0] in arguments:
                return ".".join(path)
        return ""

    def read(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors now that are neither arguments, parameters nor buffers, by name."""
        if self._inputs is None:
            return {}
        owner = get_traced_fn(call)[1]
        try:
            self._inputs(*((owner, *args) if self._bound else args), **kwargs)
        except _Found as found:
            return {name: found.inputs[position] for position, name in self._read.items()}
        raise AssertionError("the captured frame calls no graph")


class _Found(Exception):
    """What a graph was about to be called with."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs

    @staticmethod
    def give(*inputs: Any) -> Any:
        raise _Found(inputs)


def _lifted(
    graph: Any, sources: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Sequence[str]
) -> dict[int, str]:
    """Make buffers of the tensors that the graph reads and nobody gives it; their names by position among its inputs.

    Left alone, they are constants of what is captured: a tensor put in their place later is not seen, and what
    backward reads is a copy.
    """
    flatten = graph._dynamo_bytecode_flatten
    given = flatten(*args, *kwargs.values())
    given_names = tuple(f"L['{name}']" for name in arguments)
    known = {id(t) for t in (*graph.parameters(), *graph.buffers())}
    places: dict[int, str] = {}
    graph._buffers = dict(graph._buffers)  # the module's own, until here
    for position, (source, tensor) in enumerate(zip(sources, given, strict=True)):
        if source.startswith(given_names) or id(tensor) in known or not isinstance(tensor, torch.Tensor):
            continue
        name = places[position] = f"read_{len(places)}_" + re.sub(r"\W+", "_", source).strip("_")
        graph._buffers[name] = tensor
    if places:

        def given_buffers(*inputs: Any) -> tuple[Any, ...]:
            flat = list(flatten(*inputs))
            for position, name in places.items():
                flat[position] = graph._buffers[name]
            return tuple(flat)

        given_buffers.input_processor = flatten.input_processor  # type: ignore[attr-defined]
        graph._dynamo_bytecode_flatten = graph.graph._codegen.dynamo_bytecode_flatten = given_buffers
    return places


def _readable(code: str) -> str:
    """A guard without Dynamo's spelling of names and without its remarks."""
    text = re.sub(r"\s+", " ", code.partition("  # ")[0].partition("(HINT")[0]).strip()
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"\b[LG]\['([^']+)'\]", r"\1", text)
    return f"no longer {text}"
