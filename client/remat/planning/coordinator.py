"""What the processes of one training job agree on before they plan, and what one process does alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from remat_ir import Answer, Problem

from .profiles import ProfileTable

log = logging.getLogger("remat")

T = TypeVar("T")
Made = TypeVar("Made", covariant=True)

_ASKING = threading.Semaphore(2)
"""Of many problems that wait for better plans, so many are asked for at once."""


class Pending(Protocol[Made]):
    """Something that is still being looked for, such as a future."""

    def done(self) -> bool:
        """Whether it has been found, or will not be; asked at the start of each step."""
        ...

    def result(self) -> Made | None:
        """What was made, or None: there is nothing better."""
        ...


class Coordinator:
    """What is agreed on among the processes of a job: costs, numbers, answers, and when a better plan takes over.

    Every process makes the same calls in the same order. This one is that of a job which is one process, or whose
    processes plan each for itself, and says nothing to others; see `remat.distributed.Ranks`.

    Attributes:
        in_step: whether other processes wait for each call, so that none may be left out or made from another thread.
        first: whether this is the process that measures, asks and reports for all.

    Example:
        >>> Coordinator().in_step, Coordinator().most([3, 1])
        (False, [3, 1])
    """

    in_step = False
    first = True

    def table(self, own: ProfileTable) -> ProfileTable:
        """The table of measured costs that all processes read and write, where this one's own is `own`."""
        return own

    def costs(self, own: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Measured numbers by name, the same in every process.

        Where the numbers of another process have other lengths, it keeps its own: the processes' problems differ, which
        `same` and `answer` find out.
        """
        return {name: list(numbers) for name, numbers in own.items()}

    def same(self, problem: Problem) -> None:
        """See to it that all processes pose the same problem.

        Raises:
            RanksDiffer: they do not.
        """

    def answer(self, problem: Problem, ask: Callable[[], Answer]) -> Answer:
        """One answer to a problem that all processes pose; `ask` is called in one of them.

        Raises:
            RanksDiffer: they do not pose the same problem.
            RematError: there is no answer.
        """
        return ask()

    def later(self, problem: Problem, ask: Callable[[], Answer]) -> Pending[Answer]:
        """An answer that is asked for while training goes on, for all processes at the same step; None: there is none.

        Args:
            ask: called in a thread of one process; it must not speak with the others, nor call torch.
        """

        def work() -> Answer | None:
            try:
                return patiently(ask)
            except NotWanted:
                return None
            except Exception as error:  # noqa: BLE001 – the planner's trouble is no reason to stop training
                log.warning("no better plan came, training goes on by the quick one: %s", error)
                return None

        return in_thread(work)

    def awaited(self, make: Callable[[], T]) -> Callable[[], T]:
        """What gives what `make` returns, or raises, once it has ended in every process, however long that takes.

        Args:
            make: it must not speak with the other processes, nor call torch: it may be called in a thread.
        """
        return make

    def share(self, make: Callable[[], T]) -> T:
        """What `make` returns in one process, in all of them, as JSON has it: tuples become lists.

        Raises:
            RematError: `make` raised there.
        """
        return make()

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Of each of the numbers, the least that a process has."""
        return list(numbers)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Of each of the numbers, the most that a process has."""
        return list(numbers)


class AskAgain(Exception):
    """Nobody has answered as well as the planner that was asked first is expected to.

    Attributes:
        seconds: after which it is asked again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it is asked again in {seconds:g} s")
        self.seconds = seconds


class NotWanted(Exception):
    """Nothing trains any more by what is asked for: its module has gone, or its plan has made way for other sizes."""


def patiently(ask: Callable[[], Answer]) -> Answer:
    """The answer, asked for again as often as `ask` says; others may ask meanwhile."""
    while True:
        with _ASKING:
            try:
                return ask()
            except AskAgain as error:
                pause = error.seconds
        time.sleep(pause)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of work done in a thread that does not keep the process."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 – raised where the result is asked for
            found.set_exception(error)

    threading.Thread(target=run, name="remat-planner", daemon=True).start()
    return found
