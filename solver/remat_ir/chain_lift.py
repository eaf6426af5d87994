"""Between plans of a chain and plans of its lift to a graph: the same costs, and no more memory."""

from __future__ import annotations

from collections.abc import Iterable

from .chain import Chain
from .chain_plan import ChainPlan, ChainStep, Verb
from .plan import Compute, Drop, Free, Offload, Plan, Prefetch, Step, Wait

STEP_OF_VERB: dict[Verb, type[Offload] | type[Wait] | type[Drop] | type[Prefetch]] = {
    Verb.OFFLOAD: Offload,
    Verb.WAIT: Wait,
    Verb.DROP: Drop,
    Verb.PREFETCH: Prefetch,
}
"""The step of a graph's plan that does with a value what a verb does with what is stored at a cut."""


def lifted_plan(chain: Chain, plan: ChainPlan) -> Plan:
    """The plan of `chain.to_graph()` that does what a chain plan does, at the same cost and peak.

    With transfers it is one of `chain.to_graph().with_link(chain.link)`. A tape moves there as its values, one right
    after the other, so its copy may take some ns more where the bandwidth doesn't divide its bytes.
    """
    count = chain.stages
    steps: list[Step] = []
    taped: set[int] = set()
    for verb, stage in plan.steps:
        tape = chain.stage_values(stage)
        a, before = tape[0], chain.stage_values(stage - 1)[:1] if stage > 1 else ()
        found: tuple[Step, ...]
        if verb is Verb.F_ALL:
            taped.add(stage)
            found = (Compute(stage - 1, tape),)
        elif verb is Verb.F_CK:
            found = (Compute(stage - 1, (a,)),)
        elif verb is Verb.F_NONE:
            found = (Compute(stage - 1, (a,)), *map(Free, before))
        elif verb is Verb.FREE:
            found = (Free(a),)
        elif verb is Verb.B:
            taped.discard(stage)
            first = (Compute(count),) if stage == count else ()
            gradient = (len(tape) + 1) * count - stage
            dying = (gradient, *tape, *(before if stage - 1 not in taped else ()))
            found = (*first, Compute(2 * count + 1 - stage), *map(Free, dying))
        else:
            found = tuple(STEP_OF_VERB[verb](value) for value in (tape if stage in taped else (a,)))
        steps.extend(found)
    return Plan(tuple(steps))


def lowered_plan(chain: Chain, computes: Iterable[int]) -> ChainPlan:
    """The chain plan that computes the ops of `chain.to_graph()` in the order of a valid plan of that graph.

    It costs no more and its peak is no higher than that of any valid plan with these computes: a tape is worth keeping
    only from the last F^l before B^l on, since nothing but B^l reads it and any later F^l would make it anew; an
    activation is freed after its last use; a forward step that nothing reads is left out.
    """
    count = chain.stages
    order = [op for op in computes if op != count]
    stages = [op + 1 if op < count else 2 * count + 1 - op for op in order]
    readers = _readers(order, stages, count)
    steps: list[ChainStep] = []
    made: dict[int, int] = {0: -1}  # cut -> the position that made what is stored there
    for position, (op, stage) in enumerate(zip(order, stages, strict=True)):
        if op > count:
            steps.append(ChainStep(Verb.B, stage))
            continue
        if not readers[position]:
            continue
        taped = any(order[reader] == 2 * count + 1 - stage for reader in readers[position])
        source = made[stage - 1]
        done = stage > 1 and max(readers[source]) == position
        if taped:
            steps.append(ChainStep(Verb.F_ALL, stage))
            steps.extend([ChainStep(Verb.FREE, stage - 1)] if done else ())
        else:
            steps.append(ChainStep(Verb.F_NONE if done else Verb.F_CK, stage))
        made[stage] = position
    return ChainPlan(tuple(steps))


def _readers(order: list[int], stages: list[int], count: int) -> list[list[int]]:
    """[positions] where each forward instance is read by a step that is itself read, found from the end."""
    readers: list[list[int]] = [[] for _ in order]
    made: dict[int, int] = {}
    sources: list[tuple[int, ...]] = []
    for position, (op, stage) in enumerate(zip(order, stages, strict=True)):
        before = (made[stage - 1],) if stage > 1 else ()
        sources.append(before if op < count else (*before, made[stage]))
        if op < count:
            made[stage] = position
    for position in reversed(range(len(order))):
        if order[position] > count or readers[position]:
            for source in sources[position]:
                readers[source].append(position)
    return readers
