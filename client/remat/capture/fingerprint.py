"""What a capture depends on, as a digest: the code that was traced, and the data that this code can name.

A capture that another process has kept is used again only where nothing that tracing read is different. The digest
covers more than tracing read. From the call it goes to all attributes of all modules, to functions, classes and
objects. A function whose code was traced leads on: to what it has in closures and defaults, to its globals, and to the
members of classes, Python modules and objects whose names occur in its code, as an attribute or as a string. Any other
function counts by its code alone, by which one that somebody puts in a place of a traced one is seen.

Code is compared by its bytecode, constants and names; where it stands does not matter. Tensors are compared by metadata
and by which of them share memory; their values are not read. What the digest does not cover is found when a capture is
to be kept: tracing says which code it has run (`Walk.codes`) and what it has read (`Walk.covers`).
"""

from __future__ import annotations

import abc
import builtins
import contextvars
import enum
import functools
import hashlib
import logging
import os
import re
import sys
import types
import typing
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _compat
from .._compat.module_state import GLOBAL_HOOKS, HANDLED
from .code import WORD, code_digest, codes_in, globals_of, imported, iterated, names_of
from .objects import ATOMS, NotKept, content_of, order_of, shows_all, slots_of

_UNSEEN = frozenset({"__module__", "__dict__", "__weakref__", "__qualname__"})
"""Members of classes that are seen otherwise."""

_OF_THIS_PROCESS = frozenset({"id", "hash"})
"""Functions of Python whose results are those of one process, and which Dynamo runs when it traces."""

_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(list[int]))
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, type(functools.lru_cache(len)))


class Walk:
    """What a call can reach, in an order that is the same in each process.

    Args:
        roots: the call: what is called, with what.
        traced: digests of the code objects that lead on.

    Attributes:
        codes: digests of the code objects of those functions that were reached and lead on, with the code in them.

    Raises:
        NotKept: something is reached that tells no two processes apart from others.
    """

    def __init__(self, roots: Iterable[Any], traced: Collection[str]) -> None:
        self.codes: set[str] = set()
        self._traced = traced
        self._digest = hashlib.sha256()
        self._number: dict[int, int] = {}
        self._alive: list[Any] = []
        """All that has a number: its identity must not become another object's."""
        self._members: set[tuple[int, str]] = set()
        """Of what is covered by name: whose, by identity, and which."""
        self._named_only: set[int] = set()
        """What is covered by name, by identity."""
        self._names: set[str] = {"forward", *GLOBAL_HOOKS}
        self._pending: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        """By their names, members that no code has named yet."""
        self._storages: dict[int, int] = {}
        self._handled: set[int] = set()
        """The dictionaries of hooks, by identity."""
        self._handles: dict[int, int] = {}
        """The numbers of handles, in the order in which they are met."""
        self._queue: deque[Any] = deque()
        self._sets: dict[int, str] = {}
        """The order of the elements of each set that was reached, by identity."""
        self._opaque: set[int] = set()
        """What holds something that Python does not show, by identity."""
        self._say("roots", *map(self._ref, (*roots, nn.modules.module)))
        while self._queue:
            self._visit(self._queue.popleft())

    def digest(self) -> str:
        """What calls have in common that are captured alike."""
        return self._digest.hexdigest()

    def reached(self, thing: Any) -> bool:
        """Whether an object was reached, and what it holds was seen."""
        return id(thing) in self._number and id(thing) not in self._opaque

    def order(self, number: int) -> str | None:
        """The order of the elements of a set, which the digest leaves out: it may differ from process to process.

        Args:
            number: of the set, as `number` gives it, in the walk of an equal digest.
        """
        return self._sets.get(id(self._alive[number])) if number < len(self._alive) else None

    def number(self, thing: Any) -> int | None:
        """The number of a set of several elements that was reached."""
        return self._number.get(id(thing)) if id(thing) in self._sets else None

    def covers(self, owner: Any, name: str) -> bool:
        """Whether a member of an object that was reached is covered: its own, or that of a class of its."""
        if isinstance(owner, types.ModuleType):  # its members are the globals of its functions
            return bool({(id(owner), name), (id(vars(owner)), name)} & self._members)
        if id(owner) not in self._named_only:
            return True
        holders = (owner, *type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ()))
        return any((id(holder), name) in self._members for holder in holders)

    def _say(self, *said: Any) -> None:
        self._digest.update(repr(said).encode("utf-8", "surrogatepass"))

    def _ref(self, thing: Any) -> str:
        """A thing in the words of another: itself where it is small, else its number."""
        kind = type(thing)
        if kind in ATOMS:
            return f"{kind.__name__} {thing!r}"
        number = self._number.get(id(thing))
        if number is None:
            number = self._number[id(thing)] = len(self._alive)
            self._alive.append(thing)
            self._queue.append(thing)
        return f"#{number}"

    def _visit(self, thing: Any) -> None:
        exactly = self._EXACTLY.get(type(thing))
        if exactly is not None:
            exactly(self, thing)
            return
        for kinds, visit in self._VISITS:
            if isinstance(thing, kinds):
                visit(self, thing)
                return
        self._instance(thing)

    def _offer(self, owner: Any, name: str, value: Any) -> None:
        """A member that is covered once code names it."""
        self._named_only.add(id(owner))
        self._once_named(owner, name, value)

    def _own(self, thing: Any) -> None:
        """The attributes of a thing that has more to it, and which ones there are.

        Dynamo puts no guard on an attribute that is not there, and its name may be put together.
        """
        self._say("attributes", sorted(map(str, getattr(thing, "__dict__", ()))))
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            self._once_named(thing, name, value)

    def _once_named(self, owner: Any, name: str, value: Any) -> None:
        if name in self._names:
            self._members.add((id(owner), name))
            self._say("member", self._number[id(owner)], name, self._ref(value))
        else:
            self._pending[name].append((owner, value))

    def _name(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._names:
                self._names.add(name)
                for owner, value in self._pending.pop(name, ()):
                    self._once_named(owner, name, value)

    # code

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if function.__dict__.get("_dynamo_marked_constant"):
            raise NotKept(f"{function.__qualname__} is called when a step is traced, and its code is not")
        self._say("function", code_digest(code), function.__module__, function.__qualname__, function.__name__)
        self._own(function)
        for name in ("__doc__", "__annotations__", "__defaults__", "__kwdefaults__", "__closure__"):
            self._once_named(function, name, getattr(function, name))
        if code_digest(code) not in self._traced:
            wrapped = function.__dict__.get("__wrapped__")
            if wrapped is not None:
                self._say("around", self._ref(wrapped))
            return
        parts = list(codes_in(code))
        self.codes.update(map(code_digest, parts))
        self._say("iterated", [repr(found) for part in parts for found in iterated(part)])
        cells = [content_of(cell) for cell in function.__closure__ or ()]
        named = tuple((function.__kwdefaults__ or {}).items())
        self._say("with", *map(self._ref, (function.__defaults__, named, dict(function.__dict__), *cells)))
        names = dict.fromkeys(name for part in parts for name in names_of(part))
        self._name(names)
        scope, plain = function.__globals__, vars(builtins)
        self._named_only.add(id(scope))
        root = str(function.__module__).partition(".")[0]
        own = root != "torch" and root not in sys.stdlib_module_names  # which use them to find the same object again
        if own and _OF_THIS_PROCESS.difference(scope) & set(globals_of(parts)):
            raise NotKept(f"{function.__qualname__} asks for an identity or a hash, which is this process's")
        for name in names:
            if name in scope or name in plain:
                self._members.add((id(scope), name))
                self._say("global", name, self._ref(scope[name] if name in scope else plain[name]))
        for module in imported(parts, str(scope.get("__package__") or "")):
            self._say("import", self._ref(module))

    def _class(self, kind: type) -> None:
        self._say(
            "class", kind.__module__, kind.__qualname__, kind.__name__, *map(self._ref, (type(kind), *kind.__bases__))
        )
        self._say("members", sorted(vars(kind).keys() - {"__slotnames__"}))  # which copying leaves there
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType):
                self._name([name])
            if name not in _UNSEEN:
                self._offer(kind, name, value)
        if isinstance(kind, abc.ABCMeta):
            self._say("registered", sorted(f"{k.__module__}.{k.__name__}" for k in _compat.registered_with(kind)))

    def _module(self, module: types.ModuleType) -> None:
        self._say("module", module.__name__)
        if module is nn.modules.module:
            self._handled.update(id(value) for name, value in vars(module).items() if name in HANDLED)
        for name, value in list(vars(module).items()):
            if value is not sys.modules:
                self._offer(module, name, value)

    def _bound(self, method: types.MethodType) -> None:
        self._say("method", self._ref(method.__func__), self._ref(method.__self__))

    def _builtin(self, function: Any) -> None:
        of = getattr(function, "__self__", None)
        own = () if isinstance(of, (types.NoneType, types.ModuleType)) else (self._ref(of),)
        self._say("builtin", getattr(function, "__module__", ""), function.__qualname__, *own)

    def _partial(self, made: Any) -> None:
        self._say("partial", *map(self._ref, (made.func, made.args, made.keywords)))
        self._own(made)

    def _wrapper(self, made: Any) -> None:
        inner = [getattr(made, name, None) for name in ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")]
        self._say(type(made).__name__, *map(self._ref, inner))
        self._own(made)

    # data

    def _list(self, thing: Any) -> None:
        self._say(type(thing).__name__, *map(self._ref, thing))

    def _dict(self, thing: Any) -> None:
        if id(thing) in self._handled:
            thing = {self._handles.setdefault(key, len(self._handles)): value for key, value in thing.items()}
        self._say(type(thing).__name__, *(self._ref(each) for pair in thing.items() for each in pair))
        self._own(thing)

    def _namespace(self, thing: types.SimpleNamespace) -> None:
        self._say("namespace", self._ref(vars(thing)))

    def _set(self, thing: Any) -> None:
        if len(thing) > 1:
            self._sets[id(thing)] = repr([*map(order_of, thing)])
        self._say(type(thing).__name__, *map(self._ref, sorted(thing, key=order_of)))

    def _torch_module(self, module: nn.Module) -> None:
        self._say("instance", self._ref(type(module)))
        self._handled.update(id(value) for name, value in vars(module).items() if name in HANDLED)
        self._dict(vars(module))
        self._slotted(module)

    def _handle(self, handle: RemovableHandle) -> None:
        self._say("handle", self._handles.setdefault(handle.id, len(self._handles)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, _compat.FakeTensor):
            raise NotKept(f"a tensor is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise NotKept(f"a tensor is {tensor.layout}")
        self._ref(type(tensor))
        storage = self._storages.setdefault(_compat.storage_key(tensor), len(self._storages))
        like = (type(tensor).__name__, isinstance(tensor, nn.Parameter), tuple(tensor.shape), tensor.stride())
        place = (str(tensor.dtype), str(tensor.device), storage, tensor.storage_offset())
        flags = (tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
        self._say("tensor", like, place, tensor.untyped_storage().nbytes(), flags, _compat.has_tensor_hooks(tensor))
        own = {} if isinstance(tensor, _compat.FakeTensor) else dict(vars(tensor))
        if own.get("_dynamo_static_input_type") == "unguarded":
            del own["_dynamo_static_input_type"]  # by Dynamo itself, when it first met the parameter
        if own:
            self._dict(own)

    def _instance(self, thing: Any) -> None:
        """An object of a class of its own: its attributes and items by name, all else that it contains."""
        kind = type(thing)
        self._say("instance", self._ref(kind))
        held = getattr(thing, "__dict__", None)
        self._named_only.add(id(thing))
        self._say("attributes", sorted(map(str, held)) if isinstance(held, dict) else ())
        for name, value in list(held.items()) if isinstance(held, dict) else ():
            self._offer(thing, name, value)
        self._slotted(thing)
        if isinstance(thing, dict):
            self._say("keys", *map(self._ref, dict.keys(thing)))
            for key, value in list(dict.items(thing)):
                if isinstance(key, str) and WORD.match(key):
                    self._offer(thing, key, value)
                else:
                    self._say("item", self._ref(key), self._ref(value))
        elif isinstance(thing, (list, tuple)):
            plain_kind: Any = list if isinstance(thing, list) else tuple
            self._say("items", *map(self._ref, plain_kind.__iter__(thing)))
        elif isinstance(thing, (set, frozenset)):
            self._set(thing)
        for plain in (str, int, float, bytes):
            if isinstance(thing, plain):
                self._say("value", plain.__repr__(thing))
        if not shows_all(kind):
            self._opaque.add(id(thing))

    def _slotted(self, thing: Any) -> None:
        for name in (name for base in type(thing).__mro__ for name in slots_of(base)):
            if hasattr(thing, name):
                self._once_named(thing, name, getattr(thing, name))

    def _environment(self, thing: Any) -> None:
        """The variables by name: in two processes of a job others may differ."""
        self._say("environment", self._ref(type(thing)))
        variables = _compat.variables_of(thing)
        if id(variables) not in self._number:
            self._ref(variables)
            self._queue.pop()  # what was appended just now: its variables are members
        for name, value in vars(thing).items():
            if value is not variables:
                self._say("attribute", name, self._ref(value))
        for key, value in list(variables.items()):
            self._offer(variables, os.fsdecode(key), value)

    def _enum(self, member: enum.Enum) -> None:
        self._say("enum", self._ref(type(member)), member.name, self._ref(member.value))
        self._dict({name: value for name, value in vars(member).items() if name != "__objclass__"})

    def _by_words(self, thing: Any) -> None:
        self._say(type(thing).__name__, str(thing))

    def _by_name(self, thing: Any) -> None:
        self._say(type(thing).__name__, thing.__name__)

    def _weak(self, thing: Any) -> None:
        self._say("weak", self._ref(thing()))

    def _variable(self, thing: contextvars.ContextVar[Any]) -> None:
        self._say("variable", thing.name, self._ref(thing.get(None)))

    def _logger(self, thing: Any) -> None:
        self._say("logger", thing.name, thing.level, thing.disabled)
        self._own(thing)

    def _pattern(self, thing: re.Pattern[Any]) -> None:
        self._say("pattern", thing.pattern, thing.flags)

    _VISITS: ClassVar[tuple[tuple[Any, Callable[[Walk, Any], None]], ...]] = (
        (types.FunctionType, _function),
        (nn.Module, _torch_module),
        (RemovableHandle, _handle),
        (torch.Tensor, _tensor),
        (_TYPING, _by_words),
        (type, _class),
        (types.ModuleType, _module),
        (enum.Enum, _enum),
        (type(os.environ), _environment),
        (types.MethodType, _bound),
        ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
        (functools.partial, _partial),
        (_WRAPPERS, _wrapper),
        (_DESCRIPTORS, _by_name),
        (weakref.ref, _weak),
        (contextvars.ContextVar, _variable),
        (logging.Logger, _logger),
        (re.Pattern, _pattern),
        (_compat.OpOverload, _by_words),
    )
    _EXACTLY: ClassVar[dict[type, Callable[[Walk, Any], None]]] = {
        **dict.fromkeys((list, tuple, deque), _list),
        **dict.fromkeys((dict, OrderedDict, defaultdict, Counter, types.MappingProxyType), _dict),
        **dict.fromkeys((set, frozenset), _set),
        types.SimpleNamespace: _namespace,
    }
