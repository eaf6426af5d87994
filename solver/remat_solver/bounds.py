"""Budgets seen at once: one that every plan needs, and one for which a plan is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_ir import Chain, Join, Subject, plain_peak
from remat_ir.greedy import least_memory, peak_of
from remat_ir.working_set import working_set

from .chain import Least
from .deadline import Deadline, TimeUp
from .kernels import loaded
from .search import least_plan

_SECONDS = 0.5


def least_need(subject: Subject) -> tuple[int, str]:
    """A lower bound on every budget that suffices, in bytes, and what it is that needs them."""
    if isinstance(subject, Join):
        slots = least_slots(subject.lengths, subject.stays)
        return slots * subject.slot_bytes, f"keeping the start and the end of every branch in {slots} slots"
    if not isinstance(subject, Chain):
        least = working_set(subject)
        return least.least_bytes, subject.op_label(least.op)
    count, least = subject.stages, working_set(replace(subject.to_graph(), fixed_bytes=subject.staying_bytes))
    if least.least_bytes < subject.fixed_bytes:
        return subject.fixed_bytes, "the input"
    who = f"forward stage {least.op + 1}" if least.op < count else f"backward stage {2 * count + 1 - least.op}"
    return least.least_bytes, who if least.op != count else "the first gradient"


def least_slots(lengths: Sequence[int], kept: Sequence[bool] = ()) -> int:
    """c_min, the fewest slots in which a join can be executed (RR-9273, Lemma 4).

    `kept` is b: whether the last gradient of each branch stays in memory; none does by default.
    """
    kept = kept or (False,) * len(lengths)
    if not any(lengths):
        return len(lengths)
    least = len(lengths) + sum(length != 0 for length in lengths)
    spared = 1 in lengths or any(length == 0 and not stays for length, stays in zip(lengths, kept, strict=True))
    return least if spared else least + 1


def known_budget(subject: Subject, stopped: Callable[[], bool] = lambda: False) -> int:
    """A budget in bytes for which a plan is known: of a chain, the least for a persistent schedule (RR-9302); of a
    join, its least slots (RR-9273, Lemma 4); of a graph, the least peak that a greedy plan and a quick search reach.
    """
    if isinstance(subject, Chain):
        try:
            return Least(subject, stop=stopped).budget_bytes
        except TimeUp:
            return plain_peak(subject)
    if isinstance(subject, Join):
        return least_slots(subject.lengths, subject.stays) * subject.slot_bytes
    watch = Deadline(_SECONDS)
    plan = least_memory(subject, stop=lambda: watch.passed() or stopped())
    if loaded() and not stopped():
        plan = least_plan(subject, least_need(subject)[0], plan, Deadline(_SECONDS), stopped)
    return peak_of(subject, plan)
