"""One budget for all that is outstanding: plans by what earlier calls hold, divided after a step that has been watched.

Where a step is one call of one graph, that has a plan of its own for the whole budget. Otherwise its calls run by the
plans that hold least, until a step has been watched in which nothing was compiled. What the allocator showed then at
each moment, less what the plans say, is the rest; the budget is divided over the moments, and the next step that begins
runs by that. It is watched as well: where something is new, or the budget did not hold, it is divided anew.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from remat_ir import Answer, Plan, Status, readable

from .. import _compat
from ..capture.dataflow import tensors
from ..device import Accelerator, Watch, capturing, of
from ..errors import BudgetTooSmall
from ..planning.allot import Option
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, bytes_of, device_budget, share_of
from ..planning.coordinator import Coordinator
from ..planning.division import Pass, Row, Stack, divide, least_bytes, peak_by
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from .calls import Call, Calls
from .plans import PlannedSizes, Point, solved

log = logging.getLogger("remat")

MOST_WATCHED = 64
"""Steps of a backend that are watched; what is new afterwards takes a plan that fits what is left."""

MOST_IN_A_ROW = 12
"""Of these, so many one after the other: what has not come again by then is not waited for."""

MOST_POSTPONED = 6
"""Steps that begin with calls outstanding, after which one of them is watched all the same."""

MOST_STACKS = 1024
"""Calls, told apart by what is outstanding below them, that are looked at."""


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


class _Moment(NamedTuple):
    """A pass of a call, or what lay between two; the calls that were outstanding besides."""

    kind: Pass
    call: Call | None
    held: tuple[Call, ...]

    def says(self) -> int:
        """What the plans say of it, in bytes above the fixed ones."""
        now = sum(_option(each).held_bytes for each in self.held)
        if self.call is None:
            return now
        option = _option(self.call)
        return now + (option.forward_bytes if self.kind == "forward" else option.backward_bytes)


def _option(call: Call) -> Option:
    return (call.point or call.planned.own).option


@dataclass(eq=False, repr=False)
class _Step:
    """The moments of a step that is watched; one in which something is compiled shows other peaks than usual."""

    moments: list[_Moment] = field(default_factory=list)
    compiles: bool = False

    def stacks(self) -> set[Stack]:
        """The calls that run in it."""
        return {moment.call.stack for moment in self.moments if moment.call is not None}


@dataclass(eq=False, repr=False)
class _Session:
    """Steps that are watched one after the other.

    Attributes:
        thread: the one that it watches; a number of one that has ended is given to another.
        before: what was outstanding when it began. The CPU's allocator does not tell when that is freed.
        running: the call whose pass has begun and not ended.
        accelerated: whether the allocator's count is that of an accelerator.
        lost: whether something was not seen.
        ended: whether another watch has ended this one.
    """

    watch: Watch
    thread: threading.Thread
    before: tuple[Call, ...]
    accelerated: bool
    steps: list[_Step] = field(default_factory=lambda: [_Step()])
    running: Call | None = None
    lost: bool = False
    ended: bool = False

    def cut(self, kind: Pass, call: Call | None, held: Iterable[Call]) -> None:
        """What has been since the last cut was this."""
        self.steps[-1].moments.append(_Moment(kind, call, tuple(each for each in held if each is not call)))
        self.watch.cut(kind)

    def there(self, moment: _Moment, peak_bytes: int) -> int | None:
        """What is there at a moment whose peak was this over the beginning; None: that is not known."""
        if self.accelerated:
            return peak_bytes + sum(_option(each).held_bytes for each in self.before)
        if moment.call in self.before:
            return None
        return peak_bytes + sum(_option(each).held_bytes for each in self.before if each in moment.held)

    def quiet(self) -> list[_Step]:
        """The steps in which nothing was compiled."""
        return [step for step in self.steps if not step.compiles]

    def stacks(self) -> set[Stack]:
        """The calls that have been seen in such."""
        return set[Stack]().union(*(step.stacks() for step in self.quiet()))

    def repeats(self) -> bool:
        """Whether the last two steps have shown nothing new."""
        *earlier, one, other = [step.stacks() for step in self.quiet()] if len(self.quiet()) > 2 else [set(), set()]
        return bool(earlier) and one | other <= set[Stack]().union(*earlier) and self.quiet()[-1] is self.steps[-1]


class SharedBudget:
    """The calls of one backend, what is outstanding of them, and which plan each takes.

    Args:
        live: the plans that the backend has now.

    Attributes:
        shares: whether calls may share; otherwise each has the whole of it.
        improves: whether the planner is asked for better plans than the greedy ones.
        several: whether a step has several calls, or a graph that Dynamo has broken.
        division: what they got, once the budget has been divided.
    """

    def __init__(
        self,
        budget: Budget,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        live: Callable[[], Sequence[PlannedSizes]],
    ) -> None:
        self.budget, self._planner, self._asking, self._live = budget, planner, asking, live
        self.calls = Calls(self._before_backward, self._after_backward)
        self.shares = self.improves = True
        self.several = False
        self.division: Division | None = None
        self._table: dict[Stack, Point] = {}
        self._of: dict[Stack, PlannedSizes] = {}
        self._rows: dict[tuple[Pass, Stack | None, tuple[Stack, ...]], Row] = {}
        self._seen: set[Stack] = set()
        self._session: _Session | None = None
        self._watched = self._postponed = 0
        self._wanted = False
        self._fixed: dict[int, int] = {}
        self._device = torch.device("cpu")
        self._divided: tuple[Sequence[Row], int, int] = (), 0, 0
        self._better: Future[list[tuple[PlannedSizes, Point]]] | None = None
        self._said = False
        self._lock = threading.RLock()

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
        self.several = self._wanted = True

    def chosen(self) -> list[tuple[PlannedSizes, Plan]]:
        """The graphs and plans of the division, each pair once."""
        found = {(self._of[stack].number, id(point)): (self._of[stack], point) for stack, point in self._table.items()}
        return [(planned, point.plan) for planned, point in found.values()]

    @property
    def _ranks(self) -> Coordinator:
        return self._planner.here().coordinator

    def on(self, device: torch.device) -> None:
        """Where the calls run."""
        self._device = device

    def compiling(self) -> None:
        """Something is compiled in this step."""
        if self._session is not None:
            self._session.steps[-1].compiles = True

    def begin(self) -> None:
        """A forward call; it begins a step if it is the first outside of a backward pass after one has run.

        Raises:
            BudgetTooSmall: no choice of plans fits what was watched.
        """
        if not self.calls.passed or _inside():
            return
        with self._lock:
            self.calls.passed = False
            if self.several:
                self._next_step()

    def run(self, planned: PlannedSizes, inputs: Sequence[Any]) -> Any:
        """One forward pass by the plan that what is outstanding leaves to it."""
        if _compat.saved_tensors_have_hooks() or _inside():
            # it may run twice, and must save the same then; what it holds is up to the hooks, and counts as measured
            return self._by(planned, planned.least)(*inputs) if self.several else planned(*inputs)
        if not self.several and self.calls.outstanding():
            self.share()
        if not self.several:
            call = self.calls.begun(planned, None)
            results = planned(*inputs)
            self.calls.note(call, inputs, results)
            return results
        stack = self.calls.begun(planned, None).stack
        call = Call(stack, planned, self._point(stack, planned))
        function = self._by(planned, call.point or planned.least)
        session = self._session
        if session is None or session.lost or session.thread is not threading.current_thread():
            results = function(*inputs)
        else:
            self._note_fixed(inputs)
            self._pass_begins(session, call)
            results = function(*inputs)
            self._pass_ends(session, "forward", call)
        self.calls.note(call, inputs, results)
        return results

    def _by(self, planned: PlannedSizes, point: Point) -> Callable[..., Any]:
        if not planned.has(point):
            self.compiling()
        return planned.by(point)

    def _point(self, stack: Stack, planned: PlannedSizes) -> Point:
        """The plan of a call: by what is outstanding below it, or else one of its graph's that fits what is left."""
        if stack not in self._seen and len(self._seen) < MOST_STACKS:
            self._seen.add(stack)
            self._wanted = True
        found = self._table.get(stack)
        if found is not None:
            return found
        if self.division is None or self._ranks.in_step:  # what is outstanding here may be gone on another rank
            return planned.least
        if not self._said:
            self._said = True
            log.info("a call with others outstanding than in the steps that were watched takes a plan that fits")
        left = self.division.allowed_bytes - sum(_option(each).held_bytes for each in self.calls.outstanding())
        of_this = (point for other, point in self._table.items() if self._of[other] is planned)
        fits = [p for p in of_this if max(p.option.forward_bytes, p.option.backward_bytes) <= left]
        return min(fits, key=lambda p: p.option.cost_ns, default=planned.least)

    # steps that are watched

    def _next_step(self) -> None:
        """All ranks begin, go on and end to watch, and take what is better, at the same step."""
        session = self._session
        found = self._better is not None and self._better.done()
        ready = self._wanted and self._watched < MOST_WATCHED and not capturing() and not _compat.recording()
        # of what is outstanding when it begins, a CPU's allocator tells little
        may_open = ready and (self._postponed >= MOST_POSTPONED or not self.calls.outstanding())
        enough, goes_on = True, False
        if session is not None:
            enough = bool(session.quiet()) and (self._seen <= session.stacks() or session.repeats())
            here = session.thread is threading.current_thread()
            goes_on = here and not session.lost and len(session.steps) < MOST_IN_A_ROW
        found, may_open, enough, goes_on = map(bool, self._ranks.least([found, may_open, enough, goes_on]))
        if found:
            self._take_better()
        if session is None:
            if may_open:
                self._open()
            self._postponed += ready
            return
        self._watched += 1
        if enough or not goes_on:
            self._close(session)
        else:
            session.steps.append(_Step())

    def _open(self) -> None:
        gc.collect()
        self._postponed = 0
        before, device = self.calls.outstanding(), of(self._device)
        session = _Session(device.watch(), threading.current_thread(), before, isinstance(device, Accelerator))

        def gives_way() -> None:
            session.lost = session.ended = True

        session.watch.start(gives_way)
        self._session = session
        self._fixed = {-1: max(0, device.requested_bytes() - sum(_option(each).held_bytes for each in before))}

    def _close(self, session: _Session) -> None:
        """What was watched, as rows; the budget is divided by all of them.

        Raises:
            BudgetTooSmall: no choice of plans fits.
        """
        self._session = None
        here = session.thread is threading.current_thread()  # otherwise its watch is another thread's
        seen = session.watch.stop() if here and not session.ended else []
        if self._ranks.least([bool(seen and session.quiet() and not session.lost)]) != [1]:
            return
        self._wanted = False
        self._seen &= session.stacks() | set(self._table)  # what else there was may come again, and is new then
        at, worst = 0, 0
        for step in session.steps:
            for moment, part in zip(step.moments, seen[at : at + len(step.moments)], strict=True):
                if step.compiles or (moment.call is None and not moment.held):
                    continue
                there = session.there(moment, part.peak_bytes)
                if there is not None:
                    worst = max(worst, there)
                    self._note(moment, there - moment.says())
            at += len(step.moments)
        new = self.division is None or worst > self.division.allowed_bytes or not set(self._of) <= set(self._table)
        if self._ranks.most([new]) == [1]:
            self._divide()

    def _note(self, moment: _Moment, rest: int) -> None:
        call, held = moment.call, tuple(each.stack for each in moment.held)
        for each in (*moment.held, *([] if call is None else [call])):
            self._of[each.stack] = each.planned
        key = moment.kind, None if call is None else call.stack, held
        before = self._rows.get(key)
        self._rows[key] = Row(*key, rest if before is None else max(rest, before.rest_bytes))

    def _before_backward(self, call: Call) -> None:
        if self._session is not None:
            self._pass_begins(self._session, call)

    def _after_backward(self, call: Call) -> None:
        if self._session is not None:
            self._pass_ends(self._session, "backward", call)

    def _pass_begins(self, session: _Session, call: Call) -> None:
        if session.running is not None or self._elsewhere(session):
            session.lost = True  # a pass has raised, or one runs inside another
        if not session.lost:
            session.cut("between", None, self.calls.outstanding())
            session.running = call

    def _pass_ends(self, session: _Session, kind: Pass, call: Call) -> None:
        if session.running is not call or self._elsewhere(session):
            session.lost = True
        if not session.lost:
            session.cut(kind, call, self.calls.outstanding())
            session.running = None

    def _elsewhere(self, session: _Session) -> bool:
        """Whether this thread is not the one of a session that sees one thread alone."""
        return self._device.type == "cpu" and session.thread is not threading.current_thread()

    def _note_fixed(self, inputs: Sequence[Any]) -> None:
        if not self._fixed.get(-1):
            leaves = (t for t in tensors(inputs) if t.grad_fn is None)
            self._fixed |= {_compat.storage_key(t): t.untyped_storage().nbytes() for t in leaves}

    # the division

    def _divide(self) -> None:
        """Divide the budget over all that has been watched.

        Raises:
            BudgetTooSmall: no choice of plans fits.
        """
        numbers = {planned.number for planned in self._live()}
        self._rows = {k: r for k, r in self._rows.items() if {n for s in (*r.held, r.call or ()) for n in s} <= numbers}
        stacks = {stack for row in self._rows.values() for stack in row.stacks}
        self._of = {stack: planned for stack, planned in self._of.items() if stack in stacks}
        if not self._agree() or not self._of:
            return
        rows = list(self._rows.values())
        plain = {stack: planned.plain.option for stack, planned in self._of.items()}
        fixed = max(sum(self._fixed.values()), *(planned.graph.fixed_bytes for planned in self._of.values()))
        (fixed,) = self._ranks.most([fixed])
        whole = peak_by(rows, plain)
        allowed = allowed_bytes(self.budget, self._asking.slack, fixed, whole)
        chosen = self._by_first(lambda: self._choose(rows, allowed))
        if chosen is None:
            self._wanted = True
            raise self._refused(rows, allowed, fixed, whole)
        self._take(rows, chosen, allowed, fixed)
        if self.improves:
            better: Future[list[tuple[PlannedSizes, Point]]] = Future()
            asks: list[int] = []
            self._ranks.share(lambda: asks.append(1))  # of the first rank alone
            if asks:
                self._ask(chosen, better)
            else:
                better.set_result([])
            self._divided, self._better = (rows, allowed, fixed), better
            if self._asking.wait:
                self._take_better()

    def _agree(self) -> bool:
        """Give each row the most that a rank has seen; False: they have seen different ones, and watch once more."""
        if not self._ranks.in_step:
            return True
        order = {number: at for at, number in enumerate(sorted(planned.number for planned in self._live()))}

        def name(stack: Stack | None) -> list[int]:
            return [] if stack is None else [order[number] for number in stack]

        named = {(r.kind, str(name(r.call)), str([*map(name, r.held)])): key for key, r in self._rows.items()}
        mine = [list(each) for each in sorted(named)]
        if self._ranks.least([self._ranks.share(lambda: mine) == mine]) != [1]:
            log.info("the ranks have seen different calls: the budget is divided after another step")
            self._wanted = True
            return False
        keys = [named[each] for each in sorted(named)]
        most = self._ranks.most([self._rows[key].rest_bytes for key in keys])
        self._rows = {key: Row(*key, rest) for key, rest in zip(keys, most, strict=True)}
        return True

    def _by_first(self, choose: Callable[[], dict[Stack, Point] | None]) -> dict[Stack, Point] | None:
        """What the first rank chooses, on all of them."""
        if not self._ranks.in_step:
            return choose()
        stacks = sorted(self._of)

        def plans() -> list[Any] | None:
            found = choose()
            return None if found is None else [found[stack].plan.to_json() for stack in stacks]

        told = self._ranks.share(plans)
        if told is None:
            return None
        return {s: self._of[s].point(Plan.from_json(data)) for s, data in zip(stacks, told, strict=True)}

    def _refused(self, rows: Sequence[Row], allowed: int, fixed: int, whole: int) -> BudgetTooSmall:
        """Why no choice fits, and what is enough."""
        options = {stack: [p.option for p in planned.points()] for stack, planned in self._of.items()}
        (least,) = self._ranks.most([least_bytes(rows, options)])
        text = (
            f"no choice of plans for the {len(self._of)} calls of a step fits {readable(fixed + allowed)}; "
            f"{readable(fixed + least, up=True)} is enough, of which {readable(fixed)} are fixed"
        )
        if isinstance(self.budget, Fraction):
            text += f": a share of {share_of(least, whole)}"
        return BudgetTooSmall(
            text, Answer(status=Status.NOTHING_FOUND, method="division", budget_bytes=max(0, fixed + allowed))
        )

    def _choose(self, rows: Sequence[Row], allowed: int) -> dict[Stack, Point] | None:
        points = {stack: planned.points() for stack, planned in self._of.items()}
        found = divide(rows, {stack: [p.option for p in ways] for stack, ways in points.items()}, allowed)
        return None if found is None else {stack: points[stack][i] for stack, i in found.items()}

    def _take(self, rows: Sequence[Row], chosen: Mapping[Stack, Point], allowed: int, fixed: int) -> None:
        """The steps that begin from now on run by these plans."""
        options = {stack: point.option for stack, point in chosen.items()}
        plain = sum(self._of[stack].plain.option.cost_ns for stack in chosen)
        overhead = sum(option.cost_ns for option in options.values()) / max(1, plain) - 1
        self.division = Division(len(chosen), allowed, peak_by(rows, options), fixed, overhead)
        self._table, self._wanted = dict(chosen), True  # the first quiet step by it is watched, too
        for planned in set(self._of.values()):
            planned.keep([point for stack, point in chosen.items() if self._of[stack] is planned])
        log.info("the budget is divided: %s", self.division)

    def _ask(self, chosen: Mapping[Stack, Point], better: Future[list[tuple[PlannedSizes, Point]]]) -> None:
        """Ask the planner, in a thread unless it is waited for, for what was picked."""
        planner = self._planner.here().asked
        picks = {(self._of[stack], point): None for stack, point in chosen.items()}

        def ask() -> None:
            found = []
            try:
                for planned, point in picks:
                    one = solved(planned.priced, point, 0, planner, self._asking)
                    if one is not None:
                        found.append((planned, one))
            except Exception as error:  # the planner's trouble is no reason to stop training
                log.warning("no better plan came, training goes on by greedy ones: %s", error)
            better.set_result(found)

        if self._asking.wait:
            ask()
        else:
            threading.Thread(target=ask, name="remat-planner", daemon=True).start()

    def _take_better(self) -> None:
        """Divide again among what the planner has made of what was picked."""
        assert self._better is not None
        for planned, point in self._better.result():
            planned.add(point)
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
