"""Linear networks as they are captured: one value leads on from stage to stage; each stage has a backward part."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from remat_ir import Graph, Plan, plan_of
from remat_ir.graph import pinned_ops
from remat_ir.plan import makers, without_unread

LONG_LIVED = 0.3
"""Share of the forward ops that a value may outlive before it is one that stays: masks, positions."""
SMALL = 0.02
"""Share of all values' bytes that values that stay by choice may have; with more the network is not linear."""


@dataclass(frozen=True)
class LinearNetwork:
    """A training graph as stages 0 … L−1, each with forward ops and the backward ops that read its tape.

    Forward ops of later stages read one value of earlier ones, the joint, and values that stay: those that no op may
    make again, and small ones that live through much of the forward pass. Backward ops of a stage read its tape, the
    joint that leads into it, values that stay, and gradients. Gradients that are kept add up from part to part.

    Attributes:
        graph: the graph as posted.
        forward, backward: [L] the ops of each stage's forward part and backward part; backward parts may be empty.
        joints: [L] the value that leads on from each stage; none where only values that stay do.
        tapes: [L] the values of each stage that backward ops read; the joint is among them.
        stays: the values that stay.
        passed: small values that the first op of the backward pass reads besides: they stay until then.
    """

    graph: Graph
    forward: tuple[range, ...]
    backward: tuple[range, ...]
    joints: tuple[frozenset[int], ...]
    tapes: tuple[frozenset[int], ...]
    stays: frozenset[int]
    passed: frozenset[int] = frozenset()

    def invert(self, plan: Sequence[int]) -> Plan:
        """The plan of the graph that runs a sequence of ops, without the recomputations that nothing reads."""
        return plan_of(self.graph, without_unread(self.graph, plan))

    @property
    def stages(self) -> int:
        """The number of stages L."""
        return len(self.forward)

    def leads(self, stage: int) -> frozenset[int]:
        """The value that leads on from a stage, if there is one; into the first stage (after −1) none does."""
        return self.joints[stage] if stage >= 0 else frozenset()

    def needed(self, stage: int, targets: Iterable[int], given: Collection[int]) -> tuple[int, ...]:
        """The forward ops of a stage that make `targets` again out of `given` and values that stay, in order."""

        def missing(value: int) -> bool:
            return value not in given and value not in self.stays and self.graph.value_op[value] in self.forward[stage]

        return tuple(sorted(makers(self.graph, targets, missing)))

    def bytes_of(self, values: Iterable[int]) -> int:
        """What values weigh."""
        return sum(self.graph.value_bytes[v] for v in values)


def linear_network(graph: Graph) -> LinearNetwork | None:
    """The stages of a training graph whose network is linear, at the level of ops or of blocks; None where it is not.

    The forward pass is cut where at most one value leads on that does not stay, and backward ops read it. Stages whose
    backward parts cannot be told apart are one stage.
    """
    split = graph.backward_from
    if split is None or split < 2:
        return None
    stays = _staying(graph, split)
    if stays is None:
        return None
    passed = _passed(graph, split, stays)
    ends = narrow_places(graph, split, stays)
    while len(ends) > 1:
        parts, merged = _backward_parts(graph, ends, stays, passed)
        if not merged:
            found = _network(graph, ends, parts, stays, passed)
            return found if _can_run_again(found) else None
        ends = [end for stage, end in enumerate(ends) if stage not in merged]
    return None


def _staying(graph: Graph, split: int) -> frozenset[int] | None:
    """Forward values that stay until their last use; None where those that need not would be too large."""
    pinned = frozenset(value for op in pinned_ops(graph) if op < split for value in graph.op_values[op])
    chosen = long_lived(graph, split) - pinned
    small = sum(graph.value_bytes[value] for value in chosen) <= SMALL * sum(graph.value_bytes)
    return pinned | chosen if small else None


def long_lived(graph: Graph, split: int) -> frozenset[int]:
    """Values that live through much of the forward pass: they are small, or there is no narrow place."""
    return frozenset(value for value, op, last in forward_lives(graph, split) if last > op + max(8, LONG_LIVED * split))


def forward_lives(graph: Graph, split: int) -> Iterator[tuple[int, int, int]]:
    """Each value of the forward pass, the op that makes it, and the last forward op that reads it, or else that one."""
    for value, op in enumerate(graph.value_op):
        if op >= split:
            break
        yield value, op, max((user for user in graph.users[value] if user < split), default=op)


def _passed(graph: Graph, split: int, stays: frozenset[int]) -> frozenset[int]:
    """Small values that the first op of the backward pass reads, such as the statistics of batches that it writes."""
    found = [v for v in graph.op_inputs[split] if graph.value_op[v] < split and v not in stays]
    small = sum(graph.value_bytes[v] for v in found) <= SMALL * sum(graph.value_bytes)
    return frozenset(found if small else ())


def narrow_places(graph: Graph, split: int, stays: frozenset[int], least: int = 0) -> list[int]:
    """The forward ops after which at most one value that does not stay leads on, and backward ops read it; the last.

    `least` may be one, for those after which some value does.
    """
    crossing, unread = [0] * (split + 1), [0] * (split + 1)
    for value, op, last in forward_lives(graph, split):
        if value not in stays and last > op:
            for counts, wanted in ((crossing, True), (unread, graph.users[value][-1] < split)):
                counts[op] += wanted
                counts[last] -= wanted
    there = zip(itertools.accumulate(crossing[: split - 1]), itertools.accumulate(unread[: split - 1]), strict=True)
    ends = [op for op, (across, alone) in enumerate(there) if least <= across <= 1 and not alone]
    return [*ends, split - 1]


def stage_of(ends: Sequence[int]) -> list[int]:
    """[ends[-1] + 1] the stage of each forward op."""
    place: list[int] = []
    for stage, end in enumerate(ends):
        place += [stage] * (end + 1 - len(place))
    return place


def _backward_parts(
    graph: Graph, ends: list[int], stays: frozenset[int], passed: frozenset[int]
) -> tuple[list[int], set[int]]:
    """[L] where each stage's backward part begins, and the stages that must be one with the next.

    A joint may be read by the parts of its own stage and of the next, any other value of a stage by its own part only;
    parts come in falling order, and each begins where the fewest bytes of gradients lead on to it.
    """
    first, top = ends[-1] + 1, len(ends) - 1
    place = stage_of(ends)
    merged: set[int] = set()
    leads_on = [False] * graph.values
    for value, op, last in forward_lives(graph, first):
        if value not in stays:
            leads_on[value] = place[last] > place[op]
            merged.update(range(place[op] + 1, place[last]))
    lows, highs = [0] * graph.ops, [top] * graph.ops
    for op in range(first, graph.ops):
        for value in graph.op_inputs[op]:
            maker = graph.value_op[value]
            if maker < first and value not in stays and not (op == first and value in passed):
                lows[op] = max(lows[op], place[maker])
                highs[op] = min(highs[op], place[maker] + leads_on[value])
    lowest = list(itertools.accumulate(reversed(lows), max))[::-1]
    highest = list(itertools.accumulate(highs, min))
    for op in range(first, graph.ops):
        merged.update(range(highest[op], lowest[op]))
    if merged:
        return [], merged
    crossing = _gradients_before(graph, first)
    starts = [first]
    for part in reversed(range(top)):
        earliest = next((op for op in range(starts[-1], graph.ops) if lowest[op] <= part), graph.ops)
        latest = next((op for op in range(earliest, graph.ops) if highest[op] <= part), graph.ops)
        starts.append(min(range(earliest, latest + 1), key=lambda op: (crossing[op], op)))
    return starts[::-1], merged


def _gradients_before(graph: Graph, first: int) -> list[int]:
    """[ops + 1] the bytes that backward ops before an op make, that ops from it on read, and that need not stay."""
    change = [0] * (graph.ops + 2)
    keep = frozenset(graph.keep)
    for value, op in enumerate(graph.value_op):
        if op >= first and value not in keep and graph.users[value]:
            change[op + 1] += graph.value_bytes[value]
            change[graph.users[value][-1] + 1] -= graph.value_bytes[value]
    return list(itertools.accumulate(change))


def _network(
    graph: Graph, ends: list[int], starts: list[int], stays: frozenset[int], passed: frozenset[int]
) -> LinearNetwork:
    first, count = ends[-1] + 1, len(ends)
    place = stage_of(ends)
    joints: list[frozenset[int]] = [frozenset()] * count
    tapes: list[set[int]] = [set() for _ in ends]
    for value, op, last in forward_lives(graph, first):
        if value in stays or not graph.users[value]:
            continue
        if place[last] > place[op]:
            joints[place[op]] = frozenset((value,))
        if graph.users[value][-1] >= first + (value in passed):
            tapes[place[op]].add(value)
    return LinearNetwork(
        graph,
        tuple(range(ends[i - 1] + 1 if i else 0, ends[i] + 1) for i in range(count)),
        tuple(range(starts[i], starts[i - 1] if i else graph.ops) for i in range(count)),
        tuple(joints),
        tuple(map(frozenset, tapes)),
        frozenset(v for v in stays if graph.users[v] or v in frozenset(graph.keep)),
        passed,
    )


def _can_run_again(network: LinearNetwork) -> bool:
    """Whether no op that runs again makes a value that is there still, and all may: nothing consumes what they read.

    A value is there still that stays and that something reads later.

    The last stage runs once in every persistent schedule, and nothing runs again before its backward part has ended.
    """
    graph, again = network.graph, network.backward[-1].stop
    keep = frozenset(graph.keep)
    held = {graph.value_op[v] for v in network.stays if v in keep or graph.users[v][-1] >= again}
    for stage in range(network.stages - 1):
        wanted = network.tapes[stage] | network.leads(stage)
        needed, until = network.needed(stage, wanted, network.leads(stage - 1)), network.backward[stage].start
        if not held.isdisjoint(needed) or any(graph.last_stage[op] < until for op in needed):
            return False
    return True
