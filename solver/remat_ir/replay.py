"""What a plan means: its steps run one by one in plain Python, sharing no code with any solver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .errors import InvalidPlan
from .graph import Graph
from .link import Link
from .plan import Compute, Drop, Free, Offload, Plan, Prefetch, Wait
from .words import readable


class Moment(NamedTuple):
    """What a replay sees when a step has run.

    `peak_bytes` is the memory while the step ran, `resident_bytes` after it, fixed bytes included in both; `cost_ns`
    is the cost so far, or the makespan where there is a link; `host_bytes` is what the host holds; `copy_ns` of a step
    that starts a copy is when that copy begins and ends.
    """

    step: int
    op: int | None
    peak_bytes: int
    resident_bytes: int
    cost_ns: int
    host_bytes: int = 0
    copy_ns: tuple[int, int] | None = None


def replay(graph: Graph, plan: Plan) -> Iterator[Moment]:
    """Run a plan step by step, without a budget.

    While an op runs, memory is: fixed + resident values + all its non-optional outputs, kept or not + the optional ones
    that it keeps + its workspace. A value whose copy out runs is resident until it is dropped; one whose copy back
    runs is charged from the step that starts the copy. Time passes while ops run and in waits.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.

    Example:
        >>> from remat_ir import graph_of, plain_plan
        >>> graph = graph_of([1, 2], [4, 8], [[], [0]])
        >>> [moment.peak_bytes for moment in replay(graph, plain_plan(graph)) if moment.op is not None]
        [4, 12]
    """
    state = _State(graph)
    for i, step in enumerate(plan.steps):
        op, span, before = None, None, state.memory
        if isinstance(step, Compute):
            op = step.op
            before = state.compute(step, i)
        elif isinstance(step, Free):
            state.free(step.value, i)
        else:
            span = state.copy(step, i)
        peak = before if before > state.memory else state.memory
        yield Moment(i, op, peak, state.memory, state.now_ns, state.host_bytes, span)
    if state.done < graph.ops:
        raise InvalidPlan(f"op {state.done} is never computed")
    if state.leaving or state.returning:
        raise InvalidPlan(f"the copy of value {min({*state.leaving, *state.returning})} is never waited for")


class _State:
    """What is resident, what of it the host has or gets, and the time.

    A value is in one of five places: on the device alone; on the device while its copy out runs (`leaving`); on both
    (`copied`); on the host alone (`away`); on the host while its copy back runs (`returning`).

    Attributes:
        host_bytes: what the host holds: each copy from the start of its copy out until its copy back has been waited
            for, or until the value is freed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.keep, self.once, self.consumes = map(frozenset, (graph.keep, graph.once, graph.consumes))
        self.consumed: dict[int, int] = {}  # value → the op that has consumed it
        self.resident: set[int] = set()  # what ops can read
        self.leaving: dict[int, int] = {}  # value -> when its copy ends
        self.returning: dict[int, int] = {}
        self.copied: set[int] = set()
        self.away: set[int] = set()
        self.ops = graph.ops
        self.done = 0  # ops 0 … done-1 have been computed: first computations come in op order
        self.memory, self.host_bytes, self.now_ns = graph.fixed_bytes, 0, 0
        self.out_free_ns = self.back_free_ns = 0  # when each direction of the link is free again

    def compute(self, step: Compute, i: int) -> int:
        """Run an op; returns the memory while it runs."""
        graph, op, resident, bytes_of = self.graph, step.op, self.resident, self.graph.value_bytes
        if not 0 <= op < self.ops:
            raise InvalidPlan(f"there is no op {op}", i)
        if op > self.done:
            raise InvalidPlan(f"op {op} is first computed before op {self.done}", i)
        if op < self.done and op in self.once:
            raise InvalidPlan(f"op {op} must be computed exactly once", i)
        for value in graph.op_inputs[op]:
            if value in self.consumed:
                raise InvalidPlan(f"op {op} reads value {value}, which op {self.consumed[value]} has consumed", i)
            if value not in resident:
                raise InvalidPlan(f"op {op} reads value {value}, which is not resident", i)
        made = kept = graph.op_always[op]
        if step.kept is not None:
            kept = step.kept
            if len(set(kept)) != len(kept):
                raise InvalidPlan(f"op {op} keeps a value twice", i)
            for value in kept:
                if not 0 <= value < graph.values or graph.value_op[value] != op:
                    raise InvalidPlan(f"op {op} keeps value {value}, which it does not make", i)
            made = tuple({*made, *kept})
        during = self.memory + graph.op_workspace_bytes[op]
        for value in made:
            if value in resident:
                raise InvalidPlan(f"op {op} makes value {value} while it is resident", i)
            if value in self.keep and value not in kept:
                raise InvalidPlan(f"op {op} drops value {value}, which must be kept to the end", i)
            if value in self.returning:
                raise InvalidPlan(f"op {op} makes value {value} while it is prefetched", i)
            if value in self.away and value in kept:
                raise InvalidPlan(f"op {op} keeps value {value}, which is on the host", i)
            during += bytes_of[value]
        for value in kept:
            self.memory += bytes_of[value]
        resident.update(kept)
        self.now_ns += graph.op_cost_ns[op]
        if self.consumes:
            self.consumed |= {v: op for v in graph.op_inputs[op] if v in self.consumes and graph.users[v][-1] == op}
        if op == self.done:
            self.done += 1
        return during

    def free(self, value: int, i: int) -> None:
        """Drop a resident value, and its copy on the host if there is one."""
        if value not in self.resident:
            raise InvalidPlan(f"value {value} is freed but not resident", i)
        if value in self.keep:
            raise InvalidPlan(f"value {value} must be kept to the end", i)
        if value in self.leaving:
            raise InvalidPlan(f"value {value} is freed while it is copied to the host", i)
        if value in self.copied:
            self.copied.remove(value)
            self.host_bytes -= self.graph.value_bytes[value]
        self.resident.remove(value)
        self.memory -= self.graph.value_bytes[value]

    def copy(self, step: Offload | Wait | Drop | Prefetch, i: int) -> tuple[int, int] | None:
        """A step that needs the link; of one that starts a copy, when the copy begins and ends."""
        value, bytes_of = step.value, self.graph.value_bytes
        if self.graph.link is None:
            raise InvalidPlan(f"{type(step).__name__.lower()} needs a link to the host, which this graph has not", i)
        if isinstance(step, Offload):
            return self.offload(self.graph.link, value, i)
        if isinstance(step, Prefetch):
            if value not in self.away:
                raise InvalidPlan(f"value {value} is prefetched but not on the host alone", i)
            self.away.remove(value)
            self.memory += bytes_of[value]
            begin = max(self.now_ns, self.back_free_ns)
            self.back_free_ns = self.returning[value] = begin + self.graph.link.to_device_ns(bytes_of[value])
            return begin, self.back_free_ns
        if isinstance(step, Wait):
            if value in self.leaving:
                self.now_ns = max(self.now_ns, self.leaving.pop(value))
                self.copied.add(value)
            elif value in self.returning:
                self.now_ns = max(self.now_ns, self.returning.pop(value))
                self.resident.add(value)
                self.host_bytes -= bytes_of[value]
            else:
                raise InvalidPlan(f"wait for value {value}, which is not being copied", i)
            return None
        if value not in self.copied:
            raise InvalidPlan(f"value {value} is dropped, but no copy of it to the host has been waited for", i)
        self.copied.remove(value)
        self.away.add(value)
        self.resident.remove(value)
        self.memory -= bytes_of[value]
        return None

    def offload(self, link: Link, value: int, i: int) -> tuple[int, int]:
        """Begin to copy a resident value out, behind the copies before it; when the copy begins and ends."""
        if value not in self.resident:
            raise InvalidPlan(f"value {value} is offloaded but not resident", i)
        if value in self.keep:
            raise InvalidPlan(f"value {value} must be kept to the end", i)
        if value in self.leaving or value in self.copied:
            raise InvalidPlan(f"value {value} is offloaded but already has a copy on the host", i)
        self.host_bytes += self.graph.value_bytes[value]
        if link.host_bytes is not None and self.host_bytes > link.host_bytes:
            held, limit = readable(self.host_bytes), readable(link.host_bytes)
            raise InvalidPlan(f"the host would hold {held}, over its limit of {limit}", i)
        begin = max(self.now_ns, self.out_free_ns)
        self.out_free_ns = self.leaving[value] = begin + link.to_host_ns(self.graph.value_bytes[value])
        return begin, self.out_free_ns
