"""A problem: what is to be planned, and the bytes that its peak must not exceed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .errors import InvalidData
from .graph import Graph
from .plan import plain_plan
from .read import integer, members, parse
from .replay import replay

_READERS: dict[str, Callable[[object], Graph]] = {"graph": Graph.from_json}


@dataclass(frozen=True)
class Problem:
    """A graph and a budget in bytes, fixed bytes included in the budget.

    Raises:
        InvalidData: the budget is not an integer from 0 to 2^53.
    """

    graph: Graph
    budget_bytes: int

    def __post_init__(self) -> None:
        integer(self.budget_bytes, "budget_bytes", "/budget_bytes")

    def to_json(self) -> dict[str, Any]:
        """The `problem` member of a request; names stay at home."""
        return {"graph": self.graph.to_json(), "budget_bytes": self.budget_bytes}

    @classmethod
    def from_json(cls, data: object) -> Problem:
        """Read the `problem` member of a request, or its text.

        Raises:
            InvalidData: malformed in any way; the pointer leads to the place.
        """
        if isinstance(data, (str, bytes)):
            data = parse(data)
        found = members(data, "problem", required=("graph", "budget_bytes"))
        try:
            graph = _READERS["graph"](found["graph"])
        except InvalidData as error:
            raise error.under("/graph") from None
        return cls(graph, integer(found["budget_bytes"], "budget_bytes", "/budget_bytes"))


def plain_peak(graph: Graph) -> int:
    """The peak of the plain plan in bytes, fixed bytes included."""
    return max(moment.peak_bytes for moment in replay(graph, plain_plan(graph)))


def budget_at(graph: Graph, fraction: float | Fraction) -> int:
    """The budget at a fraction of the plain activation peak: fixed + f · (plain peak − fixed), rounded down."""
    if not 0 <= fraction <= 1e6:
        raise InvalidData(f"a budget fraction must be between 0 and 1 (or above, for slack), not {fraction}")
    return graph.fixed_bytes + int(Fraction(fraction) * (plain_peak(graph) - graph.fixed_bytes))
