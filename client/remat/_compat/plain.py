"""Metadata of torch as JSON and back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.source as _source
from torch import fx
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from .memory import storage_key

__all__ = ["ALIAS", "PLAIN", "Reader", "Unreadable", "Writer"]

PLAIN = (bool, int, str, type(None))

_HOLDERS = frozenset(
    {"torch._dynamo.source", "torch._guards", "torch.utils._pytree"}
    | {f"torch._functorch._aot_autograd.{name}" for name in ("runtime_wrappers", "descriptors", "schemas")}
    | {"torch._functorch._aot_autograd.subclass_utils"}
)
"""The modules whose data classes a capture may have."""


class Unreadable(Exception):
    """A capture that cannot be written, or bytes that are none; the message says why."""


ALIAS = "__remat_module_"
"""Before the name of a module, where guards find it among the globals of the code that is called."""


_VALUES, _TENSORS, _NODES = range(3)
"""The tables that a pair of numbers, [row, table], stands for a row of."""

_LONG = 20
"""Texts of so many characters are written once."""


class Writer:
    """Things as JSON: what occurs again is a row of a table, and so is each object, tensor and node.

    Attributes:
        storages: of the tensors, with their bytes and devices.
        tensors: the tensors' metadata.
        shapes: classes with the names of their attributes, and kinds of dictionaries with their keys.
        values: all else that occurs again, and the objects; those after them refer to them.
    """

    def __init__(self, nodes: Mapping[fx.Node, int], aliases: Mapping[str, str]) -> None:
        self._nodes, self._aliases = nodes, aliases
        self._rows: dict[Any, list[int]] = {}
        """Where things are: by their identity, or by the words that stand for them."""
        self._alive: list[Any] = []
        self._storages: dict[int, int] = {}
        self._shapes: dict[Any, int] = {}
        self.storages: list[Any] = []
        self.tensors: list[Any] = []
        self.shapes: list[Any] = []
        self.values: list[Any] = []

    def write(self, thing: Any) -> Any:
        """A thing as JSON.

        Raises:
            Unreadable: it has no such form.
        """
        kind = type(thing)
        if kind in PLAIN:
            return self._shared(thing, thing) if kind is str and len(thing) >= _LONG else thing
        if kind is fx.Node:
            return [self._nodes[thing], _NODES]
        found = self._rows.get(id(thing))
        if found is not None:
            return found
        if kind in _NESTED:
            written = [_NESTED[kind], *map(self.write, thing)]
            plain = _NESTED[kind] in ("tuple", "size") and list not in map(type, written)
            return self._shared(repr(written), written) if plain else written
        if isinstance(thing, (dict, collections.OrderedDict)):
            if set(map(type, thing)) <= {str}:
                return ["map", self._shape("", kind.__name__, thing), *map(self.write, thing.values())]
            return ["dict", kind.__name__, *([self.write(k), self.write(v)] for k, v in thing.items())]
        if isinstance(thing, FakeTensor):
            return self._at(thing, self._tensor(thing), _TENSORS)
        leaf = self._leaf(thing, kind)
        if leaf is not None:
            return self._shared(repr(leaf), leaf)
        if dataclasses.is_dataclass(thing):
            return self._at(thing, self._object(thing), _VALUES)
        raise Unreadable(f"it has a {kind.__module__}.{kind.__qualname__}")

    def _leaf(self, thing: Any, kind: Any) -> list[Any] | None:
        if kind in (float, complex):
            return [kind.__name__, repr(thing)]
        if kind is slice:
            return ["slice", *map(self.write, (thing.start, thing.stop, thing.step))]
        if isinstance(thing, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", str(thing).removeprefix("torch.")]
        if isinstance(thing, torch.device):
            return ["device", str(thing)]
        if isinstance(thing, torch._ops.OpOverload) or thing is operator.getitem:
            return ["operator", "getitem" if thing is operator.getitem else str(thing)]
        if isinstance(thing, type):
            return ["type", thing.__module__, thing.__qualname__]
        if isinstance(thing, enum.Enum):
            return ["enum", kind.__module__, kind.__qualname__, thing.name]
        if kind is _source.GlobalSource and thing.global_name in self._aliases:
            return ["module", self._aliases[thing.global_name]]
        return None

    def _shared(self, words: str, written: Any) -> list[int]:
        """A row of the values that is written once; `words` are those of no other one."""
        key = (type(written), words)
        if key not in self._rows:
            self._rows[key] = [len(self.values), _VALUES]
            self.values.append(written)
        return self._rows[key]

    def _at(self, thing: Any, row: int, table: int) -> list[int]:
        self._alive.append(thing)
        found = self._rows[id(thing)] = [row, table]
        return found

    def _shape(self, module: str, name: str, keys: Iterable[str]) -> int:
        key = (module, name, *keys)
        if key not in self._shapes:
            self._shapes[key] = len(self.shapes)
            self.shapes.append((module, name, key[2:]))
        return self._shapes[key]

    def _object(self, thing: Any) -> int:
        fields = dataclasses.fields(thing)
        if isinstance(thing, Source):  # which keeps its names, too, and they are of this process
            own = {f.name: getattr(thing, f.name) for f in fields if f.init}
        else:
            own = {f.name: getattr(thing, f.name) for f in fields if hasattr(thing, f.name)}
            own |= getattr(thing, "__dict__", {})
        shape = self._shape(type(thing).__module__, type(thing).__name__, own)
        written = ["object", shape, *map(self.write, own.values())]
        self.values.append(written)  # after those that it holds
        return len(self.values) - 1

    def _tensor(self, tensor: FakeTensor) -> int:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.constant is not None:
            raise Unreadable("it has a tensor of another kind")
        key = storage_key(tensor)
        if key not in self._storages:
            self._storages[key] = len(self.storages)
            self.storages.append((tensor.untyped_storage().nbytes(), str(tensor.device)))
        place = (self._storages[key], tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.tensors.append((*place, str(tensor.dtype).removeprefix("torch."), tensor.requires_grad))
        return len(self.tensors) - 1


_NESTED: dict[Any, str] = {
    tuple: "tuple",
    list: "list",
    fx.immutable_collections.immutable_list: "list",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    OrderedSet: "list",
}
_MADE: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "size": torch.Size}


class Reader:
    """What `Writer` has written: it makes containers and objects that hold metadata, and calls nothing else.

    Args:
        nodes: of the graph, as far as they are made: whoever makes one adds it.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], nodes: Sequence[fx.Node], shapes: Sequence[Any], values: Sequence[Any]
    ) -> None:
        made: list[Any] = []
        self._tables = (made, tensors, nodes)
        self._shapes = [
            (_class(module, name, holds=True) if module else _DICTIONARIES.get(name, dict), tuple(keys))
            for module, name, keys in shapes
        ]
        self._ways: dict[str, Callable[[Sequence[Any]], Any]] = {
            "object": self._object,
            "map": self._map,
            "dict": self._dict,
            "slice": lambda rest: slice(*map(self.read, rest)),
            "type": lambda rest: _class(*rest),
            "enum": lambda rest: _class(rest[0], rest[1], holds=True)[rest[2]],
            **{kind: functools.partial(self._nested, made) for kind, made in _MADE.items()},
            **{kind: functools.partial(_leaf, kind) for kind in _LEAVES},
        }
        for written in values:
            made.append(self.read(written))  # noqa: PERF401  (it may refer to those before it)

    def read(self, written: Any) -> Any:
        """The thing."""
        if type(written) is not list:
            return written
        kind = written[0]
        if type(kind) is int:
            return self._tables[written[1]][kind]
        return self._ways[kind](written[1:])

    def _nested(self, made: Any, rest: Sequence[Any]) -> Any:
        return made([each if type(each) is not list else self.read(each) for each in rest])

    def _object(self, rest: Sequence[Any]) -> Any:
        kind, names = self._shapes[rest[0]]
        read = dict(zip(names, map(self.read, rest[1:]), strict=True))
        if issubclass(kind, Source):
            return kind(**read)
        made = object.__new__(kind)
        for key, value in read.items():
            object.__setattr__(made, key, value)
        return made

    def _map(self, rest: Sequence[Any]) -> Any:
        kind, names = self._shapes[rest[0]]
        return kind(zip(names, map(self.read, rest[1:]), strict=True))

    def _dict(self, rest: Sequence[Any]) -> Any:
        return _DICTIONARIES.get(rest[0], dict)((self.read(key), self.read(value)) for key, value in rest[1:])


_DICTIONARIES: dict[str, Any] = {
    "OrderedDict": collections.OrderedDict,
    "defaultdict": functools.partial(collections.defaultdict, list),
}
_LEAVES = ("float", "complex", "device", "operator", "torch", "module")


def _leaf(kind: str, rest: Sequence[Any]) -> Any:
    (value,) = rest
    if kind in ("float", "complex"):
        return {"float": float, "complex": complex}[kind](value)
    if kind == "device":
        return torch.device(value)
    if kind == "operator":
        return operator.getitem if value == "getitem" else _operator(value)
    found = getattr(torch, value) if kind == "torch" else None
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        return found
    if kind == "module" and value in sys.modules:
        return _source.GlobalSource(ALIAS + value)
    raise Unreadable(f"it has a {kind} that is not there: {value}")


def _class(module: str, name: str, holds: bool = False) -> Any:
    """A class that is there: one that `holds` metadata, or one that may be mentioned."""
    found: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
    metadata = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    if module in _HOLDERS and metadata:
        return found
    if not holds and (found in pytree.SUPPORTED_NODES or (module.startswith("torch") and isinstance(found, type))):
        return found
    if not holds and isinstance(found, type) and module == "builtins":
        return found
    raise Unreadable(f"it names {module}.{name}")


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise Unreadable(f"{name} is no operator")
    return found
