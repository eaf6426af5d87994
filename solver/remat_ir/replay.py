"""What a plan means: its steps run one by one in plain Python, sharing no code with any solver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .errors import InvalidPlan
from .graph import Graph
from .plan import Compute, Free, Plan


class Moment(NamedTuple):
    """What a replay sees when a step has run.

    `peak_bytes` is the memory while the step ran, `resident_bytes` after it, fixed bytes included in both; `cost_ns`
    is the cost so far.
    """

    step: int
    op: int | None
    peak_bytes: int
    resident_bytes: int
    cost_ns: int


def replay(graph: Graph, plan: Plan) -> Iterator[Moment]:
    """Run a plan step by step, without a budget.

    While an op runs, memory is: fixed + resident values + all its non-optional outputs, kept or not + the optional ones
    that it keeps + its workspace.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.
    """
    keep, once = frozenset(graph.keep), frozenset(graph.once)
    resident: set[int] = set()
    done = 0  # ops 0 … done-1 have been computed: first computations come in op order
    memory, cost = graph.fixed_bytes, 0
    for i, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            op = step.op
            if not 0 <= op < graph.ops:
                raise InvalidPlan(f"there is no op {op}", i)
            if op > done:
                raise InvalidPlan(f"op {op} is first computed before op {done}", i)
            if op < done and op in once:
                raise InvalidPlan(f"op {op} must be computed exactly once", i)
            for value in graph.op_inputs[op]:
                if value not in resident:
                    raise InvalidPlan(f"op {op} reads value {value}, which is not resident", i)
            always = graph.op_always[op]
            kept = always if step.kept is None else step.kept
            if kept is not always and len(set(kept)) != len(kept):
                raise InvalidPlan(f"op {op} keeps a value twice", i)
            for value in kept:
                if not 0 <= value < graph.values or graph.value_op[value] != op:
                    raise InvalidPlan(f"op {op} keeps value {value}, which it does not make", i)
            made = always if step.kept is None else tuple({*always, *kept})
            for value in made:
                if value in resident:
                    raise InvalidPlan(f"op {op} makes value {value} while it is resident", i)
                if value in keep and value not in kept:
                    raise InvalidPlan(f"op {op} drops value {value}, which must be kept to the end", i)
            during = memory + sum(graph.value_bytes[v] for v in made) + graph.op_workspace_bytes[op]
            resident.update(kept)
            memory += sum(graph.value_bytes[v] for v in kept)
            cost += graph.op_cost_ns[op]
            done = max(done, op + 1)
            yield Moment(i, op, during, memory, cost)
        elif isinstance(step, Free):
            if step.value not in resident:
                raise InvalidPlan(f"value {step.value} is freed but not resident", i)
            if step.value in keep:
                raise InvalidPlan(f"value {step.value} must be kept to the end", i)
            resident.remove(step.value)
            before, memory = memory, memory - graph.value_bytes[step.value]
            yield Moment(i, None, before, memory, cost)
        else:
            raise InvalidPlan(f"{type(step).__name__.lower()} needs a link to the host, which a graph has not", i)
    if done < graph.ops:
        raise InvalidPlan(f"op {done} is never computed")
