"""Whether any schedule of a chain fits a budget, persistent or not: a search of all that can be in memory.

Where memory is so short that no persistent schedule fits, few sets of values fit either, so they can all be visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat_ir import Chain, ChainPlan, ChainStep, Verb

from ..deadline import never

MOST_STATES = 120_000
"""States that are visited before the search gives up: some four seconds."""

State = tuple[int, int, int, int]
"""Forward stages reached, the next backward stage, and the cuts with an activation only, and with a tape, as bits."""


@dataclass(frozen=True)
class Reach:
    """What a search found.

    Attributes:
        plan: a plan that fits, or None.
        proved: whether all states were visited: without a plan, none fits then.
        least_bytes: where none fits, the least that any plan needs.
    """

    plan: ChainPlan | None
    proved: bool
    least_bytes: int = 0


def reach(
    chain: Chain, budget_bytes: int, stopped: Callable[[], bool] = never, most_states: int = MOST_STATES
) -> Reach:
    """Look for a plan without transfers that fits a budget, depth first, the backward steps preferred.

    Every step of a plan leads from one state to another; discarding is a step of its own. A tape is discarded by its
    backward step only: one that is dropped before need not have been made. The least need of a step that did not fit,
    from any state that can be reached, is one that no plan avoids.
    """
    start: State = (0, chain.stages, 0, 0)
    came: dict[State, tuple[State, ChainStep] | None] = {start: None}
    stack = [start]
    refused = 1 << 62
    while stack:
        state = stack.pop()
        if state[1] == 0:
            return Reach(_path(came, state), True)
        if len(came) > most_states or (len(came) & 1023 == 0 and stopped()):
            return Reach(None, False)
        for need, step, after in _steps(chain, state):
            if need > budget_bytes:
                refused = min(refused, need)
            elif after not in came:
                came[after] = (state, step)
                stack.append(after)
    return Reach(None, True, refused)


def _path(came: dict[State, tuple[State, ChainStep] | None], state: State) -> ChainPlan:
    steps: list[ChainStep] = []
    while (before := came[state]) is not None:
        state, step = before
        steps.append(step)
    return ChainPlan(tuple(reversed(steps)))


def _steps(chain: Chain, state: State) -> Iterator[tuple[int, ChainStep, State]]:
    """What can follow a state, with the memory while it runs; what leads on comes last."""
    reached, following, plain, taped = state
    stored = plain | taped | 1
    memory = chain.activation_bytes[0] + (chain.gradient_bytes[following] if following < chain.stages else 0)
    for cut in range(1, chain.stages + 1):
        if plain >> cut & 1:
            memory += chain.activation_bytes[cut]
            yield 0, ChainStep(Verb.FREE, cut), (reached, following, plain & ~(1 << cut), taped)
        elif taped >> cut & 1:
            memory += chain.tape_bytes[cut - 1]
    # after B^l nothing reads what lies beyond l
    for stage in range(1, min(reached + 1, following) + 1):
        if stored >> stage & 1 or not stored >> (stage - 1) & 1:
            continue
        after = max(reached, stage)
        made = memory + chain.activation_bytes[stage] + chain.untaped_workspaces[stage - 1]
        if stage < following or reached < stage:
            yield made, ChainStep(Verb.F_CK, stage), (after, following, plain | 1 << stage, taped)
        made = memory + chain.tape_bytes[stage - 1] + chain.forward_workspace_bytes[stage - 1]
        yield made, ChainStep(Verb.F_ALL, stage), (after, following, plain, taped | 1 << stage)
    stage = following
    if reached == chain.stages and taped >> stage & 1 and stored >> (stage - 1) & 1:
        first = chain.gradient_bytes[stage] if stage == chain.stages else 0
        need = memory + first + chain.gradient_bytes[stage - 1] + chain.backward_workspace_bytes[stage - 1]
        rest = (plain & ~(1 << (stage - 1))) & ~1, taped & ~(1 << stage)
        yield need, ChainStep(Verb.B, stage), (reached, stage - 1, *rest)
