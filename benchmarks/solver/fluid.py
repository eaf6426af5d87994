"""The fluid replay: memory changes linearly while a transfer runs, as in Lemma 1 of the POFO supplement.

It knows nothing of the program whose schedules it times: the program is measured and tested against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from remat_ir import Chain, ChainStep, InvalidPlan, Verb
from remat_solver.offload.table import Schedule


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


def step_reads(step: ChainStep) -> tuple[int, ...]:
    """The cuts that a step reads on the device."""
    return (step.stage - 1, step.stage) if step.verb is Verb.B else (step.stage - 1,)


class Ledger:
    """The bytes on the device while steps run one by one, as the chain's replay counts them, transfers aside."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.stored: dict[int, bool] = {0: False}  # cut -> with its tape?
        self.gradient_bytes = 0

    def size(self, cut: int) -> int:
        """The bytes of what is stored at a cut."""
        return self.chain.tape_bytes[cut - 1] if self.stored[cut] else self.chain.activation_bytes[cut]

    def held(self, without: Iterable[int] = ()) -> int:
        """The bytes on the device between steps, leaving some cuts out of the count."""
        gone = frozenset(without)
        return sum(self.size(cut) for cut in self.stored if cut not in gone) + self.gradient_bytes

    def made(self, step: ChainStep) -> int:
        """The bytes that a step adds while it runs: what it makes, and its workspace."""
        chain, stage = self.chain, step.stage
        if step.verb is Verb.B:
            first = chain.gradient_bytes[stage] if stage == chain.stages else 0
            return first + chain.gradient_bytes[stage - 1] + chain.backward_workspace_bytes[stage - 1]
        if step.verb is Verb.F_ALL:
            return chain.tape_bytes[stage - 1] + chain.forward_workspace_bytes[stage - 1]
        return chain.activation_bytes[stage] + chain.untaped_workspaces[stage - 1]

    def run(self, step: ChainStep) -> None:
        """Let a step have run."""
        stage = step.stage
        if step.verb is Verb.B:
            self.gradient_bytes = self.chain.gradient_bytes[stage - 1]
            del self.stored[stage]
            if stage > 1 and not self.stored[stage - 1]:
                del self.stored[stage - 1]
            return
        self.stored[stage] = step.verb is Verb.F_ALL
        if step.verb is Verb.F_NONE:
            del self.stored[stage - 1]

    def time_ns(self, step: ChainStep) -> int:
        """How long a step runs."""
        times = self.chain.backward_ns if step.verb is Verb.B else self.chain.forward_ns
        return times[step.stage - 1]
