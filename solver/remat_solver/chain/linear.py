"""Graphs that are chains in disguise: forward ops on a path, each backward op reading its own stage's values."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import Chain, ChainPlan, Graph, Plan, Verb, plan_of
from remat_ir.plan import without_unread


@dataclass(frozen=True)
class LinearGraph:
    """A linear training graph as a chain, and the way back.

    Attributes:
        graph: the graph as posted.
        chain: the chain, whose plans need no less memory than the graph's plans made of them.
        backward_op: [L] the op that is B^l, or None where the graph has none for the stage; F^l is op l − 1.
        seed_op: the op that makes δ^L, or None.
    """

    graph: Graph
    chain: Chain
    backward_op: tuple[int | None, ...]
    seed_op: int | None

    def plan(self, plan: ChainPlan) -> Plan:
        """The plan of the graph that computes the same steps, without those that nothing in the graph reads."""
        computes: list[int] = []
        for verb, stage in plan.steps:
            if verb in (Verb.F_ALL, Verb.F_CK, Verb.F_NONE):
                computes.append(stage - 1)
            elif verb is Verb.B:
                first = self.seed_op if stage == self.chain.stages else None
                computes += (op for op in (first, self.backward_op[stage - 1]) if op is not None)
        return plan_of(self.graph, without_unread(self.graph, computes))


def linear_graph(graph: Graph) -> LinearGraph | None:
    """The chain that a graph is, or None.

    A linear training graph has forward ops on a path: op 0 reads nothing, op l reads one value, made by op l − 1, and
    any other value that a forward op makes is optional. An op that reads nothing, the incoming gradient, may follow.
    The rest are B^L, B^(L−1), …, down to some stage: B^l reads values that F^l makes, the value on the path that
    F^(l−1) makes, and what the op before it makes, which nothing else reads. No forward op but the last is confined to
    one run. Values that must be kept are charged from the start, so a plan never needs more in the graph.
    """
    longest = _path_length(graph)
    for count in range(longest, max(1, (graph.ops - 1) // 2 - 1), -1):
        found = _with_path(graph, count)
        if found is not None:
            return found
    return None


def _with_path(graph: Graph, count: int) -> LinearGraph | None:
    """The chain whose forward ops are the first `count`, or None."""
    if any(op < count - 1 for op in graph.once) or any(graph.value_op[v] < count for v in graph.keep):
        return None
    joints = [_joint(graph, op, count) for op in range(count)]
    optional = frozenset(graph.optional)
    for op, joint in enumerate(joints):
        if joint is None or any(value != joint and value not in optional for value in graph.op_values[op]):
            return None
    seeded = count < graph.ops and not graph.op_inputs[count] and not graph.op_workspace_bytes[count]
    first = count + seeded
    if not _mirrors(graph, count, first, joints):
        return None
    keep = frozenset(graph.keep)

    def made(op: int) -> int:
        return sum(graph.value_bytes[v] for v in graph.op_values[op] if v not in keep)

    ops = [first + count - stage if first + count - stage < graph.ops else None for stage in range(1, count + 1)]
    backward_ns = [0 if op is None else graph.op_cost_ns[op] for op in ops]
    backward_ns[-1] += graph.op_cost_ns[count] if seeded else 0
    chain = Chain(
        forward_ns=graph.op_cost_ns[:count],
        backward_ns=tuple(backward_ns),
        forward_workspace_bytes=graph.op_workspace_bytes[:count],
        backward_workspace_bytes=tuple(0 if op is None else graph.op_workspace_bytes[op] for op in ops),
        tape_bytes=tuple(map(made, range(count))),
        activation_bytes=(
            graph.fixed_bytes + sum(graph.value_bytes[v] for v in graph.keep),
            *(graph.value_bytes[joint] for joint in joints if joint is not None),
        ),
        gradient_bytes=(*(0 if op is None else made(op) for op in ops), made(count) if seeded else 0),
    )
    return LinearGraph(graph, chain, tuple(ops), count if seeded else None)


def _path_length(graph: Graph) -> int:
    """How many ops from the first on form a path, each reading one value of the one before it."""
    count = 0 if graph.op_inputs[0] else 1
    while 0 < count < graph.ops:
        inputs = graph.op_inputs[count]
        if len(inputs) != 1 or graph.value_op[inputs[0]] != count - 1:
            break
        count += 1
    return count


def _joint(graph: Graph, op: int, count: int) -> int | None:
    """The value a^l of F^l: what the next op on the path reads, or what the last one always makes."""
    if op + 1 < count:
        return graph.op_inputs[op + 1][0]
    always = graph.op_always[op]
    return always[0] if always else None


def _mirrors(graph: Graph, count: int, first: int, joints: list[int | None]) -> bool:
    """Whether the ops from `first` on read what B^L, B^(L−1), … of a chain may read."""
    if graph.ops - first > count:
        return False
    for op in range(first, graph.ops):
        own = count - 1 - (op - first)  # the forward op of the same stage
        for value in graph.op_inputs[op]:
            maker = graph.value_op[value]
            before = own > 0 and value == joints[own - 1]
            if not (maker == own or before or (maker == op - 1 and maker >= count)):
                return False
    return True
