"""A schedule of a chain before its transfers have a place: the two phases, and which saved inputs move to the host."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import Chain, ChainStep, Verb


@dataclass(frozen=True)
class Schedule:
    """What the program decides (POFO supplement, Appendix B).

    Attributes:
        forward: the forward phase, up to F_all^L.
        backward: the backward phase, from B^L on, recomputations included.
        moved: cuts l whose saved value, ā^l or a^l, is offloaded from the forward step l + 1 on, and comes back for the
            first step of the backward phase that reads it.
    """

    forward: tuple[ChainStep, ...]
    backward: tuple[ChainStep, ...]
    moved: frozenset[int]


def moved_bytes(chain: Chain, schedule: Schedule) -> int:
    """What the host holds between the phases, when all that is moved is there."""
    taped = {step.stage for step in schedule.forward if step.verb is Verb.F_ALL}
    return sum(chain.tape_bytes[cut - 1] if cut in taped else chain.activation_bytes[cut] for cut in schedule.moved)
