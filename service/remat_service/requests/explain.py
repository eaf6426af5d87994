"""Why a lookup would hit, or what it misses by."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from remat_ir import Graph, Problem, Subject, duration, gap_of, readable

from ..context import Context
from ..identity import Caller
from ..storage.answers import Stored
from ..storage.cache_key import Keys, keys_of, method_key_of
from ..storage.tables import graphs, requests
from ..subjects import costs_of, size_of
from .parse import Ask

_RECENT = 20


async def explain(context: Context, caller: Caller, ask: Ask) -> dict[str, Any]:
    """What the store has for a request: `result`, and `reasons` in sentences."""
    net, digests = ask.net, ask.digests
    if net is None or digests is None:
        return {"result": "hit", "digest": "", "reasons": ["The budget does not cover the fixed bytes: infeasible."]}
    keys = keys_of(caller, digests, method_key_of(ask.method, ask.options, ask.start, ask.certify))
    stored = await context.cache.known(caller, keys, net)
    final = stored.is_final(ask.max_gap, ask.time_limit_s)
    reasons = _parts(stored, ask)
    async with context.database.read() as connection:
        key = await connection.scalar(select(graphs.c.key).where(graphs.c.key == keys.graph))
    if key is None:
        reasons += await _differences(context, caller, keys, net)
    elif stored.effort is None:
        reasons.append(f"This graph is stored, but {ask.method!r} has not been run at this budget.")
    result = "miss" if not final else "near" if stored.carried else "hit"
    return {"result": result, "digest": keys.digest, "reasons": reasons}


def _parts(stored: Stored, ask: Ask) -> list[str]:
    said = []
    known = stored.known
    cost = known.cost_ns
    if cost is None:
        said.append("No plan within this budget is stored for this graph and method.")
    else:
        bound, within = known.bound(ask.max_gap)
        gap = gap_of(cost, bound)
        where = f" within {', '.join(within)}" if within else ""
        compared = "within" if gap <= ask.max_gap else "over"
        said.append(f"The best plan costs {duration(cost)}, the best bound{where} is {duration(bound)}: a gap of "
                    f"{gap:.6f}, {compared} the {ask.max_gap:g} asked for.")  # fmt: skip
    if known.least_bytes is not None and known.least_bytes > known.problem.budget_bytes:
        answer = stored.answer(ask.method, ask.max_gap, "")
        sure = "is proved" if answer.claimed_by is None else f"is claimed by {answer.claimed_by!r}"
        least = answer.least_budget_bound_bytes
        said.append(f"Every plan {sure} to need {readable(least or 0)} besides the fixed ones.")
    effort = stored.effort
    if effort is not None:
        ended = "it has run to its end" if effort.settled else f"{ask.time_limit_s:g} s are asked for"
        said.append(f"{ask.method!r} was run for {effort.seconds:.3g} s at this budget; {ended}.")
    return said


async def _differences(context: Context, caller: Caller, keys: Keys, net: Problem) -> list[str]:
    """What sets this graph apart from the tenant's recent ones."""
    async with context.database.read() as connection:
        rows = (
            await connection.execute(
                select(graphs.c.key, graphs.c.structure_key, graphs.c.ops, graphs.c.data)
                .where(
                    graphs.c.key.in_(
                        select(requests.c.graph_key)
                        .where(requests.c.tenant_id == caller.tenant_id)
                        .order_by(requests.c.id.desc())
                        .limit(_RECENT)
                    )
                )
                .order_by(graphs.c.used_at.desc())
            )
        ).all()
    same = [row for row in rows if row.structure_key == keys.structure]
    ops = size_of(net.subject)[0]
    alike = same or [row for row in rows if row.ops == ops]
    if not alike:
        return ["No graph with as many ops was asked about lately."]
    other = await context.verifier.graph(alike[0].key, alike[0].data, caller.key)
    if other is None:
        return []
    if same:
        return [_cost_difference(net.subject, other)]
    return ["No stored graph has this structure. Nearest: " + _structure_difference(net.subject, other)]


def _cost_difference(mine: Subject, other: Subject) -> str:
    pairs = list(zip(costs_of(mine), costs_of(other), strict=True))
    moved = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not moved:
        return "A graph of the same structure and costs is stored under another epoch."
    a, b = pairs[moved[0]]
    return (
        f"A graph of the same structure is stored with other costs in {len(moved)} of {len(pairs)} places; "
        f"first at {moved[0]}: {a} ns sent, {b} ns stored. Costs from the shared profile table would be equal."
    )


def _structure_difference(mine: Subject, other: Subject) -> str:
    if not isinstance(mine, Graph) or not isinstance(other, Graph):
        return "another kind of problem."
    for name in ("op_inputs", "value_op", "value_bytes", "op_workspace_bytes", "optional", "once", "keep", "consumes"):
        a, b = getattr(mine, name), getattr(other, name)
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{name} differs first at {place}."
    return "backward_from differs."
