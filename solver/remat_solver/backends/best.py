"""What a run has streamed so far, and the outcome that follows from it."""

from __future__ import annotations

from ..program import INFINITY, Floats, Program
from .outcome import Improvement, Outcome, Tree, cutting, failed
from .wire import Message

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

    def news(self, message: Message, seconds: float) -> Improvement:
        return Improvement(self.x if "x" in message.arrays else None, self.objective, self.bound, seconds)

    def outcome(self, message: Message, seconds: float, why: str) -> Outcome:
        self.take(message)
        said = message.members.get("message", "") or why
        if message.kind == "failed":
            return self.stopped(seconds, said) if self.x is not None else failed(said, seconds)
        status = message.members["status"]
        if status == "infeasible":
            return Outcome("infeasible", None, INFINITY, INFINITY, seconds, message=said)
        if status in ("feasible", "nothing_found"):
            return self.stopped(seconds, said)
        return Outcome(
            status,
            self.x,
            self.objective,
            self.bound,
            seconds,
            message.arrays.get("row_dual"),
            said,
            _tree_of(message),
        )

    def stopped(self, seconds: float, why: str) -> Outcome:
        status = "nothing_found" if self.x is None else "feasible"
        return Outcome(status, self.x, self.objective, self.bound, seconds, message=why)  # type: ignore[arg-type]


def _tree_of(message: Message) -> Tree | None:
    if "leaf_start" not in message.arrays:
        return None
    cuts = tuple(cutting(data) for data in message.members["cuts"])
    return Tree(**{name: message.arrays.get(name) for name in Tree._fields if name != "cuts"}, cuts=cuts)  # type: ignore[arg-type]
