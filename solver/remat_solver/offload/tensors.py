"""From a schedule to a plan: each transfer gets its place, whole tensors are charged until their transfer has ended."""

from __future__ import annotations

from itertools import accumulate

from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Verb

from .schedule import Ledger, Schedule, step_reads


def tensor_plan(chain: Chain, budget_bytes: int, schedule: Schedule) -> ChainPlan:
    """The plan that fits the budget tensor by tensor, with as little idle time as one pass finds.

    An offload starts with the forward step that reads the value; its device copy is dropped once the copy has ended, or
    is waited for where a step would not fit otherwise. A prefetch starts as late as it can without making the step that
    reads the value wait, and as early as memory lets it.

    Raises:
        InvalidPlan: a step does not fit even with everything that is moved on the host.
    """
    ledger = Ledger(chain)
    forward, away = _forward(chain, budget_bytes, schedule, ledger)
    return ChainPlan((*forward, *_backward(chain, budget_bytes, schedule, ledger, away)))


def _forward(chain: Chain, budget_bytes: int, schedule: Schedule, ledger: Ledger) -> tuple[list[ChainStep], list[int]]:
    steps: list[ChainStep] = []
    leaving: list[tuple[int, int]] = []  # cut, when its offload ends; in the order of the link
    away: list[int] = []
    now = link_free = 0

    def drop_first() -> None:
        nonlocal now
        cut, end = leaving.pop(0)
        now = max(now, end)
        steps.extend((ChainStep(Verb.WAIT, cut), ChainStep(Verb.DROP, cut)))
        away.append(cut)

    for step in schedule.forward:
        read = step.stage - 1
        while leaving and (leaving[0][1] <= now or ledger.held(away) + ledger.made(step) > budget_bytes):
            drop_first()
        if ledger.held(away) + ledger.made(step) > budget_bytes:
            raise InvalidPlan(f"{step.verb.value} {step.stage} does not fit {budget_bytes} bytes")
        if read in schedule.moved:
            steps.append(ChainStep(Verb.OFFLOAD, read))
            link_free = max(now, link_free) + chain.transfer_ns(ledger.size(read))
            leaving.append((read, link_free))
        steps.append(step)
        ledger.run(step)
        now += ledger.time_ns(step)
    while leaving:
        drop_first()
    return steps, away


def _backward(chain: Chain, budget_bytes: int, schedule: Schedule, ledger: Ledger, away: list[int]) -> list[ChainStep]:
    """Place the prefetches: the value read last first, so that each is as late as those after it allow."""
    steps = schedule.backward
    uses = {cut: next(p for p, step in enumerate(steps) if cut in step_reads(step)) for cut in away}
    order = sorted(away, key=lambda cut: (uses[cut], cut))
    sizes = {cut: ledger.size(cut) for cut in away}
    room, times = [], []
    for position, step in enumerate(steps):
        gone = [cut for cut in away if uses[cut] > position]
        room.append(budget_bytes - ledger.held(gone) - ledger.made(step))
        times.append(ledger.time_ns(step))
        ledger.run(step)
        if room[-1] < 0:
            raise InvalidPlan(f"{step.verb.value} {step.stage} does not fit {budget_bytes} bytes")
    begins = [0, *accumulate(times)]
    starts: dict[int, int] = {}
    link_free = begins[-1]  # seen from the end: when the transfers placed so far begin
    for cut in reversed(order):
        position = uses[cut]
        latest = min(begins[position], link_free) - chain.transfer_ns(sizes[cut])
        while position > 0 and begins[position] > latest and room[position - 1] >= sizes[cut]:
            position -= 1
        # the steps from here to the use hold the value too
        for p in range(position, uses[cut]):
            room[p] -= sizes[cut]
        starts[cut], link_free = position, min(link_free, begins[position])
    out: list[ChainStep] = []
    for position, step in enumerate(steps):
        out += (ChainStep(Verb.PREFETCH, cut) for cut in order if starts[cut] == position)
        out += (ChainStep(Verb.WAIT, cut) for cut in order if uses[cut] == position)
        out.append(step)
    return out
