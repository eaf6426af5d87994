"""Graphs of branches that meet: where their stages lie, and what plans of a join come to in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from .graph import Graph
from .join import Join, JoinPlan, JoinVerb
from .plan import Plan, permitted, plan_of, without_unread

Group: TypeAlias = tuple[int, ...]
"""The ops of one stage, ascending."""


@dataclass(frozen=True)
class Branches:
    """The stages of a training graph whose forward ops are branches that meet in a head (RR-9273, Section 3, in bytes).

    Attributes:
        graph: the graph; all ops before `backward_from` are forward ops.
        forward, backward: [branches][stages] the forward and the backward ops of each stage; of the latter maybe none.
        head: the ops of what the branches meet in, forward and backward, in op order.
    """

    graph: Graph
    forward: tuple[tuple[Group, ...], ...]
    backward: tuple[tuple[Group, ...], ...]
    head: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """[branches] how many stages each has."""
        return tuple(map(len, self.forward))

    @property
    def homogeneous(self) -> bool:
        """Whether all stages cost the same and make values of the same sizes, forward and backward."""
        graph = self.graph

        def looks(branches: tuple[tuple[Group, ...], ...]) -> set[tuple[tuple[int, int, Group], ...]]:
            return {
                tuple(
                    (
                        graph.op_cost_ns[op],
                        graph.op_workspace_bytes[op],
                        tuple(graph.value_bytes[v] for v in graph.op_values[op]),
                    )
                    for op in ops
                )
                for branch in branches
                for ops in branch
            }

        return len(looks(self.forward)) <= 1 and len(looks(self.backward)) <= 1

    def homogenized(self, slots: int) -> Join:
        """The join of as many equal steps, each of the mean cost, in so many slots of the largest activation.

        A backward step that reads what its own stage made counts a forward step, too: it runs right before.
        """
        graph, count = self.graph, max(1, sum(self.lengths))

        def cost(groups: Iterable[Group]) -> int:
            return sum(graph.op_cost_ns[op] for ops in groups for op in ops)

        forward, backward = (cost(ops for branch in side for ops in branch) for side in (self.forward, self.backward))
        again = cost(
            f
            for fs, bs in zip(self.forward, self.backward, strict=True)
            for f, b in zip(fs, bs, strict=True)
            if self._taped(f, b)
        )
        ops = [op for branch in self.forward for group in branch for op in group]
        sizes = [graph.value_bytes[v] for op in ops for v in graph.op_always[op]]
        turn = cost((self.head,))
        return Join(self.lengths, forward // count, (backward + again) // count, turn, slots, max(1, *sizes))

    def plan(self, plan: JoinPlan) -> Plan:
        """The steps of a join plan on the graph's ops, its backward steps in the graph's order.

        Forward steps before the turn are put into op order (RR-9273, Lemma 1). After it branches do not depend on each
        other, so each one's steps run when the graph's order comes to it. Whether it fits is the verifier's to say.
        """
        turn = next(i for i, step in enumerate(plan.steps) if step.verb is JoinVerb.TURN)
        streams: list[list[tuple[JoinVerb, int]]] = [[] for _ in self.forward]
        for verb, branch, at in plan.steps[turn + 1 :]:
            if verb in (JoinVerb.F, JoinVerb.B):
                streams[branch].append((verb, at))
        first = {ops[0]: (j, i) for j, groups in enumerate(self.backward) for i, ops in enumerate(groups) if ops}
        computes = list(range(self.graph.backward_from or 0))
        for op in range(len(computes), self.graph.ops):
            for stage in self._before(streams, *first[op]) if op in first else ():
                computes += stage
            computes.append(op)
        unrepeated = [op for op, _ in groupby(permitted(self.graph, computes))]  # made twice in a row
        return plan_of(self.graph, without_unread(self.graph, unrepeated))

    def _before(self, streams: list[list[tuple[JoinVerb, int]]], branch: int, stage: int) -> Iterator[Group]:
        """The forward stages that run again before a backward stage; later stages without backward ops are passed."""
        stream = streams[branch]
        while stream:
            verb, at = stream.pop(0)
            group = self.forward[branch][at]
            if verb is JoinVerb.F or (at == stage and self._taped(group, self.backward[branch][at])):
                yield group
            if verb is JoinVerb.B and at <= stage:
                return

    def _taped(self, forward: Group, backward: Group) -> bool:
        """Whether a backward op reads what a forward op of its own stage made."""
        return any(self.graph.value_op[v] in forward for op in backward for v in self.graph.op_inputs[op])


def backward_order(plan: JoinPlan) -> list[int]:
    """The branches of a plan's backward steps, in order."""
    return [step.branch for step in plan.steps if step.verb is JoinVerb.B]


def branches_of(graph: Graph) -> Branches | None:
    """The branches that meet in a graph, two or more, or None: of single ops, or as a module is captured."""
    return _of_single_ops(graph) or captured_branches(graph)


def _of_single_ops(graph: Graph) -> Branches | None:
    """Branches of which each stage is one forward op and one backward op.

    Forward ops read one value of another forward op at most, but the first of the head (which may be the first backward
    op) reads the ends of all branches; later ones belong to the head. Each backward op of a branch reads a gradient and
    values of its own stage and of the stage before, and there is one for each stage, in falling order; all others are
    the head's.
    """
    turn = graph.backward_from
    if turn is None:
        return None
    sources = [sorted({graph.value_op[v] for v in graph.op_inputs[op]}) for op in range(turn + 1)]
    meets = next((op for op in range(turn + 1) if len(sources[op]) > 1), None)
    if meets is None:
        return None
    paths: list[tuple[int, ...]] = []
    for end in sources[meets]:
        path = [end]
        while sources[path[-1]]:
            path.append(sources[path[-1]][0])
        paths.append(tuple(reversed(path)))
    inside = [op for path in paths for op in path]
    if len(set(inside)) != len(inside) or any(set(sources[op]) & set(inside) for op in range(meets + 1, turn + 1)):
        return None
    place = {op: (j, i) for j, path in enumerate(paths) for i, op in enumerate(path)}
    backward = _backward_ops(graph, turn, place, [len(path) for path in paths])
    if backward is None:
        return None
    taken = {*inside, *(op for ops in backward for op in ops)}
    head = tuple(op for op in range(graph.ops) if op not in taken)
    return Branches(graph, _singles(paths), _singles(backward), head)


def _singles(branches: Sequence[Sequence[int]]) -> tuple[tuple[Group, ...], ...]:
    return tuple(tuple((op,) for op in branch) for branch in branches)


def _backward_ops(
    graph: Graph, turn: int, place: dict[int, tuple[int, int]], lengths: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """[branches][stages] the backward op of each stage, or None where they are no mirror of the forward ops."""
    branch_of: dict[int, int] = {}  # backward op -> its branch
    left = list(lengths)
    found: list[list[int]] = [[] for _ in lengths]
    for op in range(turn, graph.ops):
        makers = {graph.value_op[v] for v in graph.op_inputs[op]}
        reads = {place[maker] for maker in makers if maker in place}
        owners = {j for j, _ in reads} or {branch_of[maker] for maker in makers if maker in branch_of}
        if len(owners) != 1:
            if reads and any(left[j] != lengths[j] for j, _ in reads):
                return None
            continue
        (j,) = owners
        stage = left[j] - 1
        if stage < 0 or not reads <= {(j, stage), (j, stage - 1)}:
            return None
        left[j] = stage
        branch_of[op] = j
        found[j].append(op)
    return tuple(tuple(reversed(ops)) for ops in found) if not any(left) else None


_SMALL = 4
"""How much smaller than the largest value that its op leads on with one is that leads nowhere: running statistics."""


def captured_branches(graph: Graph) -> Branches | None:
    """Branches as a module is captured: stages of several ops, parameters whose gradients meet, buffers.

    The head begins where the two largest parts of the forward pass that have not met before meet, counted in ops, and
    wherever else parts half as large do. A branch is cut where one value alone leads on. Backward ops belong to the
    stage whose values they read, in falling order; what reads several branches, such as the sum of a shared parameter's
    gradients, is the head's.
    """
    turn = graph.backward_from
    if turn is None:
        return None
    reads = _leading(graph, turn)
    sources = [sorted({graph.value_op[v] for v in values}) for values in reads]
    head: set[int] = set()
    least = 2
    while (met := _meeting([() if op in head else found for op, found in enumerate(sources)])) is not None:
        op, size = met
        if size < least:
            break
        least = max(least, size // 2)
        for later in range(op, turn):
            if later == op or not head.isdisjoint(sources[later]):
                head.add(later)
    root = _parts([() if op in head else found for op, found in enumerate(sources)])
    ends = {v for op in head for v in reads[op] if graph.value_op[v] not in head}
    last: dict[int, int] = {}
    for op, values in enumerate(reads):
        last |= dict.fromkeys(values, op)
    last |= dict.fromkeys(ends, turn)
    parts = [
        [op for op in range(turn) if root[op] == part and op not in head]
        for part in sorted({root[graph.value_op[v]] for v in ends})
    ]
    stages = [found for ops in parts if len(found := _stages(graph, ops, last, ends)) > 1]
    if len(stages) < 2:
        return None
    backward = _captured_backward(graph, turn, stages)
    taken = {op for side in (stages, backward) for branch in side for ops in branch for op in ops}
    rest = tuple(op for op in range(graph.ops) if op not in taken)
    return Branches(graph, tuple(map(tuple, stages)), backward, rest)


def _leading(graph: Graph, turn: int) -> list[tuple[int, ...]]:
    """[forward ops] the values that each reads, without those whose op leads on with much larger ones."""
    most = [
        max((graph.value_bytes[v] for v in made if graph.users[v] and graph.users[v][0] < turn), default=0)
        for made in graph.op_values
    ]
    return [
        tuple(v for v in graph.op_inputs[op] if _SMALL * graph.value_bytes[v] >= most[graph.value_op[v]])
        for op in range(turn)
    ]


def _parts(sources: Sequence[Sequence[int]]) -> list[int]:
    """[ops] the first op of the part of the graph that each is connected with."""
    root = list(range(len(sources)))

    def top(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    for op, found in enumerate(sources):
        for source in found:
            low, high = sorted((top(op), top(source)))
            root[high] = low
    return [top(op) for op in range(len(sources))]


def _meeting(sources: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The op that joins the two parts of which the smaller is largest, and the smaller one's ops."""
    part = list(range(len(sources)))
    members = [[op] for op in part]
    best: tuple[int, int] | None = None
    for op, found in enumerate(sources):
        joined = sorted({part[source] for source in found}, key=lambda one: -len(members[one]))
        if len(joined) > 1 and (best is None or len(members[joined[1]]) > best[1]):
            best = (op, len(members[joined[1]]))
        for other in joined:
            large, small = sorted((part[op], other), key=lambda one: -len(members[one]))
            if large != small:
                for one in members[small]:
                    part[one] = large
                members[large] += members[small]
    return best


def _stages(graph: Graph, ops: Sequence[int], last: dict[int, int], ends: set[int]) -> list[Group]:
    """The ops of a branch, cut where one value alone leads on, and none to the head."""
    found: list[Group] = []
    group: list[int] = []
    live: set[int] = set()
    for op in ops:
        group.append(op)
        live = {v for v in (*live, *graph.op_values[op]) if last.get(v, -1) > op}
        if len(live) == 1 and live.isdisjoint(ends):
            found.append(tuple(group))
            group = []
    if group:
        found.append(tuple(group))
    return found


def _captured_backward(graph: Graph, turn: int, stages: Sequence[Sequence[Group]]) -> tuple[tuple[Group, ...], ...]:
    """[branches][stages] the backward ops of each stage, in falling order of stages."""
    place = {op: (j, i) for j, branch in enumerate(stages) for i, ops in enumerate(branch) for op in ops}
    branch_of: dict[int, int] = {}
    at = [len(branch) - 1 for branch in stages]
    found: list[list[list[int]]] = [[[] for _ in branch] for branch in stages]
    for op in range(turn, graph.ops):
        makers = {graph.value_op[v] for v in graph.op_inputs[op]}
        reads = {place[maker] for maker in makers if maker in place}
        owners = {j for j, _ in reads} | {branch_of[maker] for maker in makers if maker in branch_of}
        if len(owners) != 1:
            continue
        (j,) = owners
        # of what the stage before made, the last op's values lead into this one
        ends = {i for i, ops in enumerate(stages[j]) if ops[-1] in makers}
        stage = next(
            (p for p in range(at[j], -1, -1) if all(i == p or (i == p - 1 and i in ends) for _, i in reads)), None
        )
        at[j] = at[j] if stage is None else stage
        branch_of[op] = j
        found[j][at[j]].append(op)
    return tuple(tuple(map(tuple, branch)) for branch in found)
