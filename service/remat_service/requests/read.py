"""Reading what is stored for a request: its answer so far or verified plan, its problem, progress and memory curve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import bindparam, select

from remat_ir import (
    Answer,
    AnyPlan,
    ChainPlan,
    JoinPlan,
    Plan,
    Problem,
    Status,
    Subject,
    Verdict,
    plain_plan_of,
    read_plan,
    replay_any,
    subject_kind,
    to_node_link,
)
from remat_solver import sentence

from ..context import Context
from ..errors import Gone, NotFound
from ..identity import Caller, gross_of
from ..storage.answers import Given, document, head_of, spliced
from ..storage.seals import WHOLE, Seals, names
from ..storage.store import EndedRequest
from ..storage.tables import events, of_epoch, requests, solves

log = structlog.get_logger("remat_service.requests.read")

PROGRESS = (
    solves.c.state,
    *(solves.c[name] for name in ("cost_ns", "peak_bytes", "total_cost_ns", "bound_ns", "restricted_to", "spent_s")),
    solves.c.plan_id.label("best_plan_id"),
    solves.c.seal.label("progress_seal"),
    solves.c.started_at,
)
"""What is read of a request's solve: how far it has come."""

_REQUEST = (
    select(requests, *PROGRESS)
    .outerjoin(solves, solves.c.id == requests.c.solve_id)
    .where(requests.c.tenant_id == bindparam("tenant"), requests.c.id == bindparam("id"), of_epoch(bindparam("epoch")))
)
_POINT = tuple(events.c[name] for name in ("seq", "seconds", "cost_ns", "bound_ns", "restricted_to", "source"))
_QUEUED = "Waiting for a free solver."
_DAMAGED = "This answer is not what was stored; POST the problem again."


async def find_request(context: Context, caller: Caller, request_id: str) -> Any:
    """The row of a request of this tenant, with the state of its solve.

    Raises:
        NotFound: there is none, or its epoch is over.
    """
    if context.write_behind.holds(request_id):
        await context.write_behind.flush()
    row = await context.database.first(_REQUEST, id=request_id, tenant=caller.tenant_id, epoch=caller.epoch)
    if row is None:
        raise NotFound("there is no solve with this id")
    return row


async def answer(
    context: Context, caller: Caller, request_id: str, until: float, waits: bool = False
) -> tuple[bytes, bool]:
    """The answer object of a request as JSON text, once it has ended or the time is up; and whether it has ended.

    Args:
        waits: it has not ended a moment ago, so that its answer is not looked for in memory first.

    Raises:
        NotFound: there is no such request of this tenant's.
        Gone: the answer's plan has been evicted, or was damaged.
    """
    body = None if waits else await ended_body(context, caller, request_id)
    if body is None:
        row = await wait(context, caller, request_id, until)
        if not row.ended:
            return head_of(listed_answer(context, row)), False
        body = await ended_body(context, caller, request_id)
        if body is None:
            raise Gone("this answer's plan or certificate is no longer stored; POST the problem again")
    context.notifier.notify_here(request_id)
    return body, True


async def ended_body(context: Context, caller: Caller, request_id: str) -> bytes | None:
    """The answer object of an ended request as JSON text, with its plan and certificate, which were checked here.

    None where it has not ended, or a part of it has been evicted.

    Raises:
        Gone: a part of it is damaged.
    """
    found = await context.store.ended_request(caller, request_id)
    if found is None:
        return None
    given = context.response_cache.given.get(found.id)
    if given is not None and given.found == found:  # its seal and its plan were checked, and no column differs
        context.metrics.recalls.labels("id").inc()
        return spliced(given.head, given.plan, given.proof)
    said = sound_answer(context, found)
    if said is None:
        raise Gone(_DAMAGED)
    text = proof = None
    async with context.locks.of(found.plan_id or found.proof_id or found.id):  # of a burst, one has both checked
        if found.data is not None:
            claimed = Verdict(found.cost_ns or 0, found.peak_bytes or 0)
            text = await plan_text(context, caller, found.graph_key, found.data, claimed, found.budget_bytes)
        if found.proof is not None:
            proof = await _proof_text(context, caller, found)
    if (text is None) != (found.data is None) or (proof is None) != (found.proof is None):
        raise Gone(_DAMAGED)
    given = Given(found, head_of(said), text, proof)
    context.response_cache.given.put(found.id, given, given.size)
    return spliced(given.head, text, proof)


def sound_answer(context: Context, row: Any) -> dict[str, Any] | None:
    """The answer of a row of `requests`; None where it is not the one that was stored."""
    found = row._asdict()
    answer = found["answer"]
    if isinstance(answer, dict) and context.seals.holds("requests", found):
        return answer
    context.metrics.damaged.labels("answer").inc()
    log.error("a stored answer is damaged and is not given", request=row.id)
    return None


def listed_answer(context: Context, row: Any) -> dict[str, Any]:
    """The answer of a request without its plan, final or so far: one that is damaged says so, and nothing else."""
    if not row.ended and row.solve_id is not None:
        return document(running_answer(context, row), row.fixed_bytes, id=row.id, cache=row.cache)
    found = sound_answer(context, row)
    if found is not None:
        return dict(found)
    answer = Answer(Status.FAILED, row.method, row.budget_bytes, digest=row.digest, message=_DAMAGED)
    return document(answer, row.fixed_bytes, id=row.id, cache=row.cache)


async def wait(context: Context, caller: Caller, request_id: str, until: float) -> Any:
    """The row of a request, once it has ended or the time is up.

    Raises:
        NotFound: there is none of this tenant's.
    """
    with context.notifier.subscribe(request_id) as changes:
        while True:
            changes.reset()
            row = await find_request(context, caller, request_id)
            left = until - context.clock.monotonic()
            if row.ended or left <= 0 or context.leaving:
                if row.ended:
                    context.notifier.notify_here(request_id)
                return row
            await changes.wait(left)


def told(seals: Seals, row: Any) -> dict[str, Any]:
    """What a solve has told so far, from a row with `PROGRESS`; nothing where the seal does not hold."""
    found = {"id": row.solve_id, "plan_id": row.best_plan_id, "seal": row.progress_seal}
    found |= {name: row._mapping[name] for name in ("cost_ns", "peak_bytes", "total_cost_ns", "bound_ns")}
    found["restricted_to"] = row.restricted_to or ""
    if seals.holds("solves", found):
        return found
    return dict.fromkeys(found) | {"restricted_to": ""}


def queued_answer(row: Mapping[str, Any], told: Mapping[str, Any]) -> bytes:
    """The answer so far of a request whose solve has just been queued, as JSON text, from what was written of both."""
    answer = Answer(
        Status.QUEUED, row["method"], row["budget_bytes"], seconds=0.0, digest=row["digest"], message=_QUEUED
    ).priced(told["total_cost_ns"], told["cost_ns"], told["bound_ns"], told["peak_bytes"])
    return head_of(document(answer, row["fixed_bytes"], id=row["id"], cache=row["cache"]))


def running_answer(context: Context, row: Any, status: Status | None = None) -> Answer:
    """The answer so far of a request that has not ended, in net bytes, from a row with `PROGRESS`."""
    running, known = row.state == "running", told(context.seals, row)
    seconds = row.spent_s
    if running and row.started_at is not None:
        seconds = max(seconds, min(row.time_limit_s, (context.clock.now() - row.started_at).total_seconds()))
    answer = Answer(
        status=status or (Status.RUNNING if running else Status.QUEUED),
        method=row.method,
        budget_bytes=row.budget_bytes,
        seconds=round(seconds, 3),
        restricted_to=names(known["restricted_to"]),
        digest=row.digest,
        message="" if status else ("Solving." if running else _QUEUED),
    ).priced(known["total_cost_ns"], known["cost_ns"], known["bound_ns"], known["peak_bytes"])
    return answer if status is None else replace(answer, message=sentence(replace(answer, limit="cancel")))


async def stored_subject(context: Context, caller: Caller, graph_key: str) -> Subject | None:
    """What is stored under the key of a graph; None where it has been evicted, or is damaged."""
    packed = await context.store.graph_row(graph_key)
    return None if packed is None else await context.verifier.graph(graph_key, packed, caller.key)


async def plan_text(
    context: Context, caller: Caller, graph_key: str, packed: bytes, claimed: Verdict, net_budget: int
) -> bytes | None:
    """The plan of a row as JSON text if the verifier passes it."""
    text = context.verifier.text_in_memory(graph_key, net_budget, packed, claimed)
    if text is not None:
        return text
    subject = await stored_subject(context, caller, graph_key)
    if subject is None:
        return None
    text = await context.verifier.text(graph_key, Problem(subject, net_budget), packed, claimed)
    if text is None:
        context.metrics.rejections.labels("store").inc()
    return text


async def _proof_text(context: Context, caller: Caller, found: EndedRequest) -> bytes | None:
    """The certificate of a row as JSON text if it proves what it should."""
    packed, budget, space = found.proof or b"", found.budget_bytes, found.proved_within or WHOLE
    text = context.verifier.proof_text_in_memory(found.graph_key, budget, packed, space)
    if text is not None:
        return text
    subject = await stored_subject(context, caller, found.graph_key)
    if subject is None:
        return None
    checked = await context.verifier.proof(found.graph_key, Problem(subject, budget), packed, space=space)
    if checked is not None and checked.proves(found.proved_ns):
        return checked.text
    context.metrics.damaged.labels("proof").inc()
    log.error("a stored certificate is damaged and is not given", graph=found.graph_key, budget=budget)
    return None


async def problem_of(context: Context, caller: Caller, request_id: str, node_link: bool = False) -> bytes:
    """The problem of a request as JSON text.

    Args:
        node_link: write a graph as node-link data.

    Raises:
        NotFound: there is no such request.
        Gone: its graph has been evicted.
        InvalidData: node-link data can't say what the graph is.
    """
    row = await find_request(context, caller, request_id)
    subject = await stored_subject(context, caller, row.graph_key)
    if subject is None:
        raise Gone("the graph of this solve is no longer stored")
    gross = gross_of(Problem(subject, row.budget_bytes), row.fixed_bytes)
    data = gross.to_json()
    if node_link:
        data["graph"] = to_node_link(gross.graph)
    return json.dumps(data, separators=(",", ":")).encode()


async def progress_of(context: Context, row: Any, after: int = 0) -> list[dict[str, Any]]:
    """The improvements of the solve of a request, whose row is given, with a `seq` above `after`."""
    if row.solve_id is None:  # served from the store: its end is all there is to tell
        return [_end_point(listed_answer(context, row))] if after == 0 else []
    query = select(*_POINT).where(events.c.solve_id == row.solve_id, events.c.seq > after).order_by(events.c.seq)
    found = await context.database.rows(query)
    return [{**point._asdict(), "restricted_to": list(names(point.restricted_to))} for point in found]


def _end_point(answer: dict[str, Any]) -> dict[str, Any]:
    taken = {key: answer[key] for key in ("cost_ns", "bound_ns", "restricted_to")}
    return {"seq": 1, "seconds": 0.0, **taken, "source": "store"}


async def timeline_of(context: Context, caller: Caller, request_id: str) -> dict[str, Any]:
    """The timeline of a request's answer; without a plan yet, or at all, only plain training's.

    Raises:
        NotFound: there is no such request.
        Gone: its graph or its plan has been evicted.
    """
    problem = await problem_of(context, caller, request_id)
    body, _ = await answer(context, caller, request_id, context.clock.monotonic())
    return await asyncio.to_thread(_timeline, problem, body)


def _timeline(problem: bytes, answer: bytes) -> dict[str, Any]:
    """The memory curve of a plan and of plain training, for any kind of subject, by the verifier's own replay."""
    subject, said = Problem.from_json(problem).subject, json.loads(answer).get("plan")
    return {
        "kind": subject_kind(subject),
        "total_cost_ns": subject.total_cost_ns,
        "plain": _curve(subject, plain_plan_of(subject)),
        "plan": None if said is None else _curve(subject, read_plan(said)),
    }


def _curve(subject: Subject, plan: AnyPlan) -> dict[str, Any]:
    """When each step starts, in ns, the bytes while it runs, what it is, and whether it has run before.

    The frees of a graph's plan are left out: they take no time, and the next computation shows what they gave back.
    """
    start, memory, what, again = [], [], [], []
    seen: set[str] = set()
    before = 0
    for moment in replay_any(subject, plan):
        if not (isinstance(plan, Plan) and moment.op is None):
            name, unit = _step(plan, moment.step)
            start.append(before)
            memory.append(moment.peak_bytes)
            what.append(name)
            again.append(unit is not None and unit in seen)
            if unit is not None:
                seen.add(unit)
        before = moment.cost_ns
    return {"start_ns": start, "end_ns": before, "memory_bytes": memory, "what": what, "again": again}


def _step(plan: AnyPlan, i: int) -> tuple[str, str | None]:
    """A step in words, and the unit of work that it does: the same again is a recomputation."""
    if isinstance(plan, JoinPlan):
        verb, branch, index = plan.steps[i]
        name = verb.value if verb.value == "turn" else f"{verb.value} {index} of branch {branch}"
        return name, name if verb.value == "F" else None
    if isinstance(plan, ChainPlan):
        chain_verb, stage = plan.steps[i]
        forward = chain_verb.value.startswith("F")
        return f"{chain_verb.value} {stage}", f"F {stage}" if forward else None
    step = plan.steps[i]
    name = f"op {getattr(step, 'op', '')}"
    return name, name
