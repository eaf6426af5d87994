"""The methods for a chain with a link: the offload-and-recompute program, two baselines, and a bound over all plans.

The host's limit, which the program has no state for, is a price of moves, and the right one is looked for. Each copy of
a schedule gets its place in a plan: whole tensors count until their copy has ended.

The bound is on the makespan of every plan, with transfers and recomputations of any kind. When B^l starts, each earlier
stage either has its tape somewhere, on the device or on the host, or is computed again afterwards. What is on the host
has been carried out before, and is carried back after. Fractions of a tape are allowed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Problem, Verb, plain_chain_plan

from ..chain.rotor import MOST_STAGES, RotorOptions, rotor
from ..chain.table import Least
from ..deadline import TimeUp, look, never
from ..incumbent import Incumbent
from ..options import Options, whole
from ..placement import moved_plan, placed, pruned, saved, stored
from .table import OffloadTable, Schedule, moved_bytes, states

COARSE = 25
"""Slots of the first tables where the host has a limit: each price takes a table."""

FREE = (0.0, 0.0)
"""The prices before any was tried."""

_HALVINGS = 10
_HALVINGS_AROUND = 4


@dataclass
class Priced:
    """The schedules of one table, at the prices that its moves may have (`OffloadTable`).

    Where a schedule moves hardly less than the host holds, little is lost.

    Attributes:
        prices: the lowest and the highest to try, or `FREE` to look through all; in the end those for a finer table.
        stop: asked while a table is filled, which `TimeUp` then ends.
        found: whether there was a schedule, which is the same at any price.
    """

    chain: Chain
    budget_bytes: int
    slots: int
    nearest: bool
    prices: tuple[float, float]
    stop: Callable[[], bool]
    found: bool = False

    def schedules(self) -> Iterator[Schedule]:
        """The best schedule; where it moves more than the host holds, those that do not, at prices ever closer."""
        found = self._at(0.0)
        self.found = found is not None
        if found is None or self._fits(found):
            self.prices = FREE
            if found is not None:
                yield found
            return
        halvings, (low, high) = _HALVINGS_AROUND, self.prices
        if self.prices == FREE:
            # above the highest, the least move costs more than everything else could gain
            high = float(self.chain.total_cost_ns * self.chain.stages)
            halvings, low = _HALVINGS, high / 2.0**60
        for _ in range(halvings):
            middle = (low * high) ** 0.5
            found = self._at(middle)
            if found is not None and self._fits(found):  # a price makes nothing impossible: there is one
                high = middle
                yield found
            else:
                low = middle
        self.prices = low / 16, high * 16

    def _at(self, price: float) -> Schedule | None:
        return OffloadTable(
            self.chain, self.budget_bytes, self.slots, nearest=self.nearest, price=price, stop=self.stop
        ).schedule()

    def _fits(self, schedule: Schedule) -> bool:
        limit = self.chain.host_bytes
        return limit is None or moved_bytes(self.chain, schedule) <= limit


def repaired_plan(problem: Problem, schedule: Schedule, stop: Callable[[], bool] = never) -> ChainPlan:
    """The plan of a schedule, or of one that moves other values and fits the budget and the host's limit.

    Sizes that were rounded to the nearest slot may promise too much. Values that stay are moved too, the largest first,
    until the plan fits; then those are kept after all whose move turns out to be no gain, until `stop` says so.

    Raises:
        InvalidPlan: it does not fit even with everything moved that can be.
        TimeUp: `stop` said so before there was a plan that fits.
    """
    chain = problem.subject
    assert isinstance(chain, Chain)
    taped = {step.stage for step in schedule.forward if step.verb is Verb.F_ALL}

    def size(cut: int) -> int:
        return chain.tape_bytes[cut - 1] if cut in taped else chain.activation_bytes[cut]

    held = {step.stage - 1 for step in schedule.forward if step.verb is not Verb.F_NONE}
    staying = sorted(held.intersection(chain.movable) - schedule.moved, key=lambda cut: (-size(cut), cut))
    steps, table = stored(chain, (*schedule.forward, *schedule.backward))
    for more in range(len(staying) + 1):
        if more:
            look(stop)
        cuts = schedule.moved | frozenset(staying[:more])
        moved = [gap for gap in saved(table) if steps[gap.value].stage in cuts]
        found = placed(problem, table, moved)
        if found is not None:
            better, _ = pruned(problem, table, moved, found, stop)
            return moved_plan(steps, better.plan)
    raise InvalidPlan("it does not fit even with everything moved that can be")


MOST_SLOTS = 200
ENOUGH_SLOTS = 50
"""Beyond which the supplement sees no practical improvement (B.4)."""
MOST_TABLE_BYTES = 2**31
_MOST_MOVED = 128
"""Stages up to which moves alone are tried: each value is tried without in turn, in time linear in the plan."""


@dataclass(frozen=True)
class PofoOptions(Options):
    """`slots`: N_GPU, how finely memory is cut at most; `ENOUGH_SLOTS` are tried first, then more as long as the time
    that the next number would take is left.
    """

    slots: int = whole(MOST_SLOTS, 1, MOST_SLOTS)


def pofo(incumbent: Incumbent, options: PofoOptions) -> None:
    """Offer the plan of the offload-and-recompute program, made to fit tensor by tensor; without a link, rotor's.

    The program is optimal in its fluid model over its own schedules, in slots; the answer claims the makespan of whole
    tensors. Sizes are rounded up to slots, and then to the nearest, where errors mostly cancel but a plan may have to
    be repaired until it fits. The bound is one over all plans. With a limit on the host's memory, rotor's plan comes
    first, and moves are priced so that they stay within it.
    """
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    if chain.link_bytes_per_s is None:
        rotor(incumbent, RotorOptions())
        return
    budget = incumbent.problem.budget_bytes
    incumbent.raise_bound(makespan_bound(chain, budget, incumbent.stopped), "offload-bound")
    if chain.stages <= MOST_STAGES:
        with contextlib.suppress(TimeUp):
            incumbent.suffices(Least(chain, stop=incumbent.stopped).budget_bytes)
    if chain.stages <= _MOST_MOVED:
        _offer_moves(incumbent, chain)
    most = affordable_slots(chain.stages, options.slots)
    prices, sizes = FREE, coarser(most)
    if chain.host_bytes is not None:
        alone = Incumbent(
            Problem(replace(chain, link_bytes_per_s=None, host_bytes=None, input_may_leave=False), budget),
            incumbent.deadline,
            dropped=incumbent.dropped,
        )
        rotor(alone, RotorOptions())  # needs no host; its bound holds without transfers only
        if isinstance(alone.plan, ChainPlan):
            incumbent.offer(alone.plan, "rotor")
        sizes = (min(most, COARSE), *(n for n in sizes if n > COARSE))
    reason, deadline, pace = "", incumbent.deadline, 0.0
    for slots, nearest in ((n, how) for n in sizes for how in (False, True)):
        # a table is of no use before it is filled, and its time grows with the cube of its slots
        if pace * slots**3 > deadline.remaining():
            break
        began = deadline.elapsed()
        search = Priced(chain, budget, slots, nearest, prices, incumbent.stopped)
        try:
            for schedule in search.schedules():
                try:
                    incumbent.try_offer(repaired_plan(incumbent.problem, schedule, incumbent.stopped), "pofo")
                except InvalidPlan as error:
                    reason = f"The plan does not fit: {error.reason}."
                if incumbent.stopped():
                    return
        except TimeUp:
            return
        if not search.found:
            reason = reason or f"Nothing fits in {slots} slots."
        prices, pace = search.prices, (deadline.elapsed() - began) / slots**3
    if incumbent.cost_ns is None:
        incumbent.ends_without_plan(reason)


def _offer_moves(incumbent: Incumbent, chain: Chain) -> None:
    """Offer the plan that recomputes nothing and moves what memory asks for: no program, and not seldom the best."""
    plain = plain_chain_plan(chain).steps
    everything = Schedule(plain[: chain.stages], plain[chain.stages :], frozenset(chain.movable))
    with contextlib.suppress(InvalidPlan, TimeUp):
        incumbent.try_offer(repaired_plan(incumbent.problem, everything, incumbent.stopped), "pofo")


def coarser(slots: int) -> tuple[int, ...]:
    """The numbers of slots to try up to N: finer slots can round to a worse plan, and the best one is kept.

    >>> coarser(30), coarser(200)
    ((30,), (50, 100, 150, 200))
    """
    return (*range(ENOUGH_SLOTS, slots, ENOUGH_SLOTS), slots)


def affordable_slots(stages: int, slots: int) -> int:
    """N, or less where the tables would not fit: LN³ / 3 and L²N² entries of eight bytes."""
    while slots > 1 and 16 * (stages + 1) * states(slots) + 4 * stages**2 * (slots + 1) ** 2 > MOST_TABLE_BYTES:
        slots -= 1
    return slots


def save_on_cpu(incumbent: Incumbent) -> None:
    """Offer the plan that moves every saved value and waits for each transfer, as save-on-CPU hooks do: a baseline."""
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    steps: list[ChainStep] = []
    for stage in range(1, chain.stages + 1):
        steps.append(ChainStep(Verb.F_ALL, stage))
        if stage - 1 in chain.movable:
            steps += (ChainStep(verb, stage - 1) for verb in (Verb.OFFLOAD, Verb.WAIT, Verb.DROP))
    for stage in range(chain.stages, 0, -1):
        if stage - 1 in chain.movable:
            steps += (ChainStep(verb, stage - 1) for verb in (Verb.PREFETCH, Verb.WAIT))
        steps.append(ChainStep(Verb.B, stage))
    incumbent.offer_or_say(ChainPlan(tuple(steps)), "save-on-cpu")


def makespan_bound(chain: Chain, budget_bytes: int, stop: Callable[[], bool] = never) -> int:
    """The largest bound in ns of any backward step of the chain; where `stop` says so, of those looked at so far."""
    stages = chain.stages
    step = max(1, stages // 60)
    bound = chain.total_cost_ns
    for stage in range(stages, 0, -step):
        if stop():
            break
        bound = max(bound, _at_backward(chain, budget_bytes, stage))
    return bound


def _at_backward(chain: Chain, budget_bytes: int, stage: int) -> int:
    """The bound by what must be in memory when the backward step of a stage starts.

    X bytes on the host take X / β out before, while all forward steps and the later backward steps run, and X / β back
    after, while the other backward steps and the recomputations run. The sum of the two is convex in X, and linear
    between the points at which another tape begins to be held or one of the transfers begins to be what takes longer.
    """
    assert chain.link_bytes_per_s is not None
    seconds = Fraction(1_000_000_000, chain.link_bytes_per_s)  # ns per byte
    held = chain.tape_bytes[stage - 1] + chain.gradient_bytes[stage] + chain.gradient_bytes[stage - 1]
    room = budget_bytes - chain.fixed_bytes - held - chain.backward_workspace_bytes[stage - 1]
    before = sum(chain.forward_ns) + sum(chain.backward_ns[stage:])
    after = sum(chain.backward_ns[:stage])
    # what saves most time a byte is held first
    order = sorted(
        zip(chain.tape_bytes[: stage - 1], chain.forward_ns[: stage - 1], strict=True),
        key=lambda tape: (Fraction(tape[1], tape[0]) if tape[0] else math.inf, tape[1]),
        reverse=True,
    )
    again = sum(time for _, time in order)
    totals: list[Fraction] = []
    capacity, known = Fraction(0), Fraction(again)
    for size, time in [(0, 0), *order]:
        rate = Fraction(time, size) if size else Fraction(0)
        start, again_start = capacity, known
        capacity, known = capacity + size, known - time
        # within this tape: held = start + y, recomputed = again_start − rate·y, on the host X = held − room
        points = [Fraction(0), Fraction(size)]
        points += [room - start, Fraction(before) / seconds + room - start]
        if seconds + rate:
            points.append((after + again_start - seconds * (start - room)) / (seconds + rate))
        for y in points:
            if 0 <= y <= size:
                carried = max(Fraction(0), start + y - room) * seconds
                left = after + (again_start - rate * y if size else known)
                totals.append(max(Fraction(before), carried) + max(left, carried))
    return math.ceil(min(totals))
