"""The least makespan of small graphs with a link, by Dijkstra over what is where: it shares nothing with any solver.

A state says how far the plan is, which values are on the device, on the host or under way, and how long each copy and
each direction of the link will still take. Its edges are the steps of a plan, as the verifier has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import NamedTuple

from remat_ir import Compute, Drop, Free, Offload, Plan, Prefetch, Problem, Step, Wait, verify
from solver.shortest import shortest


class State(NamedTuple):
    """`leaving` and `returning` are pairs of a value and the time that its copy will still take, sorted."""

    done: int = 0
    resident: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    leaving: tuple[tuple[int, int], ...] = ()
    returning: tuple[tuple[int, int], ...] = ()
    out_free: int = 0
    back_free: int = 0

    def later(self, ns: int) -> State:
        """After so much time."""
        pairs = [tuple((v, max(0, left - ns)) for v, left in copies) for copies in (self.leaving, self.returning)]
        return self._replace(
            leaving=pairs[0],
            returning=pairs[1],
            out_free=max(0, self.out_free - ns),
            back_free=max(0, self.back_free - ns),
        )


def least_makespan(problem: Problem) -> tuple[int | None, Plan | None]:
    """The least makespan of any plan and a plan that has it, as verified; None and None where nothing fits."""
    found = shortest(
        State(),
        lambda state: moves(problem, state),
        lambda state: state.done == problem.graph.ops and not state.leaving and not state.returning,
    )
    if found is None:
        return None, None
    cost, steps = found
    plan = Plan(tuple(steps))
    assert verify(problem, plan).cost_ns == cost
    return cost, plan


def moves(problem: Problem, state: State) -> Iterator[tuple[Step, int, State]]:
    """The steps that a plan may take from a state: each with the time that it takes and the state after it."""
    graph, link = problem.graph, problem.graph.link
    leaving, returning = dict(state.leaving), dict(state.returning)
    size = graph.value_bytes
    held = graph.fixed_bytes + sum(size[v] for v in (*state.resident, *returning))
    host = sum(size[v] for v in (*state.away, *state.copied, *leaving, *returning))
    for v in state.resident - set(graph.keep):
        if v not in leaving:
            yield Free(v), 0, state._replace(resident=state.resident - {v}, copied=state.copied - {v})
        if (
            link is not None
            and v not in leaving
            and v not in state.copied
            and (link.host_bytes is None or host + size[v] <= link.host_bytes)
        ):
            end = state.out_free + link.to_host_ns(size[v])
            yield Offload(v), 0, state._replace(leaving=_with(leaving, v, end), out_free=end)
        if v in state.copied:
            moved = state._replace(resident=state.resident - {v}, copied=state.copied - {v}, away=state.away | {v})
            yield Drop(v), 0, moved
    for v in state.away:
        if held + size[v] <= problem.budget_bytes:
            end = state.back_free + link.to_device_ns(size[v])
            yield (
                Prefetch(v),
                0,
                state._replace(away=state.away - {v}, returning=_with(returning, v, end), back_free=end),
            )
    for v, left in state.leaving:
        after = state._replace(leaving=_with(leaving, v), copied=state.copied | {v})
        yield Wait(v), left, after.later(left)
    for v, left in state.returning:
        after = state._replace(returning=_with(returning, v), resident=state.resident | {v})
        yield Wait(v), left, after.later(left)
    for op in range(min(state.done + 1, graph.ops)):
        if op < state.done and (op in graph.once or any(v in graph.keep for v in graph.op_values[op])):
            continue
        always = graph.op_always[op]
        if not set(graph.op_inputs[op]) <= state.resident or any(v in state.resident or v in returning for v in always):
            continue
        absent = [v for v in graph.op_values[op] if v in graph.optional and not (v in state.resident or v in returning)]
        for more in chain.from_iterable(combinations(absent, count) for count in range(len(absent) + 1)):
            made = sorted((*always, *more))
            if held + graph.op_workspace_bytes[op] + sum(size[v] for v in made) > problem.budget_bytes:
                continue
            kept = tuple(v for v in made if v not in state.away)
            after = state._replace(done=max(state.done, op + 1), resident=state.resident | set(kept))
            yield Compute(op, kept), graph.op_cost_ns[op], after.later(graph.op_cost_ns[op])


def _with(copies: dict[int, int], value: int, end: int | None = None) -> tuple[tuple[int, int], ...]:
    changed = {v: left for v, left in copies.items() if v != value} | ({} if end is None else {value: end})
    return tuple(sorted(changed.items()))
