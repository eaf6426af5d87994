"""A plan as a person would look at it: what runs when and what it holds, next to training without a plan."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from remat_ir import (
    AnyPlan,
    ChainPlan,
    JoinPlan,
    Plan,
    Problem,
    Subject,
    plain_plan_of,
    read_plan,
    replay_any,
    subject_kind,
)

from ..context import Context
from ..identity import Caller
from . import read


async def of_solve(context: Context, caller: Caller, request_id: str) -> dict[str, Any]:
    """The timeline of a request's answer; without a plan yet, or at all, only plain training's.

    Raises:
        NotFound: there is no such request.
        Gone: its graph or its plan has been evicted.
    """
    row = await read.find_request(context, caller, request_id)
    problem = await read.problem_of(context, caller, request_id)
    answer, _ = await read.body_of(context, caller, row)
    return await asyncio.to_thread(_read, problem, answer)


def _read(problem: bytes, answer: bytes) -> dict[str, Any]:
    plan = json.loads(answer).get("plan")
    return timeline(Problem.from_json(problem).subject, None if plan is None else read_plan(plan))


def timeline(subject: Subject, plan: AnyPlan | None) -> dict[str, Any]:
    """The memory curve of a plan and of plain training, for any kind of subject, by the verifier's own replay.

    Raises:
        InvalidPlan: the plan breaks a rule.
    """
    return {
        "kind": subject_kind(subject),
        "total_cost_ns": subject.total_cost_ns,
        "plain": _curve(subject, plain_plan_of(subject)),
        "plan": None if plan is None else _curve(subject, plan),
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
