"""The largest batch inside a budget, asked of a service: its plan is replayed here before it is believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remat_ir import Answer, BatchFamily, InvalidData, InvalidPlan, LargestBatch, Plan, Problem, verify

from ..errors import InvalidResponse
from . import service
from .options import SolveOptions
from .sources import ServicePlanner

SERVICE = "the service"
"""Who claims a bound that came without a certificate."""
_POLL_S = 2.0
_PATIENCE_S = 60.0


def largest_batch(
    planner: ServicePlanner,
    family: BatchFamily,
    options: SolveOptions,
    *,
    total_s: float = 600.0,
    on_step: Callable[[LargestBatch], None] | None = None,
) -> LargestBatch:
    """The largest batch with a plan that costs at most one more forward pass (Checkmate, equation 9).

    The plan is verified at the batch that is claimed. The bound is certified here, or the service's word: `claimed_by`
    says which.

    Args:
        options: of each solve.
        total_s: seconds for the whole search; beyond it and a minute the search is given up, with what it has found.
        on_step: called with what is known, at every poll that brings something new; without a plan.

    Raises:
        ServiceError: unreachable, refused, or an answer that is not what it claims to be.
    """
    started = time.monotonic()
    give_up_at = started + total_s + _PATIENCE_S
    body: dict[str, Any] = {"problem": Problem(family.graph, family.budget_bytes).to_json(), "batch": family.batch}
    body |= {"batch_bytes": family.batch_bytes, "total_s": total_s, "options": planner.options}
    body |= {"batch_values": None if family.values is None else list(family.values)}
    body |= {name: getattr(options, name) for name in ("method", "time_limit_s")}
    if options.name is not None:
        body["name"] = options.name
    wait_until = started + total_s
    found = service.start_max_batch(planner.http, body, give_up_at=give_up_at, wait_until=wait_until)
    search_id, seen = found["id"], None
    while not found["ended"]:
        known = _known(found, None, started)
        if on_step is not None and (known.batch, known.bound) != seen:
            seen = (known.batch, known.bound)
            on_step(known)
        if time.monotonic() > give_up_at:
            found = service.cancel_max_batch(planner.http, search_id, give_up_at=time.monotonic() + 5.0)
            break
        found = service.poll_max_batch(
            planner.http, search_id, wait_s=_POLL_S, give_up_at=give_up_at, wait_until=give_up_at
        )
    known = _known(found, _plan(planner, family, found, give_up_at), started)
    proof = None
    for batch, solve in zip(found.get("batches", ()), found.get("solves", ()), strict=False):
        if batch == known.bound + 1:
            proof = service.poll(planner.http, str(solve.get("id")), wait_until=give_up_at).proof or proof
    certain = family.impossible(known.bound + 1, known.most_cost_ns, proof)
    return replace(known, proof=proof if certain else None, claimed_by=None if certain else SERVICE)


def _known(found: dict[str, Any], answer: Answer | None, started: float) -> LargestBatch:
    if found["bound"] is None or found["most_cost_ns"] is None or (found["best_batch"] or 0) > found["bound"]:
        raise InvalidResponse("the service's search for the largest batch has no bound, or one below its own batch")
    seconds = round(time.monotonic() - started, 6)
    batch, bound = found["best_batch"] or 0, found["bound"]
    return LargestBatch(batch, bound, found["most_cost_ns"], answer, seconds, claimed_by=SERVICE)


def _plan(planner: ServicePlanner, family: BatchFamily, found: dict[str, Any], wait_until: float) -> Answer | None:
    """The answer at the batch that is claimed, its plan replayed there."""
    if not found["best_batch"]:
        return None
    solved = service.poll(planner.http, str(found.get("best_solve")), wait_until=wait_until)
    plan = solved.plan
    if not isinstance(plan, Plan):
        raise InvalidResponse(f"the service claims a batch of {found['best_batch']} and has no plan for it")
    try:
        if verify(family.at(found["best_batch"]), plan).cost_ns > found["most_cost_ns"]:
            raise InvalidResponse(f"the service's plan for a batch of {found['best_batch']} costs more than it may")
        problem = Problem(family.scaled(found["best_batch"]), family.budget_bytes)
        return Answer.of_plan(problem, plan, method=solved.method)
    except (InvalidPlan, InvalidData) as error:
        raise InvalidResponse(f"the service's plan for a batch of {found['best_batch']} is wrong: {error}") from None
