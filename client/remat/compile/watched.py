"""Steps that are watched: what was there at each of their moments that the plans of their calls say nothing of."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import _compat
from ..capture.dataflow import tensors
from ..device import Accelerator, Interval, Watch, capturing, of
from ..planning.coordinator import Coordinator
from ..planning.division import Pass, Row, Stack
from ..planning.planner import CoordinatedPlanner
from .calls import Call, Calls
from .plans import PlannedSizes

log = logging.getLogger("remat")

MOST_WATCHED = 64
"""Steps of a backend that are watched; what is new afterwards takes a plan that fits what is left."""

MOST_IN_A_ROW = 12
"""Of these, so many one after the other: what has not come again by then is not waited for."""

MOST_POSTPONED = 6
"""Steps that begin with calls outstanding, after which one of them is watched all the same."""

MOST_CUT_SHORT = 4
"""Watches that end at a call without gradients before a step of theirs has counted; later ones go on through it."""

MOST_STACKS = 1024
"""Calls, told apart by what is outstanding below them, that are looked at."""


class _Moment(NamedTuple):
    """A pass of a call, or what lay between two; the calls that were outstanding besides."""

    kind: Pass
    call: Call | None
    held: tuple[Call, ...]

    def says(self) -> int:
        """What the plans say of it, in bytes above the fixed ones."""
        now = sum(each.option.held_bytes for each in self.held)
        if self.call is None:
            return now
        option = self.call.option
        return now + (option.forward_bytes if self.kind == "forward" else option.backward_bytes)


@dataclass(eq=False, repr=False)
class _Step:
    """The moments of a step that is watched.

    Attributes:
        counts: no for one in which something is compiled, which shows other peaks than usual, and for one whose
            beginning was not seen.
    """

    moments: list[_Moment] = field(default_factory=list)
    counts: bool = True

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
        seen: what was seen, once it has come to its end; None: it goes on.
    """

    watch: Watch
    thread: threading.Thread
    before: tuple[Call, ...]
    accelerated: bool
    steps: list[_Step] = field(default_factory=lambda: [_Step()])
    running: Call | None = None
    lost: bool = False
    ended: bool = False
    seen: Sequence[Interval] | None = None

    @property
    def here(self) -> bool:
        """Whether this thread is the one that it watches."""
        return self.thread is threading.current_thread()

    def stop(self) -> Sequence[Interval]:
        """Watch no more; what was seen. Of another thread the watch stays open, and nothing is known."""
        if self.seen is None:
            self.seen = self.watch.stop() if self.here and not self.ended else []
        return self.seen

    def cut(self, kind: Pass, call: Call | None, held: Iterable[Call]) -> None:
        """What has been since the last cut was this."""
        self.steps[-1].moments.append(_Moment(kind, call, tuple(each for each in held if each is not call)))
        self.watch.cut(kind)

    def there(self, moment: _Moment, peak_bytes: int) -> int | None:
        """What is there at a moment whose peak was this over the beginning; None: that is not known."""
        if self.accelerated:
            return peak_bytes + sum(each.option.held_bytes for each in self.before)
        if moment.call in self.before:
            return None
        return peak_bytes + sum(each.option.held_bytes for each in self.before if each in moment.held)

    def quiet(self) -> list[_Step]:
        """The steps that count."""
        return [step for step in self.steps if step.counts]

    def stacks(self) -> set[Stack]:
        """The calls that have been seen in such."""
        return set[Stack]().union(*(step.stacks() for step in self.quiet()))

    def repeats(self) -> bool:
        """Whether the last two steps have shown nothing new."""
        *earlier, one, other = [step.stacks() for step in self.quiet()] if len(self.quiet()) > 2 else [set(), set()]
        return bool(earlier) and one | other <= set[Stack]().union(*earlier) and self.quiet()[-1] is self.steps[-1]


Key: TypeAlias = tuple[Pass, Stack | None, tuple[Stack, ...]]
"""A moment by the kind of pass, the call, and what was outstanding besides."""


class Watching:
    """The calls of a backend, and what was seen of the steps in which some of them were watched.

    Attributes:
        calls: those that are outstanding.
        device: where they run.
        wanted: whether a step is to be watched: there is something new.
        rows: of each moment that was seen, the most that was there besides what the plans say.
        of: the graphs of the calls that were seen.
        reserved_bytes: what the allocator of an accelerator had when a watch ended last, where that is asked for.

    Args:
        reserves: whether what is reserved counts: what earlier steps have left is given back before a watch.
    """

    reserved_bytes = 0

    def __init__(self, planner: CoordinatedPlanner, reserves: bool) -> None:
        self._planner, self._reserves = planner, reserves
        self.calls = Calls(self._before_backward, self._after_backward)
        self.device = torch.device("cpu")
        self.wanted = False
        self.rows: dict[Key, Row] = {}
        self.of: dict[Stack, PlannedSizes] = {}
        self._seen: set[Stack] = set()
        self._session: _Session | None = None
        self._watched = self._postponed = self._cut_short = 0
        self._fixed: dict[int, int] = {}

    @property
    def _ranks(self) -> Coordinator:
        return self._planner.here().coordinator

    @property
    def fixed_bytes(self) -> int:
        """What is there throughout: as counted when a watch began, or what the calls took where nothing counts."""
        return sum(self._fixed.values())

    def compiling(self) -> None:
        """Something is compiled in this step."""
        if self._session is not None and self._session.seen is None:
            self._session.steps[-1].counts = False

    def note(self, stack: Stack) -> None:
        """A call begins, which is new where none with the same calls below it has been noted."""
        if stack not in self._seen and len(self._seen) < MOST_STACKS:
            self._seen.add(stack)
            self.wanted = True

    def forward(self, call: Call, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a call."""
        session = self._session
        if session is None or session.lost or session.seen is not None or not session.here:
            return function(*inputs)
        first = not session.accelerated and len(session.steps) == 1 and not session.steps[0].moments
        if first and any(t.grad_fn is not None for t in tensors(inputs)):
            session.steps[0].counts = False  # the step has made something before it, of which a CPU tells nothing
        self._note_fixed(inputs)
        self._pass_begins(session, call)
        results = function(*inputs)
        self._pass_ends(session, "forward", call)
        return results

    def next_step(self, come: bool, take: Callable[[], None], known: Callable[[], Collection[Stack]]) -> int | None:
        """A step begins: all ranks begin, go on and end to watch, and take what is better, at the same one.

        The most that was there in the steps that have been watched, where that ends here, and all ranks have seen it.

        Args:
            come: whether something better has come here.
            take: takes it, once it has come on all ranks.
            known: the calls that have a plan of their own then.
        """
        session = self._session
        ready = self.wanted and self._watched < MOST_WATCHED and not capturing() and not _compat.recording()
        # of what is outstanding when it begins, a CPU's allocator tells little
        may_open = ready and (self._postponed >= MOST_POSTPONED or not self.calls.outstanding())
        enough, goes_on = True, False
        if session is not None:
            enough = bool(session.quiet()) and (self._seen <= session.stacks() or session.repeats())
            goes_on = session.here and not session.lost and session.seen is None
            goes_on &= len(session.steps) < MOST_IN_A_ROW
        come, may_open, enough, goes_on = map(bool, self._ranks.least([come, may_open, enough, goes_on]))
        if come:
            take()
        if session is None:
            if may_open:
                self._open()
            self._postponed += ready
            return None
        self._watched += 1
        if enough or not goes_on:
            return self._close(session, known())
        session.steps.append(_Step())
        return None

    def rest(self) -> None:
        """A call without gradients: where it lies between two steps, such as in evaluation, a CPU's recording ends.

        That notes all that its thread runs, and lets no profiler of the caller's begin.
        """
        session = self._session
        if session is None or session.accelerated or session.seen is not None or not session.here:
            return
        if not self.calls.passed or self.calls.outstanding() or _compat.backward_task() != -1:
            return
        if not session.lost and not session.quiet():
            if self._cut_short == MOST_CUT_SHORT:  # it would end before each step that counts
                return
            self._cut_short += 1
        session.stop()

    def end(self) -> None:
        """One of the modules is planned no more, or anew: what is watched now says nothing."""
        session = self._session
        if session is not None and not session.accelerated and session.here:
            session.lost = True
            session.stop()

    def _open(self) -> None:
        gc.collect()
        self._postponed = 0
        before, device = self.calls.outstanding(), of(self.device)
        if self._reserves and isinstance(device, Accelerator):
            device.give_back()
        session = _Session(device.watch(), threading.current_thread(), before, isinstance(device, Accelerator))

        def gives_way() -> None:
            session.lost = session.ended = True

        session.watch.start(gives_way)
        self._session = session
        self._fixed = {-1: max(0, device.requested_bytes() - sum(each.option.held_bytes for each in before))}

    def _close(self, session: _Session, known: Collection[Stack]) -> int | None:
        """What was watched, as rows, and the most that was there; None: a rank has seen nothing."""
        self._session = None
        device = of(self.device)
        self.reserved_bytes = device.memory().reserved if isinstance(device, Accelerator) else 0
        seen = session.stop()
        if self._ranks.least([bool(seen and session.quiet() and not session.lost)]) != [1]:
            return None
        self.wanted = False
        self._seen &= session.stacks() | set(known)  # what else there was may come again, and is new then
        at, worst = 0, 0
        for step in session.steps:
            for moment, part in zip(step.moments, seen[at : at + len(step.moments)], strict=True):
                if not step.counts or (moment.call is None and not moment.held):
                    continue
                there = session.there(moment, part.peak_bytes)
                if there is not None:
                    worst = max(worst, there)
                    self._enter(moment, there - moment.says())
            at += len(step.moments)
        return worst

    def _enter(self, moment: _Moment, rest: int) -> None:
        call, held = moment.call, tuple(each.stack for each in moment.held)
        for each in (*moment.held, *([] if call is None else [call])):
            self.of[each.stack] = each.planned
        key = moment.kind, None if call is None else call.stack, held
        before = self.rows.get(key)
        self.rows[key] = Row(*key, rest if before is None else max(rest, before.rest_bytes))

    def _before_backward(self, call: Call) -> None:
        if self._session is not None and self._session.seen is None:
            self._pass_begins(self._session, call)

    def _after_backward(self, call: Call) -> None:
        if self._session is not None and self._session.seen is None:
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
        return self.device.type == "cpu" and not session.here

    def _note_fixed(self, inputs: Sequence[object]) -> None:
        if not self._fixed.get(-1):
            leaves = (t for t in tensors(inputs) if t.grad_fn is None)
            self._fixed |= {_compat.storage_key(t): t.untyped_storage().nbytes() for t in leaves}

    def agree(self, live: Sequence[PlannedSizes]) -> bool:
        """Forget what has no plan any more, and give each row the most that a rank has seen.

        False: there is none, or they have seen different ones, and watch once more.
        """
        numbers = {planned.number for planned in live}
        self.rows = {k: r for k, r in self.rows.items() if {n for s in (*r.held, r.call or ()) for n in s} <= numbers}
        stacks = {stack for row in self.rows.values() for stack in row.stacks}
        self.of = {stack: planned for stack, planned in self.of.items() if stack in stacks}
        if not self._ranks.in_step:
            return bool(self.of)
        order = {number: at for at, number in enumerate(sorted(numbers))}

        def name(stack: Stack | None) -> list[int]:
            return [] if stack is None else [order[number] for number in stack]

        named = {(r.kind, str(name(r.call)), str([*map(name, r.held)])): key for key, r in self.rows.items()}
        mine = [list(each) for each in sorted(named)]
        if self._ranks.least([self._ranks.share(lambda: mine) == mine]) != [1]:
            log.info("the ranks have seen different calls: the budget is divided after another step")
            self.wanted = True
            return False
        keys = [named[each] for each in sorted(named)]
        most = self._ranks.most([self.rows[key].rest_bytes for key in keys])
        self.rows = {key: Row(*key, rest) for key, rest in zip(keys, most, strict=True)}
        return bool(self.of)
