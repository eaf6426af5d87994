"""One budget for all that is outstanding: plans by what earlier calls hold, divided after a step that has been watched.

Where a step is one call of one graph, that has a plan of its own for the whole budget. Otherwise its calls run by the
plans that hold least, until a step has been watched in which nothing was compiled. What the allocator showed then at
each moment, less what the plans say, is the rest; the budget is divided over the moments, and the next step that begins
runs by that. It is watched as well: where something is new, or the budget did not hold, it is divided anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from remat_ir import Answer, Plan, Status, readable

from .. import _compat
from ..errors import BudgetTooSmall
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, bytes_of, device_budget, share_of
from ..planning.coordinator import Coordinator
from ..planning.division import Row, Stack, divide, least_bytes, peak_by
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..profiling.room import ATTEMPTS, Room
from .calls import Call
from .plans import PlannedSizes, Point, solved
from .watched import Watching

if TYPE_CHECKING:
    from .sized import Backend

log = logging.getLogger("remat")


@dataclass(frozen=True)
class Division:
    """What the calls of a step got of one budget; bytes are above the fixed ones.

    Attributes:
        calls: how many calls, told apart by what is outstanding below them, have a plan.
        overhead: of their plans over the plain ones, predicted.
        fixed_bytes: what is there throughout.
    """

    calls: int
    allowed_bytes: int
    predicted_bytes: int
    fixed_bytes: int
    overhead: float

    def __str__(self) -> str:
        return (
            f"{self.calls} calls within {readable(self.fixed_bytes + self.allowed_bytes)}: overhead "
            f"{100 * self.overhead:.1f} %, peak {readable(self.fixed_bytes + self.predicted_bytes)} predicted"
        )


class SharedBudget:
    """One budget, of one backend or of several, and which plan each of their calls takes.

    Attributes:
        backends: those whose calls share it, by what each of them compiles, which keeps them.
        shares: whether calls may share; otherwise each has the whole of it.
        improves: whether the planner is asked for better plans than the greedy ones.
        several: whether a step has several calls, or a graph that Dynamo has broken.
        division: what they got, once the budget has been divided.
        watching: the steps that are watched, and the calls.
    """

    def __init__(self, budget: Budget, planner: CoordinatedPlanner, asking: SolveOptions) -> None:
        self.budget, self._planner, self._asking = budget, planner, asking
        self.backends: WeakKeyDictionary[Any, Backend] = WeakKeyDictionary()
        self.watching = Watching(planner, isinstance(budget, int))
        self.calls = self.watching.calls
        self.shares = self.improves = True
        self.several = False
        self.division: Division | None = None
        self._table: dict[Stack, Point] = {}
        self._divided: tuple[Sequence[Row], int, int] = (), 0, 0
        self._curves: dict[str, list[Point]] = {}
        self._better: Future[list[tuple[str, Point]]] | None = None
        self._reserve: Room | None = None
        self._lowered: list[int] = []
        self._said = False
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBudget:
        """The same budget once more, undivided, for copies of the modules that share this one."""
        made = SharedBudget(self.budget, self._planner, self._asking)
        if self.several:
            made.share()
        return made

    def share(self) -> None:
        """From now on the budget is one of several calls, where they may share it."""
        if self.several:
            return
        if not self.shares:
            if not self._said:
                log.warning("a step has several graphs or calls: each of them is given the whole budget")
            self._said = True
            return
        log.info("a step has several graphs or calls: they share one budget, divided once a step has been watched")
        self.several = self.watching.wanted = True

    def chosen(self) -> list[tuple[PlannedSizes, Plan]]:
        """The graphs and plans of the division, each pair once."""
        of = self.watching.of
        found = {(of[stack].number, id(point)): (of[stack], point) for stack, point in self._table.items()}
        return [(planned, point.plan) for planned, point in found.values()]

    @property
    def _ranks(self) -> Coordinator:
        return self._planner.here().coordinator

    def begin(self) -> None:
        """A forward call; it begins a step if it is the first outside of a backward pass after one has run.

        Raises:
            BudgetTooSmall: no choice of plans fits what was watched.
        """
        if not self.calls.passed or _inside():
            return
        with self._lock:
            self.calls.passed = False
            if not self.several:
                return
            come = self._better is not None and self._better.done()
            most = self.watching.next_step(come, self._take_better, lambda: self._table)
            if most is not None:
                new = self.division is None or most > self.division.allowed_bytes
                new |= not set(self.watching.of) <= set(self._table)
                over = self._over()
                if self._ranks.most([new or over > 0]) == [1]:
                    self._divide(over)

    def rest(self) -> None:
        """A call without gradients: between two steps no recording goes on."""
        if self.several:
            self.watching.rest()

    def _over(self) -> int:
        """By how many bytes what the watched steps reserved is over the budget: that of later divisions is lowered."""
        if self._reserve is None or self.division is None:
            return 0
        over = self._reserve.over(lambda: self.watching.reserved_bytes)
        if not over or len(self._lowered) == ATTEMPTS:
            return 0
        less = min(self.division.allowed_bytes, self.division.predicted_bytes) - (over << len(self._lowered))
        self._lowered.append(less)  # as `lowered` does it
        return over

    def run(self, planned: PlannedSizes, inputs: Sequence[Any]) -> Any:
        """One forward pass by the plan that what is outstanding leaves to it."""
        if _compat.saved_tensors_have_hooks() or _inside():
            # it may run twice, and must save the same then; what it holds is up to the hooks, and counts as measured
            return self._by(planned, planned.least)(*inputs) if self.several else planned(*inputs)
        if not self.several and self.calls.outstanding():
            self.share()
        stack = self.calls.stack(planned)
        point = self._point(stack, planned) if self.several else None
        function = planned if point is None else self._by(planned, point)
        call = Call(stack, planned, point)
        results = self.watching.forward(call, function, inputs)
        if planned.failed:  # in this call, which has no node of a plan's
            self.watching.compiling()
        else:
            self.calls.note(call, inputs, results)
        return results

    def _by(self, planned: PlannedSizes, point: Point) -> Callable[..., Any]:
        if not planned.has(point):
            self.watching.compiling()
        return planned.by(point)

    def _point(self, stack: Stack, planned: PlannedSizes) -> Point:
        """The plan of a call: by what is outstanding below it, or else one of its graph's that fits what is left."""
        self.watching.note(stack)
        found = self._table.get(stack)
        if found is not None:
            return found
        if self.division is None or self._ranks.in_step:  # what is outstanding here may be gone on another rank
            return planned.least
        if not self._said:
            self._said = True
            log.info("a call with others outstanding than in the steps that were watched takes a plan that fits")
        left = self.division.allowed_bytes - sum(each.option.held_bytes for each in self.calls.outstanding())
        of_this = (point for other, point in self._table.items() if self.watching.of[other] is planned)
        fits = [p for p in of_this if max(p.option.forward_bytes, p.option.backward_bytes) <= left]
        return min(fits, key=lambda p: p.option.cost_ns, default=planned.least)

    def _divide(self, over: int) -> None:
        """Divide the budget over all that has been watched.

        Args:
            over: what is reserved by the last division, over the budget.

        Raises:
            BudgetTooSmall: no choice of plans fits.
        """
        live = [planned for backend in self.backends.values() for planned in backend.planned]
        if not self.watching.agree(live):
            return
        rows = list(self.watching.rows.values())
        plain = {stack: planned.plain.option for stack, planned in self.watching.of.items()}
        fixed = max(self.watching.fixed_bytes, *(planned.graph.fixed_bytes for planned in self.watching.of.values()))
        (fixed,) = self._ranks.most([fixed])
        whole = peak_by(rows, plain)
        allowed = self._allowed(fixed, whole)
        chosen = self._by_first(lambda: self._choose(rows, allowed))
        if chosen is None and over:
            self._lowered.pop()
            log.warning("the allocator may reserve up to %s more than the budget", readable(over))
            return
        if chosen is None:
            self.watching.wanted = True
            raise self._refused(rows, allowed, fixed, whole)
        self._take(rows, chosen, allowed, fixed)
        if self.improves:
            better: Future[list[tuple[str, Point]]] = Future()
            asks: list[int] = []
            self._ranks.share(lambda: asks.append(1))  # of the first rank alone
            if asks:
                self._ask(chosen, better)
            else:
                better.set_result([])
            self._divided, self._better = (rows, allowed, fixed), better
            if self._asking.wait:
                self._take_better()

    def _allowed(self, fixed: int, whole: int) -> int:
        """What the calls may take; on an accelerator others have some of it, and segments waste some."""
        allowed = allowed_bytes(self.budget, self._asking.slack, fixed, whole)
        if self._reserve is None and isinstance(self.budget, int):
            self._reserve = Room(self.watching.device, self.budget, self._asking.slack, self._ranks)
        outside = 0 if self._reserve is None else self._reserve.outside
        return min(self._ranks.least([allowed - outside, *self._lowered]))

    def _by_first(self, choose: Callable[[], dict[Stack, Point] | None]) -> dict[Stack, Point] | None:
        """What the first rank chooses, on all of them."""
        if not self._ranks.in_step:
            return choose()
        stacks = sorted(self.watching.of)

        def plans() -> list[Any] | None:
            found = choose()
            return None if found is None else [found[stack].plan.to_json() for stack in stacks]

        told = self._ranks.share(plans)
        if told is None:
            return None
        return {s: self.watching.of[s].point(Plan.from_json(data)) for s, data in zip(stacks, told, strict=True)}

    def _refused(self, rows: Sequence[Row], allowed: int, fixed: int, whole: int) -> BudgetTooSmall:
        """Why no choice fits, and what is enough."""
        options = {stack: [p.option for p in ways] for stack, ways in self._points().items()}
        (least,) = self._ranks.most([least_bytes(rows, options)])
        text = (
            f"no choice of plans for the {len(self.watching.of)} calls of a step fits {readable(fixed + allowed)}; "
            f"{readable(fixed + least, up=True)} is enough, of which {readable(fixed)} are fixed"
        )
        if isinstance(self.budget, Fraction):
            text += f": a share of {share_of(least, whole)}"
        return BudgetTooSmall(
            text, Answer(status=Status.NOTHING_FOUND, method="division", budget_bytes=max(0, fixed + allowed))
        )

    def _points(self) -> dict[Stack, list[Point]]:
        """Plans of each call at several bounds."""
        return {stack: planned.points(self._curves) for stack, planned in self.watching.of.items()}

    def _choose(self, rows: Sequence[Row], allowed: int) -> dict[Stack, Point] | None:
        points = self._points()
        found = divide(rows, {stack: [p.option for p in ways] for stack, ways in points.items()}, allowed)
        return None if found is None else {stack: points[stack][i] for stack, i in found.items()}

    def _take(self, rows: Sequence[Row], chosen: Mapping[Stack, Point], allowed: int, fixed: int) -> None:
        """The steps that begin from now on run by these plans."""
        options = {stack: point.option for stack, point in chosen.items()}
        plain = sum(self.watching.of[stack].plain.option.cost_ns for stack in chosen)
        overhead = sum(option.cost_ns for option in options.values()) / max(1, plain) - 1
        self.division = Division(len(chosen), allowed, peak_by(rows, options), fixed, overhead)
        self._table, self.watching.wanted = dict(chosen), True  # the first quiet step by it is watched, too
        for planned in set(self.watching.of.values()):
            planned.keep([point for stack, point in chosen.items() if self.watching.of[stack] is planned])
        log.info("the budget is divided: %s", self.division)

    def _ask(self, chosen: Mapping[Stack, Point], better: Future[list[tuple[str, Point]]]) -> None:
        """Ask the planner, in a thread unless it alone is waited for, for what was picked: once for equal graphs."""
        planner = self._planner.here().asked
        of = self.watching.of
        picks = {(of[stack].digest, point): of[stack].priced for stack, point in chosen.items()}

        def ask() -> None:
            found = []
            try:
                for (digest, point), priced in picks.items():
                    one = solved(priced, point, 0, planner, self._asking)
                    if one is not None:
                        found.append((digest, one))
            except Exception as error:  # noqa: BLE001 – the planner's trouble is no reason to stop training
                log.warning("no better plan came, training goes on by greedy ones: %s", error)
            better.set_result(found)

        if self._asking.wait and not self._ranks.in_step:
            ask()
        else:
            threading.Thread(target=ask, name="remat-planner", daemon=True).start()

    def _take_better(self) -> None:
        """Divide again among what the planner has made of what was picked."""
        assert self._better is not None
        for digest, point in self._ranks.awaited(self._better.result)():
            self._curves[digest].append(point)
        self._better = None
        rows, allowed, fixed = self._divided
        again = self._by_first(lambda: self._choose(rows, allowed))
        if again is not None and _cost(again) < _cost(self._table):
            self._take(rows, again, allowed, fixed)


def _inside() -> bool:
    return _compat.backward_task() != -1


def _cost(chosen: Mapping[Stack, Point]) -> int:
    return sum(point.option.cost_ns for point in chosen.values())


def allowed_bytes(budget: Budget, slack: float, fixed: int, plain: int) -> int:
    """The bytes above the fixed ones that a budget leaves."""
    if isinstance(budget, Fraction):
        return int(budget.fraction * plain)
    if isinstance(budget, ActivationBytes):
        return bytes_of(budget.size)
    if isinstance(budget, UnitBytes):
        return bytes_of(budget.peak)
    size = device_budget(budget, slack)
    assert isinstance(size, int)
    return size - fixed
