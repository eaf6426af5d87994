"""The check that no plan fits, by pairs of values that are never resident at one moment (P12).

Take the first moment at which two values of a pair are both resident. One of them, say u, has just been made by its op
o, and v was resident while o ran or was made by o too. So if for each of the two in the place of u that takes more
memory than there is, or needs another pair before, there is no such moment.
"""

from __future__ import annotations

from itertools import accumulate

from ..chain import Chain
from ..graph import Graph
from ..problem import Subject
from .certificate import PairProof
from .rows import InvalidProof

MOST_STEPS = 50_000_000


class PairCheck:
    """What follows from the pairs of a certificate about a graph under a capacity (bytes, fixed ones left out)."""

    def __init__(self, graph: Graph, capacity: int, proof: PairProof) -> None:
        self.graph, self.capacity, self.proof = graph, capacity, proof
        self.never = frozenset(proof.pairs)
        self._optional, self._keep = frozenset(graph.optional), frozenset(graph.keep)
        made = (sum(graph.value_bytes[v] for v in values if v in self._keep) for values in graph.op_values)
        self._kept_before = (0, *accumulate(made))
        self._steps = 0

    def together(self, u: int, v: int) -> bool:
        """Whether the certificate leaves open that two values are resident at one moment."""
        return (min(u, v), max(u, v)) not in self.never

    def blocked(self, op: int) -> bool:
        """Whether an op needs inputs that are never resident together."""
        inputs = self.graph.op_inputs[op]
        self._steps += len(inputs) ** 2 + 1
        if self._steps > MOST_STEPS:
            raise InvalidProof(f"the pairs take more than {MOST_STEPS} steps to check")
        return any(not self.together(u, v) for i, u in enumerate(inputs) for v in inputs[i:])

    def apart(self, u: int, v: int) -> bool:
        """Whether it follows from the pairs that two values are never resident together, whichever is made last."""
        return self._not_after(u, v) and self._not_after(v, u)

    def need_to_make(self, last: int, other: int) -> int:
        """Bytes while a value is made and another one is resident, or made by the same op."""
        graph, op, maker = self.graph, self.graph.value_op[last], self.graph.value_op[other]
        own = (*(v for v in graph.op_inputs[op] if v not in self._keep), *graph.op_always[op])
        need = sum(graph.value_bytes[v] for v in own) + graph.op_workspace_bytes[op]
        need += graph.value_bytes[last] if last in self._optional else 0
        # kept values of all ops before the later of the two; those that this op makes are counted already
        after = max(op, maker)
        need += self._kept_before[after] - (self._kept_before[op + 1] - self._kept_before[op] if after > op else 0)
        if other not in self._keep and maker != op and other not in graph.op_inputs[op]:
            need += graph.value_bytes[other]
        return need

    def _not_after(self, last: int, other: int) -> bool:
        op = self.graph.value_op[last]
        if self.need_to_make(last, other) > self.capacity or self.blocked(op):
            return True
        if self.graph.value_op[other] == op:
            return False
        return any(not self.together(v, other) for v in (other, *self.graph.op_inputs[op]))


def certain_need(subject: Subject) -> int:
    """Bytes, fixed ones included, that every plan needs for what a single op needs alone, which takes no certificate.

    Of a chain it is that of its lift, since what an op reads and makes is on the device, whatever the host holds; but
    for an input that may leave. Of a join nothing is certain.
    """
    graph = subject.to_graph() if isinstance(subject, Chain) else subject
    if not isinstance(graph, Graph):
        return 0
    return max(graph.first_needs) + (subject.staying_bytes if isinstance(subject, Chain) else graph.fixed_bytes)


def check_pairs(check: PairCheck) -> None:
    """Check that every pair follows from the others, and that the op then cannot run.

    Raises:
        InvalidProof: that does not follow.
    """
    graph, proof = check.graph, check.proof
    if proof.pairs and graph.link is not None:
        raise InvalidProof("pairs prove nothing where a value may come back from the host")
    if len(check.never) != len(proof.pairs) or any(not 0 <= u <= v < graph.values for u, v in check.never):
        raise InvalidProof(f"pairs must be different, each (u, v) with u ≤ v below {graph.values}")
    if not 0 <= proof.op < graph.ops:
        raise InvalidProof(f"there is no op {proof.op}")
    for u, v in proof.pairs:
        if not check.apart(u, v):
            raise InvalidProof(f"values {u} and {v} are not proved to be apart")
    if graph.first_needs[proof.op] <= check.capacity and not check.blocked(proof.op):
        raise InvalidProof(f"op {proof.op} is not proved to be impossible")
