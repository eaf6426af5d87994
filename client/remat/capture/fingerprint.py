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

import builtins
import contextvars
import dis
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

from .. import _compat
from .._compat.module_state import GLOBAL_HOOKS

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_UNSEEN = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"})
"""Members of classes that say nothing of what a call does, or are seen otherwise."""

_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(list[int]))
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, type(functools.lru_cache(len)))
_WORD = re.compile(r"[A-Za-z_]\w*\Z")


class NotKept(Exception):
    """A capture that cannot be kept; the message says why."""


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
        self._queue: deque[Any] = deque()
        self._say("roots", *map(self._ref, (*roots, nn.modules.module)))
        while self._queue:
            self._visit(self._queue.popleft())

    def digest(self) -> str:
        """What calls have in common that are captured alike."""
        return self._digest.hexdigest()

    def reached(self, thing: Any) -> bool:
        """Whether an object was reached."""
        return id(thing) in self._number

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
                    self._offer(owner, name, value)

    # code

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if function.__dict__.get("_dynamo_marked_constant"):
            raise NotKept(f"{function.__qualname__} is called when a step is traced, and its code is not")
        self._say("function", code_digest(code), function.__module__, function.__qualname__)
        if code_digest(code) not in self._traced:
            wrapped = function.__dict__.get("__wrapped__")
            if wrapped is not None:
                self._say("around", self._ref(wrapped))
            return
        parts = list(_codes_in(code))
        self.codes.update(map(code_digest, parts))
        cells = [_content(cell) for cell in function.__closure__ or ()]
        named = tuple((function.__kwdefaults__ or {}).items())
        self._say("with", *map(self._ref, (function.__defaults__, named, dict(function.__dict__), *cells)))
        names = dict.fromkeys(name for part in parts for name in _names_of(part))
        self._name(names)
        scope, plain = function.__globals__, vars(builtins)
        self._named_only.add(id(scope))
        for name in names:
            if name in scope or name in plain:
                self._members.add((id(scope), name))
                self._say("global", name, self._ref(scope[name] if name in scope else plain[name]))
        for module in _imported(parts, str(scope.get("__package__") or "")):
            self._say("import", self._ref(module))

    def _class(self, kind: type) -> None:
        self._say("class", kind.__module__, kind.__qualname__, *map(self._ref, (type(kind), *kind.__bases__)))
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType):
                self._name([name])
            if name not in _UNSEEN:
                self._offer(kind, name, value)

    def _module(self, module: types.ModuleType) -> None:
        self._say("module", module.__name__)
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

    def _wrapper(self, made: Any) -> None:
        inner = [getattr(made, name, None) for name in ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")]
        self._say(type(made).__name__, *map(self._ref, inner))

    # data

    def _list(self, thing: Any) -> None:
        self._say(type(thing).__name__, *map(self._ref, thing))

    def _dict(self, thing: Any) -> None:
        self._say(type(thing).__name__, *(self._ref(each) for pair in thing.items() for each in pair))

    def _set(self, thing: Any) -> None:
        self._say(type(thing).__name__, *map(self._ref, sorted(thing, key=_order)))

    def _torch_module(self, module: nn.Module) -> None:
        self._say("instance", self._ref(type(module)))
        self._dict(vars(module))

    def _tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, _compat.FakeTensor):
            raise NotKept(f"a tensor is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise NotKept(f"a tensor is {tensor.layout}")
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
        for name, value in list(held.items()) if isinstance(held, dict) else ():
            self._offer(thing, name, value)
        for name in (name for base in kind.__mro__ for name in _slots(base)):
            if hasattr(thing, name):
                self._offer(thing, name, getattr(thing, name))
        if isinstance(thing, dict):
            self._say("keys", *map(self._ref, dict.keys(thing)))
            for key, value in list(dict.items(thing)):
                if isinstance(key, str) and _WORD.match(key):
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

    _VISITS: ClassVar[tuple[tuple[Any, Callable[[Walk, Any], None]], ...]] = (
        (types.FunctionType, _function),
        (nn.Module, _torch_module),
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
        ((re.Pattern, _compat.OpOverload), _by_words),
    )
    _EXACTLY: ClassVar[dict[type, Callable[[Walk, Any], None]]] = {
        **dict.fromkeys((list, tuple, deque), _list),
        **dict.fromkeys((dict, OrderedDict, defaultdict, Counter, types.MappingProxyType), _dict),
        **dict.fromkeys((set, frozenset), _set),
    }


@functools.lru_cache(maxsize=1 << 16)
def code_digest(code: types.CodeType) -> str:
    """What a code object does, as a digest: not where it stands."""
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = tuple(map(_constant, code.co_consts))
    said = (code.co_code, getattr(code, "co_exceptiontable", b""), shape, names, constants)
    return hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else (type(value).__name__, repr(value))


def _codes_in(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_of(code: types.CodeType) -> Iterable[str]:
    """What a code object may name: attributes, globals, and strings that could be names of either."""
    yield from code.co_names
    for constant in code.co_consts:
        for word in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(word, str) and _WORD.match(word):
                yield word


def _imported(codes: Iterable[types.CodeType], package: str) -> Iterable[types.ModuleType]:
    """The modules that statements in functions import, where they are there already."""
    above = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)] if package else []
    for code in codes:
        for said in dis.get_instructions(code):
            if said.opname == "IMPORT_NAME":
                for name in (said.argval, *(f"{parent}.{said.argval}".rstrip(".") for parent in above)):
                    if name in sys.modules:
                        yield sys.modules[name]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if n not in ("__dict__", "__weakref__"))


def _order(thing: Any) -> tuple[str, str, str]:
    """An order for the elements of a set that is the same in each process."""
    if type(thing) in ATOMS or (isinstance(thing, tuple) and all(type(each) in ATOMS for each in thing)):
        return type(thing).__name__, repr(thing), ""
    if isinstance(thing, (type, types.FunctionType)):
        return "", thing.__module__, thing.__qualname__
    if isinstance(thing, enum.Enum):
        return "enum", type(thing).__qualname__, thing.name
    raise NotKept(f"a set holds a {type(thing).__name__}, which has no order")
