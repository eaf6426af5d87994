"""Metadata of torch as JSON and back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.source as _source
from torch import fx
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from .memory import storage_key

__all__ = ["ALIAS", "PLAIN", "Node", "Reader", "Unreadable", "Writer"]

PLAIN = (bool, int, str, type(None))

_HOLDERS = frozenset(
    {"torch._dynamo.source", "torch._guards", "torch.utils._pytree"}
    | {f"torch._functorch._aot_autograd.{name}" for name in ("runtime_wrappers", "descriptors", "schemas")}
    | {"torch._functorch._aot_autograd.subclass_utils"}
)
"""The modules whose data classes a capture may have."""


class Unreadable(Exception):
    """A capture that cannot be written, or bytes that are none; the message says why."""


class Node:
    """A node of the graph, in the arguments of another."""

    def __init__(self, index: int) -> None:
        self.index = index


ALIAS = "__remat_module_"
"""Before the name of a module, where guards find it among the globals of the code that is called."""


class Writer:
    """Things as JSON: tensors in a table, nodes, operators and classes by name, objects of metadata once each."""

    def __init__(self, nodes: Mapping[fx.Node, int], aliases: Mapping[str, str]) -> None:
        self._nodes, self._aliases = nodes, aliases
        self._storages: dict[int, int] = {}
        self._number: dict[int, int] = {}
        self._alive: list[Any] = []
        self.storages: list[Any] = []
        self.tensors: list[Any] = []
        self.objects: list[Any] = []

    def write(self, thing: Any) -> Any:
        """A thing as JSON.

        Raises:
            Unreadable: it has no such form.
        """
        kind = type(thing)
        if kind in PLAIN:
            return thing
        if kind in _NESTED:
            return [_NESTED[kind], *map(self.write, thing)]
        if isinstance(thing, (dict, collections.OrderedDict)):
            return ["dict", kind.__name__, *([self.write(k), self.write(v)] for k, v in thing.items())]
        if kind in (float, complex):
            return [kind.__name__, repr(thing)]
        if kind is slice:
            return ["slice", *map(self.write, (thing.start, thing.stop, thing.step))]
        if isinstance(thing, fx.Node):
            return ["node", self._nodes[thing]]
        if isinstance(thing, FakeTensor):
            return ["tensor", self._tensor(thing)]
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
        if type(thing) is _source.GlobalSource and thing.global_name in self._aliases:
            return ["module", self._aliases[thing.global_name]]
        if dataclasses.is_dataclass(thing):
            return ["object", self._object(thing)]
        raise Unreadable(f"it has a {kind.__module__}.{kind.__qualname__}")

    def _object(self, thing: Any) -> int:
        if id(thing) not in self._number:
            self._alive.append(thing)
            fields = dataclasses.fields(thing)
            own = {f.name: getattr(thing, f.name) for f in fields if hasattr(thing, f.name)}
            if isinstance(thing, Source):  # which keeps its names, too, and they are of this process
                own = {f.name: own[f.name] for f in fields if f.init}
            else:
                own |= getattr(thing, "__dict__", {})
            written = [type(thing).__module__, type(thing).__name__, {k: self.write(v) for k, v in own.items()}]
            self._number[id(thing)] = len(self.objects)  # after those that it holds
            self.objects.append(written)
        return self._number[id(thing)]

    def _tensor(self, tensor: FakeTensor) -> int:
        if id(tensor) not in self._number:
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.constant is not None:
                raise Unreadable("it has a tensor of another kind")
            key = storage_key(tensor)
            if key not in self._storages:
                self._storages[key] = len(self.storages)
                self.storages.append((tensor.untyped_storage().nbytes(), str(tensor.device)))
            place = (self._storages[key], tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            self._number[id(tensor)] = len(self.tensors)
            self.tensors.append((*place, str(tensor.dtype).removeprefix("torch."), tensor.requires_grad))
            self._alive.append(tensor)
        return self._number[id(tensor)]


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
    """What `Writer` has written: it makes containers and objects that hold metadata, and calls nothing else."""

    def __init__(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]) -> None:
        self._tensors, self._objects = tensors, list[Any]()
        for module, name, own in objects:
            kind = _class(module, name, holds=True)
            read = {key: self.read(value) for key, value in own.items()}
            made = kind(**read) if issubclass(kind, Source) else object.__new__(kind)
            for key, value in () if issubclass(kind, Source) else read.items():
                object.__setattr__(made, key, value)
            self._objects.append(made)

    def read(self, written: Any) -> Any:
        """The thing."""
        if not isinstance(written, list):
            return written
        kind, *rest = written
        if kind in _MADE:
            return _MADE[kind](map(self.read, rest))
        if kind == "dict":
            made: Any = collections.OrderedDict() if rest[0] == "OrderedDict" else {}
            made.update((self.read(key), self.read(value)) for key, value in rest[1:])
            return collections.defaultdict(list, made) if rest[0] == "defaultdict" else made
        if kind == "slice":
            return slice(*map(self.read, rest))
        if kind == "type":
            return _class(*rest)
        if kind == "enum":
            return _class(rest[0], rest[1], holds=True)[rest[2]]
        return self._leaf(kind, rest[0])

    def _leaf(self, kind: str, value: Any) -> Any:
        if kind in ("float", "complex"):
            return {"float": float, "complex": complex}[kind](value)
        if kind == "node":
            return Node(value)
        if kind == "tensor":
            return self._tensors[value]
        if kind == "object":
            return self._objects[value]
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
