"""Every plan of a tiny graph, the cheapest first: a shortest path over what is where, by A* (Hart et al., 1968).

A state says how far a plan is, which values are resident and, with a link, which are on the host or under way and how
long each copy will still take. Its edges are the steps of a plan, as the verifier has them. No plan is left out, also
none that runs a stage's ops out of their order or twice: the local search has no such plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations
from typing import NamedTuple

from remat_ir import Compute, Drop, Free, Offload, Plan, Prefetch, Problem, Step, Wait

from ..array_view import view_of
from ..incumbent import Incumbent

SOURCE = "every plan"
MOST_VALUES = 16
"""Up to so many values it is tried at all: the states grow exponentially with them."""
_MOST_STATES, _MOST_LINKED = 60_000, 200_000
"""So many states are kept at most, without a link and with one: up to a second's work, and some seconds."""
_POLL = 256

Copies = tuple[tuple[int, int], ...]
"""Values that are being copied, each with the ns that its copy will still take."""


class _State(NamedTuple):
    """`resident`, `copied` and `away` are sets of values, as bits; `copied` are resident, too."""

    done: int = 0
    resident: int = 0
    copied: int = 0
    away: int = 0
    leaving: Copies = ()
    returning: Copies = ()
    out_free: int = 0
    back_free: int = 0


Edge = tuple[Step, int, _State]


class Cheapest(NamedTuple):
    """The cheapest plan below a cost, or None; `complete`: whether every plan below it has been looked at."""

    plan: Plan | None
    cost_ns: int | None
    complete: bool


def try_every_plan(incumbent: Incumbent) -> None:
    """Offer the cheapest plan of a tiny graph, and claim its cost as the bound, unless there are too many states."""
    problem = incumbent.problem
    found = cheapest(problem, lambda: incumbent.cost_ns, incumbent.stopped)
    if found.plan is not None:
        incumbent.offer(found.plan, SOURCE)
    if not found.complete:
        return
    cost = incumbent.cost_ns
    if cost is None:
        incumbent.prove_infeasible("No plan fits: every one has been looked at.")
    else:
        incumbent.raise_bound(cost if found.cost_ns is None else min(cost, found.cost_ns), SOURCE)


def cheapest(
    problem: Problem,
    below: Callable[[], int | None],
    stop: Callable[[], bool],
    most_states: int | None = None,
) -> Cheapest:
    """The cheapest plan that costs less than `below` says, which is asked again and again.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1] * 5, [4, 2, 4, 2, 1], [[], [0], [1], [2], [0, 3]])
    >>> cheapest(Problem(graph, 8), lambda: None, lambda: False).plan.computes
    (0, 1, 2, 3, 0, 4)
    """
    steps = _Steps(problem)
    most = most_states or (_MOST_STATES if problem.graph.link is None else _MOST_LINKED)
    costs = problem.graph.op_cost_ns
    left = [sum(costs[op:]) for op in range(len(costs) + 1)]
    start = _State()
    best: dict[_State, int] = {start: 0}
    came: dict[_State, tuple[_State, Step]] = {}
    heap: list[tuple[int, int, int, _State]] = [(left[0], 0, 0, start)]
    limit, looked = below(), 0
    while heap:
        least, _, _, state = heapq.heappop(heap)
        if looked % _POLL == 0:
            limit = below()
            if stop():
                return Cheapest(None, None, complete=False)
        looked += 1
        if limit is not None and least >= limit:
            return Cheapest(None, None, complete=True)
        cost = least - left[state.done]
        if cost > best[state]:
            continue
        if state.done == len(costs) and not state.leaving and not state.returning:
            return Cheapest(Plan(tuple(_walked(state, came))), cost, complete=True)
        for step, ns, after in steps.of(state):
            reached = cost + ns
            if reached >= best.get(after, reached + 1):
                continue
            if limit is not None and reached + left[after.done] >= limit:
                continue
            best[after] = reached
            came[after] = state, step
            # the furthest first among equals
            heapq.heappush(heap, (reached + left[after.done], -after.done, len(best), after))
        if len(best) > most:
            return Cheapest(None, None, complete=False)
    return Cheapest(None, None, complete=True)


def _walked(state: _State, came: dict[_State, tuple[_State, Step]]) -> list[Step]:
    steps: list[Step] = []
    while state in came:
        state, step = came[state]
        steps.append(step)
    return steps[::-1]


class _Steps:
    """The steps that a plan may take."""

    def __init__(self, problem: Problem) -> None:
        graph = self.graph = problem.graph
        self.room = problem.budget_bytes - graph.fixed_bytes
        self.size, self.link, self.values = graph.value_bytes, graph.link, range(graph.values)
        self.inputs = [_bits(inputs) for inputs in graph.op_inputs]
        kept, self.optional = frozenset(graph.keep), frozenset(graph.optional)
        self.frees = [value not in kept for value in self.values]
        # the last stage in which an op may run for a use that counts, and in which a value may be of use
        view = view_of(problem)
        self.last, self.reach = view.op_reach.tolist(), view.value_reach.tolist()
        self._sum = cache(lambda bits: sum(size for value, size in enumerate(graph.value_bytes) if bits >> value & 1))

    def of(self, state: _State) -> Iterator[Edge]:
        """All that may come next; one alone where it costs nothing and loses nothing."""
        for value, left in chain(state.leaving, state.returning):
            if not left:
                yield self._waited(state, value, 0)
                return
        for value in self.values:
            bit = 1 << value
            if state.resident & bit and self.reach[value] < state.done and not _copying(state.leaving, value):
                yield Free(value), 0, self._freed(state, bit)
                return
        yield from self._computed(state)
        for value in self.values:
            if state.resident >> value & 1 and self.frees[value] and not _copying(state.leaving, value):
                yield Free(value), 0, self._freed(state, 1 << value)
        if self.link is not None:
            yield from self._moved(state)

    def _computed(self, state: _State) -> Iterator[Edge]:
        graph, held = self.graph, self._held(state)
        returning = _bits(value for value, _ in state.returning)
        for op in range(min(state.done + 1, graph.ops)):
            if (op < state.done and self.last[op] < state.done) or self.inputs[op] & ~state.resident:
                continue
            always = graph.op_always[op]
            if _bits(always) & (state.resident | returning):
                continue
            there = state.resident | returning | state.away
            more = [value for value in graph.op_values[op] if value in self.optional and not there >> value & 1]
            for chosen in chain.from_iterable(combinations(more, count) for count in range(len(more) + 1)):
                made = sorted((*always, *chosen))
                if held + graph.op_workspace_bytes[op] + sum(self.size[value] for value in made) > self.room:
                    continue
                kept = tuple(value for value in made if not state.away >> value & 1)
                after = state._replace(done=max(state.done, op + 1), resident=state.resident | _bits(kept))
                yield Compute(op, kept), graph.op_cost_ns[op], _later(after, graph.op_cost_ns[op])

    def _moved(self, state: _State) -> Iterator[Edge]:
        assert self.link is not None
        held, limit = self._held(state), self.link.host_bytes
        copying = (*state.leaving, *state.returning)
        host = self._sum(state.copied | state.away) + sum(self.size[value] for value, _ in copying)
        for value, size in enumerate(self.size):
            bit = 1 << value
            if not size or _copying(copying, value):
                continue
            if state.copied & bit:
                moved = state._replace(
                    resident=state.resident & ~bit, copied=state.copied & ~bit, away=state.away | bit
                )
                yield Drop(value), 0, moved
            elif state.resident & bit and self.frees[value] and (limit is None or host + size <= limit):
                end = state.out_free + self.link.to_host_ns(size)
                yield Offload(value), 0, state._replace(leaving=_with(state.leaving, value, end), out_free=end)
            elif state.away & bit and held + size <= self.room:
                end = state.back_free + self.link.to_device_ns(size)
                away = state.away & ~bit
                back = _with(state.returning, value, end)
                yield Prefetch(value), 0, state._replace(away=away, returning=back, back_free=end)
        for value, left in copying:
            yield self._waited(state, value, left)

    def _waited(self, state: _State, value: int, left: int) -> Edge:
        bit = 1 << value
        if _copying(state.leaving, value):
            after = state._replace(leaving=_with(state.leaving, value), copied=state.copied | bit)
        else:
            after = state._replace(returning=_with(state.returning, value), resident=state.resident | bit)
        return Wait(value), left, _later(after, left)

    @staticmethod
    def _freed(state: _State, bit: int) -> _State:
        return state._replace(resident=state.resident & ~bit, copied=state.copied & ~bit)

    def _held(self, state: _State) -> int:
        """Bytes on the device: a value on its way back has its place there already."""
        return self._sum(state.resident) + sum(self.size[value] for value, _ in state.returning)


def _bits(values: Iterator[int] | tuple[int, ...]) -> int:
    return sum(1 << value for value in values)


def _copying(copies: Copies, value: int) -> bool:
    return any(value == each for each, _ in copies)


def _with(copies: Copies, value: int, end: int | None = None) -> Copies:
    """The copies with another one, or without it."""
    rest = tuple(each for each in copies if each[0] != value)
    return rest if end is None else tuple(sorted((*rest, (value, end))))


def _later(state: _State, ns: int) -> _State:
    """A state after so much time."""
    if not ns or not (state.leaving or state.returning or state.out_free or state.back_free):
        return state
    return state._replace(
        leaving=tuple((value, max(0, left - ns)) for value, left in state.leaving),
        returning=tuple((value, max(0, left - ns)) for value, left in state.returning),
        out_free=max(0, state.out_free - ns),
        back_free=max(0, state.back_free - ns),
    )
