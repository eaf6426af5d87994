"""A plan of a chain: forward steps that keep all, the input or nothing, backward steps, and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from .chain import Chain
from .errors import InvalidData
from .plan import plan_document
from .read import kind

FORMAT = "remat-chain-plan/1"


class Verb(StrEnum):
    """What a step of a chain plan does with stage or cut l (RR-9302, Table 1; transfers and `free` are ours).

    F_ALL: compute a^l and its whole tape ā^l; the input stays.
    F_CK: compute a^l; the input a^(l−1) stays.
    F_NONE: compute a^l; the input a^(l−1) is freed.
    B: compute δ^(l−1) from δ^l, ā^l and a^(l−1); frees all of them, but not an a^(l−1) whose tape is there.
    FREE: free a^l, whose tape is not there.
    OFFLOAD: start the copy of what is stored at l (ā^l, or else a^l) to the host; it stays charged.
    WAIT: block until the running transfer of what is stored at l has ended.
    DROP: free the device copy of what is stored at l, whose offload has ended and been waited for.
    PREFETCH: start the copy back; charged from here on, usable after WAIT.
    """

    F_ALL = "F_all"
    F_CK = "F_ck"
    F_NONE = "F_none"
    B = "B"
    FREE = "free"
    OFFLOAD = "offload"
    WAIT = "wait"
    DROP = "drop"
    PREFETCH = "prefetch"


TRANSFERS = frozenset((Verb.OFFLOAD, Verb.WAIT, Verb.DROP, Verb.PREFETCH))
"""The steps that need a link to the host."""


class ChainStep(NamedTuple):
    """One step on stage or cut `stage`, counted from 1."""

    verb: Verb
    stage: int


@dataclass(frozen=True)
class ChainPlan:
    """The steps of one training step of a chain, in order (`remat-chain-plan/1`)."""

    steps: tuple[ChainStep, ...]

    def to_json(self) -> dict[str, Any]:
        """The `remat-chain-plan/1` object."""
        return {"format": FORMAT, "steps": [[step.verb.value, step.stage] for step in self.steps]}

    @classmethod
    def from_json(cls, data: object) -> ChainPlan:
        """Read a `remat-chain-plan/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names the step.
        """
        rows = plan_document(FORMAT).read(data)["steps"]
        return cls(tuple(_read_step(row, i) for i, row in enumerate(rows)))


def _read_step(row: object, i: int) -> ChainStep:
    here = f"/steps/{i}"
    if not isinstance(row, (list, tuple)) or len(row) != 2:
        raise InvalidData(f"step {i} must be [verb, stage]", here)
    verb, stage = row
    if type(stage) is not int or stage < 1:
        raise InvalidData(f"step {i}: the stage must be an integer from 1, not {kind(stage)}", here + "/1")
    if not isinstance(verb, str) or verb not in Verb._value2member_map_:
        what = repr(verb) if isinstance(verb, str) else kind(verb)
        raise InvalidData(f"step {i}: unknown verb {what}", here + "/0")
    return ChainStep(Verb(verb), stage)


def plain_chain_plan(chain: Chain) -> ChainPlan:
    """Every forward step once with its tape, then every backward step: training without rematerialization."""
    stages = range(1, chain.stages + 1)
    forward = tuple(ChainStep(Verb.F_ALL, stage) for stage in stages)
    return ChainPlan(forward + tuple(ChainStep(Verb.B, stage) for stage in reversed(stages)))
