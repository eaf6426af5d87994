"""Graphs of branches that meet: where their stages lie, and what plans of a join come to in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from remat_ir import Graph, Join, JoinPlan, JoinVerb, Plan, permitted, plan_of, without_unread

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
    """The branches that meet in a graph, two or more, each stage one forward op and one backward op; or None.

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
