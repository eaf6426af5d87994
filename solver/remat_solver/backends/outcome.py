"""How an engine's run ended: a value, never an exception; and what it has streamed until then."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..program import INFINITY, Floats, Program
from .wire import Message

Ending: TypeAlias = Literal["optimal", "feasible", "infeasible", "nothing_found", "failed"]


class DerivedRow(NamedTuple):
    """A cutting plane that follows from earlier rows, which are read as A x ≤ b in whole numbers.

    Attributes:
        multipliers: earlier rows of the program and cuts, these after those, with whole multipliers, not 0.
        divisor, coarser, complemented: how their sum was rounded; `complemented` are columns.
        scale: what its whole coefficients were multiplied by in the linear programs.
    """

    multipliers: list[list[int]]
    divisor: int
    coarser: int
    complemented: list[int]
    scale: float


class CoverRow(NamedTuple):
    """A cutting plane Σ weight · column ≤ `most` over columns that are 0 or 1: greater weights exceed a row together.

    Attributes:
        row: the row of the program.
        weights: columns and their weights.
        scale: what the whole weights were multiplied by in the linear programs.
    """

    row: int
    weights: list[list[int]]
    most: int
    scale: float


Cutting: TypeAlias = DerivedRow | CoverRow


class Tree(NamedTuple):
    """A tree of linear programs in preorder: what branches, and the duals of its leaves in their order.

    Attributes:
        column: [nodes] the column that a node branches on, first to 0, then to 1; −1 for a leaf.
        leaf_start: [leaves + 1] where a leaf's rows begin. leaf_row, leaf_dual: rows and their duals.
        leaf_empty: [leaves] whether the duals are a ray that shows that there is no point.
        cuts: cutting planes; their rows come after those of the program.
        plain_row, plain_dual: rows and duals of the program without cuts, where the tree is one leaf without points.
        late: whether it was left as it is since the time was up.
    """

    column: NDArray[np.int64]
    leaf_start: NDArray[np.int64]
    leaf_row: NDArray[np.int64]
    leaf_dual: Floats
    leaf_empty: NDArray[np.bool_]
    cuts: tuple[Cutting, ...] = ()
    plain_row: NDArray[np.int64] | None = None
    plain_dual: Floats | None = None
    late: bool = False


class Outcome(NamedTuple):
    """What an engine found and proved.

    Attributes:
        status: "optimal" within the engine's tolerances; "feasible" when stopped with a solution, "nothing_found"
            without; "infeasible" proved; "failed" when the engine broke, for which `message` gives the reason.
        x: [columns] the best solution, within the engine's tolerances, or None.
        objective: of x under the program's own costs, +inf without one.
        bound: proved lower bound on the objective, within the engine's tolerances; −inf without one, +inf when
            infeasible.
        row_dual: [rows] of an LP solved to optimality, else None.
        message: one sentence for a person, where there is something to say.
        tree: of `Engine.tree`.
    """

    status: Ending
    x: Floats | None
    objective: float
    bound: float
    row_dual: Floats | None = None
    message: str = ""
    tree: Tree | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether the engine ended because there was no more memory for it."""
        return "memory" in self.message.lower() or "by signal 9" in self.message


_TOLERANCE = 1e-4
"""By how much, relatively, a bound may lie above the objective of a solution that is feasible within tolerances."""


class Best:
    """The best solution and bound that a run has streamed.

    A bound above the objective of a solution, by more than an engine's tolerances, is a bound of something else: no
    bound of that run is believed from then on.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._believed = True
        self.x: Floats | None = None
        self.objective = INFINITY
        self.bound = -INFINITY

    def take(self, message: Message) -> bool:
        better = False
        x = message.arrays.get("x")
        if x is not None:
            objective = self._program.objective(x)
            if objective < self.objective:
                self.x, self.objective, better = x, objective, True
        bound = message.members.get("bound")
        if bound is not None and bound > self.bound and self._believed:
            self.bound, better = bound, True
        if self.bound > self.objective + _TOLERANCE * (1.0 + abs(self.objective)) and self._believed:
            self.bound, self._believed = -INFINITY, False
        return better

    def outcome(self, message: Message, why: str) -> Outcome:
        self.take(message)
        said = message.members.get("message", "") or why
        if message.kind == "failed":
            return self.broken(said)
        status = message.members["status"]
        if status == "infeasible":
            return Outcome("infeasible", None, INFINITY, INFINITY, message=said)
        if status in ("feasible", "nothing_found"):
            return self.stopped(said)
        row_dual, tree = message.arrays.get("row_dual"), _tree_of(message)
        return Outcome(status, self.x, self.objective, self.bound, row_dual, said, tree)

    def stopped(self, why: str) -> Outcome:
        status = "nothing_found" if self.x is None else "feasible"
        return Outcome(status, self.x, self.objective, self.bound, message=why)  # type: ignore[arg-type]

    def broken(self, why: str) -> Outcome:
        return Outcome("failed", None, INFINITY, -INFINITY, message=why) if self.x is None else self.stopped(why)


def _tree_of(message: Message) -> Tree | None:
    if "leaf_start" not in message.arrays:
        return None
    made: dict[str, type[CoverRow | DerivedRow]] = {"cover": CoverRow, "round": DerivedRow}
    cuts = tuple(made[kind](*rest) for kind, *rest in message.members["cuts"])
    arrays = {name: message.arrays.get(name) for name in Tree._fields if name not in ("cuts", "late")}
    return Tree(**arrays, cuts=cuts, late=message.members["late"])  # type: ignore[arg-type]
