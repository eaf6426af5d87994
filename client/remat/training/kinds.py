"""What was made for each kind of call, found again by what still holds of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TypeVar

from ..capture.guards import Call, Kind

T = TypeVar("T")


class Kinds(Mapping[Kind, T]):
    """A value for each kind of call, the one used last at the end; beyond `most` the one used least lately goes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Kind, T] = OrderedDict()
        self._alike: dict[tuple[object, ...], list[Kind]] = {}
        """By arguments, the kind used last at the front."""

    def find(self, call: Call) -> Kind | None:
        """The kind of a call, if it is known."""
        alike = self._alike.get(call.arguments, [])
        for position, kind in enumerate(alike):
            if kind.holds(call):
                if position:
                    alike.insert(0, alike.pop(position))
                if len(self._values) > 1:
                    self._values.move_to_end(kind)
                return kind
        return None

    def alike(self, call: Call) -> tuple[Kind, ...]:
        """The kinds of the same arguments but for numbers, the one used last first."""
        return tuple(self._alike.get(call.arguments, ()))

    def put(self, kind: Kind, value: T) -> T | None:
        """Add or replace a value; returns the one that is dropped for it."""
        if kind not in self._values:
            self._alike.setdefault(kind.arguments, []).insert(0, kind)
        self._values[kind] = value
        if len(self._values) <= self.most:
            return None
        oldest, dropped = self._values.popitem(last=False)
        self._alike[oldest.arguments].remove(oldest)
        if not self._alike[oldest.arguments]:
            del self._alike[oldest.arguments]
        return dropped

    def __getitem__(self, kind: Kind) -> T:
        return self._values[kind]

    def __iter__(self) -> Iterator[Kind]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)
