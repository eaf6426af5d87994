"""A schedule of a chain before its transfers have a place: the two phases, and which saved inputs move to the host."""

from __future__ import annotations

from collections.abc import Iterable
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
