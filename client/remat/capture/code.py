"""What code objects say: a digest of what they do, and what they name."""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

WORD = re.compile(r"[A-Za-z_]\w*\Z")


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


def iterated(code: types.CodeType) -> Iterable[frozenset[Any]]:
    """Sets among the constants of code that does more than ask whether something is in them."""
    for one, after in itertools.pairwise(dis.get_instructions(code)):
        if isinstance(one.argval, frozenset) and after.opname != "CONTAINS_OP":
            yield one.argval


_OF_NO_ORDER = frozenset({"issuperset", "issubset", "isdisjoint", "__contains__", "__len__"})
"""What a set answers whatever the order of its elements."""


def without_order(codes: Iterable[types.CodeType], name: str) -> bool:
    """Whether code that reads a set by this name asks only what is in it, so that its order says nothing."""
    read = False
    for code in codes:
        for one, after in itertools.pairwise(dis.get_instructions(code)):
            if one.argval != name or one.opname == "LOAD_CONST":
                continue
            asked = after.opname in ("LOAD_METHOD", "LOAD_ATTR") and after.argval in _OF_NO_ORDER
            if not one.opname.startswith("LOAD_") or not (asked or after.opname == "CONTAINS_OP"):
                return False
            read = True
    return read


def globals_of(codes: Iterable[types.CodeType]) -> Iterable[str]:
    """The globals that code reads, builtins among them."""
    for code in codes:
        for said in dis.get_instructions(code):
            if said.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield said.argval


def names_variables(code: types.CodeType) -> bool:
    """Whether code that names `environ` does so only to look up a variable that it spells out.

    Dynamo puts no guard on a variable that is not there, so nothing else tells which ones were asked for.
    """
    said = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for at, one in enumerate(said):
        if one.argval != "environ" or not one.opname.startswith("LOAD_"):
            continue
        after, before = said[at + 1 : at + 5], said[max(0, at - 2) : at]
        kinds = [i.opname for i in after]
        if after[0].argval == "get" and kinds[1] == "LOAD_CONST":
            fine = kinds[2] == "CALL" or kinds[2:] == ["LOAD_CONST", "CALL"]
        elif kinds[0] == "CONTAINS_OP":
            fine = (
                before[0].opname == "LOAD_CONST" if one.opname != "LOAD_GLOBAL" else before[-1].opname == "LOAD_CONST"
            )
        else:
            fine = kinds[:2] == ["LOAD_CONST", "BINARY_SUBSCR"]
        if not fine:
            return False
    return True


def codes_in(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def names_of(code: types.CodeType) -> Iterable[str]:
    """What a code object may name: attributes, globals, and strings that could be names of either."""
    yield from code.co_names
    for constant in code.co_consts:
        for word in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(word, str) and WORD.match(word):
                yield word


def imported(codes: Iterable[types.CodeType], package: str) -> Iterable[types.ModuleType]:
    """The modules that statements in functions import, where they are there already."""
    above = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)] if package else []
    for code in codes:
        for said in dis.get_instructions(code):
            if said.opname == "IMPORT_NAME":
                for name in (said.argval, *(f"{parent}.{said.argval}".rstrip(".") for parent in above)):
                    if name in sys.modules:
                        yield sys.modules[name]
