"""The optimal schedule of a small chain by search over all its states, straight from the papers' Table 1."""

from __future__ import annotations

from collections.abc import Iterator

from remat_ir import Chain
from solver.shortest import shortest

State = tuple[int, int, frozenset[tuple[int, str]]]  # forward steps reached, next backward step, what is stored


def best_cost(chain: Chain, budget: int, *, persistent: bool = True, tapes: bool = True) -> int | None:
    """The least cost of any schedule within a budget, or None (Dijkstra over states).

    `persistent`: what a forward step left in memory as its input stays until its backward step (RR-9302, Section 4.1);
    otherwise it may be discarded at any time. Without `tapes`, F_all^l runs only when B^l is next.
    """
    start: State = (0, chain.stages, frozenset())
    found = shortest(
        start,
        lambda state: ((None, *move) for move in _moves(chain, budget, state, persistent, tapes)),
        lambda state: state[1] == 0,
    )
    return None if found is None else found[0]


def _moves(chain: Chain, budget: int, state: State, persistent: bool, tapes: bool) -> Iterator[tuple[int, State]]:
    reached, following, stored = state
    kinds = dict(stored)  # cut -> "a": an activation in passing, "c": one that is checkpointed, "t": a tape
    held = {0: "c", **kinds}
    memory = chain.activation_bytes[0]
    memory += sum(chain.tape_bytes[cut - 1] if kind == "t" else chain.activation_bytes[cut] for cut, kind in stored)
    memory += chain.gradient_bytes[following] if following < chain.stages else 0
    for stage in range(1, min(reached + 1, chain.stages) + 1):
        if stage in held or stage - 1 not in held:
            continue
        room = budget - memory - chain.forward_workspace_bytes[stage - 1]
        without = budget - memory - (chain.untaped_workspace_bytes or chain.forward_workspace_bytes)[stage - 1]
        after = max(reached, stage)
        keeping = stored if stage == 1 or held[stage - 1] == "t" else stored - {(stage - 1, "a")} | {(stage - 1, "c")}
        if chain.tape_bytes[stage - 1] <= room and (
            tapes or (stage == following and reached == chain.stages) or stage == chain.stages
        ):
            yield chain.forward_ns[stage - 1], (after, following, keeping | {(stage, "t")})
        if chain.activation_bytes[stage] <= without:
            yield chain.forward_ns[stage - 1], (after, following, keeping | {(stage, "a")})
            if stage > 1 and (held[stage - 1] == "a" or (held[stage - 1] == "c" and not persistent)):
                yield (
                    chain.forward_ns[stage - 1],
                    (after, following, stored - {(stage - 1, held[stage - 1])} | {(stage, "a")}),
                )
    stage = following
    if reached == chain.stages and held.get(stage) == "t" and stage - 1 in held:
        incoming = chain.gradient_bytes[stage] if stage == chain.stages else 0
        during = memory + incoming + chain.gradient_bytes[stage - 1] + chain.backward_workspace_bytes[stage - 1]
        if during <= budget:
            gone = {(stage, "t")} | ({(stage - 1, held[stage - 1])} if held[stage - 1] != "t" else set())
            yield chain.backward_ns[stage - 1], (reached, stage - 1, stored - gone)
    if not persistent:
        for cut, kind in stored:
            if kind != "t":
                yield 0, (reached, following, stored - {(cut, kind)})
