"""Where copies to the host and back have their place in a plan: of a graph's values, and of what a chain stores.

A copy out starts as soon as the value is made and the link is free, and is waited for where its bytes are needed or, at
no cost, once it has ended. A copy back starts as late as it can without making its reader wait, and earlier where
memory is free only then. Moved are as few values as memory asks for, those first that the link hides best.
"""

from __future__ import annotations

from bisect import bisect, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from remat_ir import (
    Chain,
    ChainPlan,
    ChainStep,
    Compute,
    Drop,
    Free,
    Graph,
    InvalidPlan,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Step,
    Verb,
    Wait,
    graph_of,
)
from remat_ir.plan import STEP_OF_VERB

from .array_view import Ids


class Gap(NamedTuple):
    """The time between two uses of a value, in positions of the sequence: it may be on the host in between.

    `made` is the position that makes this instance, `last` that of the use before the gap (or `made`), `next` that of
    the use after it.
    """

    value: int
    made: int
    last: int
    next: int


@dataclass
class Timetable:
    """A sequence of ops with what is resident while each runs.

    Attributes:
        order: ops in the order in which they run. begin: [positions + 1] when each starts if nothing is waited for.
        load: [positions] bytes while each runs, everything resident from its making to its last use.
        gaps: every stretch between two uses of a value.
    """

    graph: Graph
    order: tuple[int, ...]
    begin: list[int]
    load: list[int]
    gaps: list[Gap]
    kept: list[tuple[int, ...]]
    dying: list[list[int]]


def timetable(graph: Graph, sequence: Sequence[int]) -> Timetable:
    """What is resident when, as in `remat_ir.plan_of`: each use reads the latest instance of a value."""
    order = tuple(sequence)
    made: dict[int, int] = {}
    uses: dict[tuple[int, int], list[int]] = {}  # of each instance: a value and the position that makes it
    for position, op in enumerate(order):
        for value in graph.op_inputs[op]:
            if value in made:
                uses[value, made[value]].append(position)
        for value in graph.op_values[op]:
            made[value] = position
            uses[value, position] = []
    keep = frozenset(graph.keep)
    change = [0] * (len(order) + 1)
    gaps: list[Gap] = []
    kept: list[list[int]] = [[] for _ in order]
    dying: list[list[int]] = [[] for _ in order]
    for (value, start), read in sorted(uses.items()):
        if value in keep:
            end = len(order) - 1
            kept[start].append(value)
        elif read:
            end = read[-1]
            kept[start].append(value)
            dying[end].append(value)
            gaps += (Gap(value, start, a, b) for a, b in pairwise((start, *read)) if b > a + 1)
        elif value in graph.op_always[order[start]]:
            end = start  # nothing reads it: there while its op runs
        else:
            continue
        change[start] += graph.value_bytes[value]
        change[end + 1] -= graph.value_bytes[value]
    begin = [0, *accumulate(graph.op_cost_ns[op] for op in order)]
    held = zip(order, accumulate(change[:-1]), strict=True)
    load = [graph.fixed_bytes + resident + graph.op_workspace_bytes[op] for op, resident in held]
    return Timetable(graph, order, begin, load, gaps, [tuple(values) for values in kept], dying)


def saved(table: Timetable) -> list[Gap]:
    """The gaps, from a forward to a backward op, of the instances that the forward pass makes, which comes first.

    >>> graph = graph_of([1] * 4, [1] * 4, [[], [0], [1], [0, 2]], backward_from=2)
    >>> [gap.value for gap in saved(timetable(graph, range(4)))]
    [0]
    """
    forward = table.graph.ops if table.graph.backward_from is None else table.graph.backward_from
    return [gap for gap in table.gaps if gap.last < forward <= gap.next]


class Placed(NamedTuple):
    """A plan and its makespan, before anybody has verified them."""

    cost_ns: int
    plan: Plan


def room_left(table: Timetable, budget_bytes: int, moved: Collection[Gap]) -> Ids:
    """[positions] the bytes that are free while each op runs, with the values of some gaps on the host."""
    room = budget_bytes - np.array(table.load, np.int64)
    for gap in moved:
        room[gap.last + 1 : gap.next] += table.graph.value_bytes[gap.value]
    return room


def place(table: Timetable, budget_bytes: int, moved: Collection[Gap]) -> Placed:
    """The plan that keeps every value of the sequence resident but in the gaps that are moved.

    Raises:
        InvalidPlan: an op does not fit even with all of them on the host, or with those that the host has room for, at
            the step of the first such position.
    """
    if table.graph.link is None:
        raise InvalidPlan("this graph has no link to the host")
    room = room_left(table, budget_bytes, moved)
    short = int(np.argmin(room))
    if room[short] < 0:
        raise InvalidPlan(f"op {table.order[short]} lacks {-int(room[short])} bytes", short)
    run = _Run(table, moved, _copies_back(table, room, moved))
    for position, (op, free) in enumerate(zip(table.order, room.tolist(), strict=True)):
        run.arrive(position)
        run.copy_out(position)
        run.make_room(position, free)
        run.copy_back(position)
        run.compute(position, op)
    return Placed(run.now, Plan(tuple(run.steps)))


def _copies_back(table: Timetable, room: Ids, moved: Collection[Gap]) -> dict[Gap, int]:
    """The position before which each copy back starts; takes what it holds until its use from `room`."""
    graph, begin = table.graph, table.begin
    assert graph.link is not None
    starts: dict[Gap, int] = {}
    link_free = begin[-1]  # seen from the end: when the copies placed so far begin
    for gap in sorted(moved, key=lambda gap: (-gap.next, gap.value)):
        size = graph.value_bytes[gap.value]
        latest = min(begin[gap.next], link_free) - graph.link.to_device_ns(size)
        position = gap.next
        wanted = max(gap.last + 1, bisect_right(begin, latest) - 1)
        while position > wanted and room[position - 1] >= size:
            position -= 1
        room[position : gap.next] -= size
        starts[gap] = position
        link_free = min(link_free, max(latest, begin[position]))
    return starts


class _Run:
    """A run through a sequence, which copies out as the link is free and lets go where memory is needed.

    It has the steps so far, the time, and where the values of the moved gaps are.
    """

    def __init__(self, table: Timetable, moved: Collection[Gap], starts: dict[Gap, int]) -> None:
        assert table.graph.link is not None
        self.table, self.graph, self.link = table, table.graph, table.graph.link
        positions = len(table.order) + 1
        self.begins: list[list[Gap]] = [[] for _ in range(positions)]  # gaps by the position before which they begin
        self.fresh: list[list[Gap]] = [[] for _ in range(positions)]  # by that before which their copy out can start
        self.backs: list[list[Gap]] = [[] for _ in range(positions)]  # by that before which their copy back starts
        free: dict[tuple[int, int], int] = {}  # of an instance: the position that made it, or read it after a gap
        for gap in sorted(moved):
            self.fresh[free.get((gap.value, gap.made), gap.made) + 1].append(gap)
            free[gap.value, gap.made] = gap.next
            self.begins[gap.last + 1].append(gap)
            self.backs[starts[gap]].append(gap)
        self.steps: list[Step] = []
        self.ready: list[Gap] = []  # to be copied out
        self.leaving: list[tuple[int, Gap]] = []  # when the copy ends, in the order of the link
        self.late: dict[Gap, int] = {}  # bytes of gaps that have begun, still on the device
        self.stays: set[Gap] = set()  # gaps given up: the link was too slow for them
        self.copied: set[int] = set()  # values of such gaps, once their copy on the host is there
        self.away: set[Gap] = set()
        self.returning: dict[int, int] = {}  # value -> when its copy back ends
        self.host = 0  # bytes on the host
        self.now = self.out_free = self.back_free = 0

    def arrive(self, position: int) -> None:
        """Take note of the gaps that begin here, and give up those that end before they have been of use."""
        fresh = [gap for gap in self.fresh[position] if gap.value not in self.copied]
        self.ready = sorted([*self.ready, *fresh], key=lambda gap: (gap.last, gap.value))
        for gap in self.begins[position]:
            if gap.value not in self.copied:
                self.late[gap] = self.graph.value_bytes[gap.value]
            elif gap not in self.backs[position]:
                self.copied.remove(gap.value)
                self.steps.append(Drop(gap.value))
                self.away.add(gap)
        for gap in self.backs[position]:
            if gap in self.late:
                del self.late[gap]
                self.stays.add(gap)
                if gap in self.ready:
                    self.ready.remove(gap)

    def copy_out(self, position: int) -> None:
        """Start copies out as long as the link will be free before the next op ends; let go of what has left."""
        cost = self.graph.op_cost_ns[self.table.order[position]]
        while self.ready and self.out_free < self.now + max(1, cost) and self.hosted(self.ready[0]):
            self.start()
        for end, gap in [pair for pair in self.leaving if pair[0] <= self.now]:
            if gap in self.late or gap in self.stays:
                self.let_go(end, gap)

    def hosted(self, gap: Gap) -> bool:
        """Whether the host has room for a value."""
        limit = self.link.host_bytes
        return limit is None or self.host + self.graph.value_bytes[gap.value] <= limit

    def start(self) -> None:
        """Start the next copy out."""
        gap = self.ready.pop(0)
        self.host += self.graph.value_bytes[gap.value]
        self.steps.append(Offload(gap.value))
        self.out_free = max(self.now, self.out_free) + self.link.to_host_ns(self.graph.value_bytes[gap.value])
        self.leaving.append((self.out_free, gap))

    def let_go(self, end: int, gap: Gap) -> None:
        """Wait for a copy out, and drop the value unless its gap was given up."""
        self.leaving.remove((end, gap))
        self.now = max(self.now, end)
        self.steps.append(Wait(gap.value))
        if gap in self.late:
            self.steps.append(Drop(gap.value))
            del self.late[gap]
            self.away.add(gap)
        else:
            self.copied.add(gap.value)

    def make_room(self, position: int, room: int) -> None:
        """Wait for copies out until the next op fits."""
        while sum(self.late.values()) > room:
            first = next((pair for pair in self.leaving if pair[1] in self.late), None)
            if first is not None:
                self.let_go(*first)
            elif self.ready and self.hosted(self.ready[0]):
                self.start()
            else:
                op = self.table.order[position]
                raise InvalidPlan(f"op {op} lacks {sum(self.late.values()) - room} bytes", position)

    def copy_back(self, position: int) -> None:
        """Start the copies back that have their place here."""
        for gap in sorted(self.backs[position], key=lambda gap: (gap.next, gap.value)):
            if gap in self.away:
                self.away.remove(gap)
                self.steps.append(Prefetch(gap.value))
                time = self.link.to_device_ns(self.graph.value_bytes[gap.value])
                self.back_free = self.returning[gap.value] = max(self.now, self.back_free) + time

    def compute(self, position: int, op: int) -> None:
        """Wait for what the op reads, run it, and free what dies."""
        for value in self.graph.op_inputs[op]:
            if value in self.returning:
                self.now = max(self.now, self.returning.pop(value))
                self.host -= self.graph.value_bytes[value]
                self.steps.append(Wait(value))
        kept = self.table.kept[position]
        self.steps.append(Compute(op, None if kept == self.graph.op_always[op] else kept))
        self.now += self.graph.op_cost_ns[op]
        dying = self.table.dying[position]
        for end, gap in [pair for pair in self.leaving if pair[1].value in dying or pair[1].next == position]:
            self.let_go(end, gap)
        self.steps.extend(Free(value) for value in dying)
        self.host -= sum(self.graph.value_bytes[value] for value in self.copied.intersection(dying))
        self.copied.difference_update(dying)


def chosen_gaps(
    table: Timetable, budget_bytes: int, allowed: Callable[[Gap], bool] = lambda gap: True, spare: int = 0
) -> list[Gap] | None:
    """Gaps that make every op fit with `spare` bytes to spare, or as nearly as they can; None where an op can't.

    Where most is lacking, the gap is taken next whose bytes are away longest for the time that the link takes, of those
    that the host has room for.
    """
    graph = table.graph
    assert graph.link is not None
    load = np.array(table.load, np.int64)
    gaps = [gap for gap in table.gaps if graph.value_bytes[gap.value] and allowed(gap)]
    size = np.array([graph.value_bytes[gap.value] for gap in gaps], np.int64)
    first = np.array([gap.last + 1 for gap in gaps], np.int64)
    end = np.array([gap.next for gap in gaps], np.int64)
    begin = np.array(table.begin, np.int64)
    times = [graph.link.to_host_ns(int(b)) + graph.link.to_device_ns(int(b)) for b in size]
    carried = np.array(times, np.int64)
    away = begin[end] - begin[first]
    # bytes · time that is free per time of the link; a gap shorter than its copies makes the plan wait
    worth = size * np.maximum(away, 1) / np.maximum(carried, 1) * np.where(away >= carried, 1.0, 1e-3)
    left = np.ones(len(gaps), np.bool_)
    chosen: list[Gap] = []
    over = load - budget_bytes + spare
    hard = np.zeros(len(load), np.bool_)
    limit, host = graph.link.host_bytes, np.zeros(len(load), np.int64)
    while True:
        wanting = np.where(hard, 0, over)
        worst = int(np.argmax(wanting))
        if wanting[worst] <= 0:
            return chosen
        there = np.flatnonzero(left & (first <= worst) & (end > worst))
        if not len(there):
            if load[worst] - budget_bytes > 0 and over[worst] > spare:
                return None
            hard[worst] = True
            continue
        best = int(there[np.argmax(worth[there])])
        left[best] = False
        there_for = slice(gaps[best].made + 1, end[best])
        if limit is not None and host[there_for].max() + size[best] > limit:
            continue
        host[there_for] += size[best]
        over[first[best] : end[best]] -= size[best]
        chosen.append(gaps[best])


def placed(problem: Problem, table: Timetable, moved: Collection[Gap]) -> Placed | None:
    """The plan of a choice of gaps; None where it does not fit."""
    try:
        return place(table, problem.budget_bytes, moved)
    except InvalidPlan:
        return None


def pruned(
    problem: Problem, table: Timetable, moved: Iterable[Gap], found: Placed, stop: Callable[[], bool]
) -> tuple[Placed, list[Gap]]:
    """Fewer gaps where the makespan does not rise without one: the largest values are tried first."""
    size = table.graph.value_bytes
    kept = list(moved)
    room = room_left(table, problem.budget_bytes, kept)
    for gap in sorted(kept, key=lambda gap: (-size[gap.value], gap)):
        if stop():
            break
        if room[gap.last + 1 : gap.next].min() < size[gap.value]:
            continue
        fewer = [other for other in kept if other != gap]
        better = placed(problem, table, fewer)
        if better is not None and better.cost_ns <= found.cost_ns:
            found, kept = better, fewer
            room[gap.last + 1 : gap.next] -= size[gap.value]
    return found, kept


INPUT = ChainStep(Verb.F_CK, 0)
"""What stands for making a^0, where that may leave."""
_VERB_OF_STEP: dict[type, Verb] = {step: Verb(verb) for verb, step in STEP_OF_VERB.items()}


def stored_graph(chain: Chain, steps: Sequence[ChainStep]) -> Graph:
    """The graph of forward and backward steps that each run once, in which what a step stores is a value.

    δ^L appears with B^L and goes with it: it is part of its workspace. An input that may leave is made by a step of its
    own.
    """
    made: list[tuple[int, int, int, list[int]]] = []  # by each step: cost, bytes, workspace, and what it reads
    stored: dict[int, int] = {}  # cut -> the step that made what is stored there
    gradient = -1
    for i, (verb, stage) in enumerate(steps):
        reads = [stored[cut] for cut in (stage - 1, *((stage,) if verb is Verb.B else ())) if cut in stored]
        if not stage:
            cost, size, workspace = 0, chain.fixed_bytes, 0
            stored[0] = i
        elif verb is Verb.B:
            last = stage == chain.stages
            cost, size = chain.backward_ns[stage - 1], chain.gradient_bytes[stage - 1]
            workspace = chain.backward_workspace_bytes[stage - 1] + (chain.gradient_bytes[stage] if last else 0)
            reads += [] if last else [gradient]
            gradient = i  # δ^(l−1)
        else:
            tape = verb is Verb.F_ALL
            cost = chain.forward_ns[stage - 1]
            size = chain.tape_bytes[stage - 1] if tape else chain.activation_bytes[stage]
            workspace = (chain.forward_workspace_bytes if tape else chain.untaped_workspaces)[stage - 1]
            stored[stage] = i
        made.append((cost, size, workspace, sorted(reads)))
    costs, sizes, workspaces, inputs = zip(*made, strict=True)
    return graph_of(
        costs,
        sizes,
        inputs,
        op_workspace_bytes=workspaces,
        keep=(len(costs) - 1,),
        backward_from=next(i for i, step in enumerate(steps) if step.verb is Verb.B),
        fixed_bytes=chain.staying_bytes,
    ).with_link(chain.link)


def stored(chain: Chain, steps: Iterable[ChainStep]) -> tuple[tuple[ChainStep, ...], Timetable]:
    """Steps that each store a value, behind that of an input that may leave, and what is there while each runs."""
    those = (*((INPUT,) if chain.input_may_leave else ()), *steps)
    return those, timetable(stored_graph(chain, those), range(len(those)))


def moved_plan(stored: Sequence[ChainStep], plan: Plan) -> ChainPlan:
    """The chain plan of a plan of `stored_graph`. A backward step frees what it has used, so copies of that out are
    waited for before it, not after.
    """
    steps: list[ChainStep] = []
    freed = {step.value: i for i, step in enumerate(plan.steps) if isinstance(step, Free)}
    computed = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
    backward = -1  # where the backward step is that ran last, if no forward step has run since
    for i, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            verb, stage = stored[step.op]
            if not stage:
                continue
            backward = len(steps) if verb is Verb.B else -1
            steps.append(ChainStep(Verb.F_CK if verb is Verb.F_NONE else verb, stage))
            continue
        cut = stored[step.value].stage
        found = ChainStep(_VERB_OF_STEP[type(step)], cut)
        dies = backward >= 0 and bisect(computed, freed.get(step.value, -1)) == bisect(computed, i)
        if isinstance(step, Free) and steps[-1] == ChainStep(Verb.F_CK, cut + 1):
            steps[-1] = ChainStep(Verb.F_NONE, cut + 1)
        elif not dies:
            steps.append(found)
        elif not isinstance(step, Free):
            steps.insert(backward, found)
            backward += 1
    return ChainPlan(tuple(steps))
