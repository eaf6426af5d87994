"""What Python shows of what objects hold."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict
from typing import Any

import torch

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)

_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code makes (Py_TPFLAGS_HEAPTYPE), and of some that C code does."""

_SHOWN = frozenset({object, dict, list, tuple, set, frozenset, str, int, float, bytes, OrderedDict, defaultdict})
"""Classes of C all of whose instances' state is seen: attributes, slots, items, values."""


class NotKept(Exception):
    """A capture that cannot be kept; the message says why."""


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = [n for n in ((slots,) if isinstance(slots, str) else slots) if n not in ("__dict__", "__weakref__")]
    own = f"_{kind.__name__.lstrip('_')}"
    return tuple(own + n if n.startswith("__") and not n.endswith("__") else n for n in names)


def order_of(thing: Any) -> tuple[str, str, str]:
    """An order for the elements of a set that is the same in each process."""
    if type(thing) in ATOMS or (isinstance(thing, tuple) and all(type(each) in ATOMS for each in thing)):
        return type(thing).__name__, repr(thing), ""
    if isinstance(thing, (type, types.FunctionType)):
        return "", thing.__module__, thing.__qualname__
    if isinstance(thing, enum.Enum):
        return "enum", type(thing).__qualname__, thing.name
    raise NotKept(f"a set holds a {type(thing).__name__}, which has no order")


def shows_all(kind: type) -> bool:
    """Whether all that an object of a class holds is in its attributes, its slots, its items or its value."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE) in _SHOWN
