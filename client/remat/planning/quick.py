"""A plan to start on at once, while a better one is looked for next to the training."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from remat_ir import Answer, Problem, RematError, Status, duration

from .coordinator import AskAgain, Coordinator, NotWanted, Pending
from .greedy import Known, greedy_answer, plan_of_another_size
from .options import SolveOptions
from .planner import CoordinatedPlanner, FallbackPlanner, Planner
from .sources import OnProgress, ServicePlanner

log = logging.getLogger("remat")

Made = TypeVar("Made")

AGAIN_S = [30.0, 60.0, 120.0, 300.0, 600.0]
"""Seconds after which a planner that has failed is asked again; the last ones repeat."""

GREEDY_S = 2.0
"""Seconds for the greedy walks; the first one is ended whatever it takes."""

FIRST_S, FACTOR = 1.0, 4.0
"""Seconds of the first solve where no greedy walk fits, and how much longer each further one is."""


def tell_of_better(found: Answer, before: Answer) -> None:
    """Say that training goes on by a better plan, and what that is worth in each step."""
    now, then = found.cost_ns or 0, before.cost_ns or 0
    more, was = (f"{100 * (answer.overhead or 0.0):+.1f} %" for answer in (found, before))
    saved = f"{duration(then - now)} less in each step" if then > now else "as much in each step"
    log.info("a better plan takes over from this step on: %s time in place of %s, %s", more, was, saved)


class Better(Generic[Made]):
    """A cheaper plan that is looked for while training goes on, and what is made of it at the start of a step.

    Only the answer comes from another thread. What is made of it may be lowered and compiled, which torch does by state
    that a thread has of its own: autocast, modes, hooks of saved tensors, settings.

    Args:
        pending: the planner's answer.
        worth: whether an answer is better than what training runs by.
        make: what is made of one that is; None: nothing, training goes on as it does.

    Attributes:
        over: nothing is to come: it has been taken, or there is nothing better.
    """

    def __init__(
        self,
        pending: Pending[Answer],
        coordinator: Coordinator,
        worth: Callable[[Answer], bool],
        make: Callable[[Answer], Made | None],
    ) -> None:
        self._pending, self._coordinator, self._worth, self._make = pending, coordinator, worth, make
        self._taking = threading.Lock()
        self.over = False

    def wait(self, seconds: float) -> Answer | None:
        """The better answer, once the planner has answered; for a job of one process.

        Raises:
            TimeoutError: it has not in so many seconds.
        """
        end = time.monotonic() + seconds
        while not self._pending.done():
            if time.monotonic() > end:
                raise TimeoutError(f"no answer in {seconds:g} s")
            time.sleep(0.01)
        return self.found()

    def found(self) -> Answer | None:
        """The better answer, where it is there; all processes of the job ask at the same step."""
        if not self._pending.done():
            return None
        answer = self._pending.result()
        return answer if answer is not None and self._worth(answer) else None

    def take(self, ready: bool = True) -> Made | None:
        """What is made of the better answer, once; None before it is there, and where nothing better comes.

        All processes of the job ask at the start of the same step, each in the thread that runs it, and go over
        together.

        Args:
            ready: whether this process may go over now.
        """
        if self.over or not self._taking.acquire(blocking=False):
            return None  # another thread that runs the same module takes it
        try:
            if not self._pending.done() or self._coordinator.least([int(ready)]) != [1]:
                return None
            self.over, made, answer = True, None, self.found()
            try:
                made = None if answer is None else self._make(answer)
            except Exception as error:  # noqa: BLE001 – no reason to stop training
                log.warning("no better plan came, training goes on by the quick one: %s", error)
            return made if self._coordinator.least([int(made is not None)]) == [1] else None
        finally:
            self._taking.release()


def quick_answer(problem: Problem, planner: Planner, options: SolveOptions, known: Sequence[Known] = ()) -> Answer:
    """An answer without waiting for the solver, if there is any way to have one.

    In this order: what the planner remembers on this machine; the plan of another size, verified on this one; the
    client's greedy plan. Where none fits, the first plan that a service finds, or the plan of the shortest local solve
    that has one: these solves grow up to the time limit, so that all of them take at most a third longer than the last.
    What the last one says where there is no plan is returned.

    Args:
        known: what was planned for other sizes, the latest last.

    Raises:
        RematError: as `planner`.
    """
    remembered = planner.remembered(problem, options) if isinstance(planner, FallbackPlanner) else None
    if remembered is not None and remembered.plan is not None:
        return remembered
    other = plan_of_another_size(problem, known)
    if other is not None:
        return other
    greedy = greedy_answer(problem, time_limit_s=GREEDY_S, max_gap=options.max_gap, look_s=GREEDY_S)
    return greedy if greedy.plan is not None else _first_answer(problem, planner, options)


def improved(
    problem: Problem,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    quick: Answer,
    make: Callable[[Answer], Made | None],
    on_progress: OnProgress | None = None,
) -> Better[Made]:
    """What `make` makes of the planner's answer, asked for while training goes on; nothing where it costs no less."""
    most, pauses = quick.cost_ns or 0, AGAIN_S.copy()
    alive: list[weakref.ref[Better[Made]]] = []

    def ask() -> Answer:
        if alive and alive[0]() is None:
            raise NotWanted
        answer = planner.asked.plan(problem, options, on_progress=on_progress)
        if stands_in(planner.asked, answer, options):
            raise AskAgain(pauses.pop(0) if len(pauses) > 1 else pauses[0])
        return answer

    def worth(answer: Answer) -> bool:
        return answer.plan is not None and (answer.cost_ns or 0) < most

    made = Better(planner.coordinator.later(problem, ask), planner.coordinator, worth, make)
    alive.append(weakref.ref(made))
    return made


def stands_in(planner: Planner, answer: Answer, options: SolveOptions) -> bool:
    """Whether a greedy plan, not known to be good enough, stands in for that of a planner that has failed.

    It is known in the process that has asked.
    """
    stood = isinstance(planner, FallbackPlanner) and answer.digest in planner.stood_in
    return stood and (answer.gap or 0) > options.max_gap


def _first_answer(problem: Problem, planner: Planner, options: SolveOptions) -> Answer:
    """The first answer with a plan, or what says that there is none."""
    first = planner.planners[0] if isinstance(planner, FallbackPlanner) and planner.planners else planner
    if isinstance(first, ServicePlanner):
        try:
            return first.first_plan(problem, options)
        except RematError as error:
            if not isinstance(planner, FallbackPlanner) or planner.strict:
                raise
            log.info("no first plan from the service, the others are asked: %s", error)
    seconds = 0.0
    while True:
        seconds = min(options.time_limit_s, max(FIRST_S, FACTOR * seconds))
        answer = planner.plan(problem, replace(options, time_limit_s=seconds))
        if answer.plan is not None or answer.status is Status.INFEASIBLE or seconds >= options.time_limit_s:
            return answer
