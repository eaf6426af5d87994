"""The fluid replay: memory changes linearly while a transfer runs, as in Lemma 1 of the POFO supplement."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from remat_ir import Chain, InvalidPlan

from .schedule import Ledger, Schedule, step_reads


class _Timed(NamedTuple):
    """A step as the fluid sees it: its time, the bytes that it needs besides the fluid, and what joins the fluid.

    A value leaves from the start of the step that reads it; it has come back by the start of the step that reads it,
    which seen from the end of the schedule is after that step.
    """

    time_ns: int
    need_bytes: int
    before_bytes: int = 0
    after_bytes: int = 0


def fluid_makespan(chain: Chain, budget_bytes: int, schedule: Schedule) -> Fraction:
    """The least makespan of a schedule in ns, with idle time wherever memory is short.

    In the forward phase the offloaded inputs leave at the rate of the link, first come first served; the backward phase
    is the same seen from its end, with prefetches as late as possible. Between the phases both queues run empty.

    Raises:
        InvalidPlan: a step does not fit even when everything that is moved has left.
    """
    forward, backward = _phases(chain, schedule)
    beta = Fraction(chain.link_bytes_per_s or 0, 1_000_000_000)
    total, rest = Fraction(0), Fraction(0)
    for steps in (forward, backward[::-1]):
        time, queue = _drained(steps, budget_bytes, beta)
        total, rest = total + time, rest + queue
    return total + (rest / beta if rest else 0)


def _drained(steps: list[_Timed], budget_bytes: int, beta: Fraction) -> tuple[Fraction, Fraction]:
    """The time of one phase, each step as soon as its memory is there, and what is left in the queue at its end."""
    time, queue = Fraction(0), Fraction(0)
    for step in steps:
        queue += step.before_bytes
        short = queue + step.need_bytes - budget_bytes
        if short > 0:
            # the inputs of a step must be there in whole, so its own cannot make room for it
            if step.need_bytes + step.before_bytes > budget_bytes or not beta:
                raise InvalidPlan(f"a step needs {step.need_bytes + step.before_bytes} bytes, inputs included")
            time += short / beta
            queue -= short
        time += step.time_ns
        queue = max(Fraction(0), queue - step.time_ns * beta) + step.after_bytes
    return time, queue


def _phases(chain: Chain, schedule: Schedule) -> tuple[list[_Timed], list[_Timed]]:
    ledger = Ledger(chain)
    away: set[int] = set()
    forward: list[_Timed] = []
    for step in schedule.forward:
        read, joins = step.stage - 1, 0
        if read in schedule.moved:
            away.add(read)
            joins = ledger.size(read)
        forward.append(_Timed(ledger.time_ns(step), ledger.held(away) + ledger.made(step), joins))
        ledger.run(step)
    backward: list[_Timed] = []
    for step in schedule.backward:
        back = sum(ledger.size(cut) for cut in step_reads(step) if cut in away)
        away.difference_update(step_reads(step))
        need = ledger.held(away) + ledger.made(step)
        backward.append(_Timed(ledger.time_ns(step), need, after_bytes=back))
        ledger.run(step)
    return forward, backward
