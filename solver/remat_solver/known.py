"""Budgets that are known to suffice: what an answer names when the one asked for is too small."""

from __future__ import annotations

from remat_ir import Chain, Join, Subject
from remat_ir.greedy import least_memory, peak_of

from .bounds import least_slots
from .chain import Least
from .deadline import Deadline

_SECONDS = 0.5


def known_budget(subject: Subject) -> int:
    """A budget in bytes for which a plan is known: of a chain, the least for a persistent schedule (RR-9302); of a
    join, its least slots (RR-9273, Lemma 4); of a graph, the peak of a greedy plan.
    """
    if isinstance(subject, Chain):
        return Least(subject).budget_bytes
    if isinstance(subject, Join):
        return least_slots(subject.lengths) * subject.slot_bytes
    return peak_of(subject, least_memory(subject, stop=Deadline(_SECONDS).passed))
