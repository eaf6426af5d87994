"""The staged proof as a method of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ..bounds import prove_by_pairs
from ..incumbent import Incumbent
from ..options import Options, flag, whole
from ..staged.prove import Proof
from .heuristics import polished, say_enough


@dataclass(frozen=True)
class StagedOptions(Options):
    """What the proof may use.

    `memory_bytes`: what its engine may use; 0 means half of what is free, but at least 1 GiB.
    `polish`: whether the local search makes plans of the relaxations' solutions.
    """

    polish: bool = flag()
    memory_bytes: int = whole(0)


def run_staged(incumbent: Incumbent, options: StagedOptions, spare: object = None) -> None:
    """Prove with coarse stages, refined where their solution breaks the memory."""
    if incumbent.plan is None:
        prove_by_pairs(incumbent)
        if incumbent.stopped():
            return
    say_enough(incumbent)
    polish = polished(incumbent) if options.polish else None
    proof = Proof(incumbent, polish=polish, memory_bytes=options.memory_bytes)
    proof.run()
    if proof.out_of_memory:
        incumbent.stop_for("memory")
    elif proof.out_of_time and not incumbent.stopped():
        incumbent.stop_for("time")
