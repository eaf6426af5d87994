"""Names of the restricted spaces that a search may be confined to, as they appear in `Answer.restricted_to`.

The whole space is: the fixed op order, any number of recomputations, any subset of outputs kept at each computation.
A bound proved inside a restriction is a bound there only, and never leaves it. Several names together mean the
intersection of their spaces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .chain import TRANSFERS, Chain, ChainPlan, Verb
from .graph import Graph
from .plan import Compute, Free, Plan
from .problem import AnyPlan, Subject
from .tags import is_tagged

ONE_PER_STAGE = "one-recomputation-per-stage"
"""Between the first computations of two successive ops, each op is recomputed at most once, and in op order (Checkmate,
Section 4.2)."""


def recomputations_per_stage(sweeps: int) -> str:
    """The name of the space of `sweeps` such passes between two first computations (Checkmate, Section 4.10)."""
    return ONE_PER_STAGE if sweeps == 1 else f"{sweeps}-recomputations-per-stage"


FORWARD_OPS = "forward-ops-in-backward-stages"
"""Only ops before `backward_from` are recomputed, and only once all of them have run."""

PERSISTENT = "persistent-schedules"
"""A saved value stays until its backward op has used it (RR-9302, Section 4.1)."""

NO_TRANSFERS = "no-transfers"
"""Nothing is moved to the host, although the graph or the chain has a link."""

CHAIN_STAGES = "chain-stages"
"""A linear network is taken as a chain: a stage holds what leads in, and its tape, until its backward part ends."""

TAGS = "tags"
"""Each forward op is saved or computed again once, where torch puts it: just before its first use in the backward pass,
held to its last (`remat_ir.tags`)."""

_SWEEPS = re.compile(r"(\d+)-recomputations-per-stage")
_PHRASES = {
    ONE_PER_STAGE: "with at most one recomputation per op and stage",
    FORWARD_OPS: "that recomputes forward ops only and in the backward pass only",
    CHAIN_STAGES: "of the graph taken as a chain",
    NO_TRANSFERS: "without transfers to the host",
    TAGS: "that computes what is not saved again once where torch puts it",
}


def outgrown(method: str, within: Sequence[str]) -> bool:
    """Whether a kept answer's method searches a larger space than the one that it was kept with.

    `auto` and `transfers` look at moves wherever there is a link; what they said within `no-transfers` is from before.

    >>> outgrown("auto", ("no-transfers",)), outgrown("search", ("no-transfers",))
    (True, False)
    """
    return NO_TRANSFERS in within and method in ("auto", "transfers")


def described(within: Sequence[str]) -> str:
    """The plans of a space as a noun phrase: "plan", "persistent schedule without transfers to the host".

    >>> described(("persistent-schedules", "no-transfers"))
    'persistent schedule without transfers to the host'
    """
    phrases = ["persistent schedule" if PERSISTENT in within else "plan"]
    for name in within:
        sweeps = _SWEEPS.fullmatch(name)
        if sweeps is not None:
            phrases.append(f"with at most {sweeps[1]} recomputations per op and stage")
        elif name != PERSISTENT:
            phrases.append(_PHRASES.get(name, f"within {name}"))
    return " ".join(phrases)


def optimal_sentence(within: Sequence[str]) -> str:
    """That a plan's cost is the bound of its space, for a person."""
    return f"No {described(within)} costs less{'; another plan may' if within else ''}."


def gap_sentence(gap: float, within: Sequence[str], why: str) -> str:
    """How far a plan may be from the best of the space in which the bound holds, and why the solve ended there."""
    return f"A plan within {100 * gap:.3g} % of {best_of(within)}; {why}."


def best_of(within: Sequence[str]) -> str:
    """What a gap is measured from: "the best possible", or the best plan of a restricted space."""
    return f"the cheapest {described(within)}" if within else "the best possible"


def contains(subject: Subject, plan: AnyPlan, within: Sequence[str]) -> bool:
    """Whether a plan is known to lie in a space, so that a bound proved there must not be above its cost.

    True is certain. False may also mean that membership cannot be seen from the plan: of `chain-stages`, of names that
    are unknown, and where a recomputation follows the last first computation.
    """
    return all(_lies_in(subject, plan, name) for name in within)


def _lies_in(subject: Subject, plan: AnyPlan, name: str) -> bool:
    if isinstance(subject, Chain) and isinstance(plan, ChainPlan):
        if name == NO_TRANSFERS:
            return all(step.verb not in TRANSFERS for step in plan.steps)
        return name == PERSISTENT and _persistent(plan)
    if not (isinstance(subject, Graph) and isinstance(plan, Plan)):
        return False
    if name == NO_TRANSFERS:
        return all(isinstance(step, (Compute, Free)) for step in plan.steps)
    if name == FORWARD_OPS:
        return _forward_only(subject, plan.computes)
    if name == TAGS:
        return is_tagged(subject, plan)
    sweeps = 1 if name == ONE_PER_STAGE else int(found[1]) if (found := _SWEEPS.fullmatch(name)) else 0
    return sweeps > 0 and _most_sweeps(plan.computes) <= sweeps


def _most_sweeps(computes: Sequence[int]) -> float:
    """Over all stages, the most passes in op order that the recomputations of one stage take."""
    stage, most, sweeps, last = 0, 0, 0, -1
    for op in computes:
        if op == stage:
            stage, sweeps, last = stage + 1, 0, -1
            continue
        if op <= last or not sweeps:
            sweeps += 1
        last = op
        most = max(most, sweeps)
    return most if not sweeps else float("inf")


def _forward_only(graph: Graph, computes: Sequence[int]) -> bool:
    boundary = graph.backward_from
    if boundary is None:
        return False
    stage = 0
    for op in computes:
        if op == stage:
            stage += 1
        elif op >= boundary or stage < boundary:
            return False
    return True


def _persistent(plan: ChainPlan) -> bool:
    """Whether no step frees an input or a tape that an earlier step saved for a backward step."""
    saved: set[int] = set()
    for verb, stage in plan.steps:
        if verb in (Verb.F_ALL, Verb.F_CK):
            saved.add(stage - 1)
            if verb is Verb.F_ALL:
                saved.add(stage)
        elif verb is Verb.F_NONE:
            if stage == 1 or stage - 1 in saved:
                return False
        elif verb is Verb.B:
            saved -= {stage - 1, stage}
        elif verb is Verb.FREE:
            return False
    return True
