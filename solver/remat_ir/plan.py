"""A plan is data: a tuple of small actions. Executor, verifier, cost model and plots are folds over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from .document import Anything, Array, Document, Member, Unread
from .errors import InvalidData
from .graph import Graph
from .read import integers, kind

FORMAT = "remat-plan/1"
MOST_STEPS = 50_000_000


def plan_document(*formats: str) -> Document:
    """A plan of one of these forms: what a step is, is for the form to say."""
    names = [f"`{name}`" for name in formats]
    about = f"A {', '.join(names[:-1])} or {names[-1]}." if len(names) > 1 else f"A {names[0]}."
    steps = Unread(Array(Anything()), cap=MOST_STEPS)
    return Document("PlanDocument", "plan", about, {"steps": Member(steps)}, formats, open=len(names) > 1)


class Compute(NamedTuple):
    """Run an op; `kept` are the outputs that stay resident after it, ascending.

    None keeps all outputs that the op always makes and no optional one.
    """

    op: int
    kept: tuple[int, ...] | None = None


class Free(NamedTuple):
    """Drop a resident value."""

    value: int


class Offload(NamedTuple):
    """Start the copy of a value to the host; it stays charged on the device."""

    value: int


class Wait(NamedTuple):
    """Block until the value's running transfer has ended."""

    value: int


class Drop(NamedTuple):
    """Free the device copy of a value whose offload has ended."""

    value: int


class Prefetch(NamedTuple):
    """Start the copy of a value back from the host; charged from its start, usable after `Wait`."""

    value: int


Step: TypeAlias = Compute | Free | Offload | Wait | Drop | Prefetch

STEP_OF_VERB: dict[str, type[Free] | type[Offload] | type[Wait] | type[Drop] | type[Prefetch]] = {
    "free": Free,
    "offload": Offload,
    "wait": Wait,
    "drop": Drop,
    "prefetch": Prefetch,
}
"""What each verb but `compute` makes of a value; in a chain plan, of what is stored at a cut."""
_NAMES: dict[type, str] = {verb: name for name, verb in STEP_OF_VERB.items()}


@dataclass(frozen=True)
class Plan:
    """The steps of one training step, in order (`remat-plan/1`).

    Example:
        >>> from remat_ir import graph_of, plain_plan
        >>> plain_plan(graph_of([1, 2], [4, 8], [[], [0]])).computes
        (0, 1)
    """

    steps: tuple[Step, ...]

    @property
    def computes(self) -> tuple[int, ...]:
        """The ops in the order in which they run, recomputations included."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))

    def to_json(self) -> dict[str, Any]:
        """The `remat-plan/1` object."""
        rows: list[list[Any]] = []
        for step in self.steps:
            if isinstance(step, Compute):
                rows.append(["compute", step.op] if step.kept is None else ["compute", step.op, list(step.kept)])
            else:
                rows.append([_NAMES[type(step)], step.value])
        return {"format": FORMAT, "steps": rows}

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Read a `remat-plan/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names the step.
        """
        rows = _DOCUMENT.read(data)["steps"]
        return cls(_plain_steps(rows) or tuple(map(_read_step, rows, range(len(rows)))))


_DOCUMENT = plan_document(FORMAT)
_MAKERS: dict[str, type[Step]] = {"compute": Compute, **STEP_OF_VERB}


def _plain_steps(rows: Sequence[object]) -> tuple[Step, ...] | None:
    """The steps where each is a list of a verb and a number, as nearly all are; None where `_read_step` has to look."""
    if not rows or set(map(type, rows)) != {list} or set(map(len, rows)) != {2}:  # type: ignore[arg-type]
        return None
    verbs, numbers = zip(*rows, strict=True)
    if set(map(type, verbs)) != {str} or set(map(type, numbers)) != {int} or min(numbers) < 0:
        return None
    if not set(verbs) <= _MAKERS.keys():
        return None
    return tuple([_MAKERS[verb](number) for verb, number in zip(verbs, numbers, strict=True)])


def _read_step(row: object, i: int) -> Step:
    if not isinstance(row, (list, tuple)) or not 2 <= len(row) <= 3:
        raise InvalidData(f"step {i} must be [verb, number] or ['compute', op, [values]]", f"/steps/{i}")
    verb, number = row[0], row[1]
    if type(number) is not int or number < 0:
        raise InvalidData(f"step {i}: {number!r} must be a non-negative integer", f"/steps/{i}/1")
    if len(row) == 2 and verb == "compute":
        return Compute(number)
    here = f"/steps/{i}"
    if verb == "compute":
        kept = integers(row[2], f"step {i}: kept", here + "/2")
        if any(b <= a for a, b in pairwise(kept)):
            raise InvalidData(f"step {i}: kept values must ascend", here + "/2")
        return Compute(number, kept)
    if not isinstance(verb, str):
        raise InvalidData(f"step {i}: the verb is {kind(verb)}", here + "/0")
    if verb not in STEP_OF_VERB:
        raise InvalidData(f"step {i}: unknown verb {verb!r}", here + "/0")
    if len(row) == 3:
        raise InvalidData(f"step {i}: {verb} takes one number", here)
    return STEP_OF_VERB[verb](number)


def plan_of(graph: Graph, sequence: Iterable[int]) -> Plan:
    """The least-memory plan that computes ops in the given order.

    Every use reads the latest instance of a value; an instance is kept only if something reads it, or the graph keeps
    it, and is freed after its last use. `sequence` lists ops, recomputations included. Whether the result obeys the
    problem (first computations in order, inputs there, budget) is the verifier's to say.
    """
    order = tuple(sequence)
    current: dict[int, int] = {}  # value -> position of the compute that made its latest instance
    last: dict[tuple[int, int], int] = {}  # (value, position made) -> position of its last use
    keep = frozenset(graph.keep)
    for position, op in enumerate(order):
        for value in graph.op_inputs[op]:
            if value in current:
                last[value, current[value]] = position
        for value in graph.op_values[op]:
            current[value] = position
    dying: list[list[int]] = [[] for _ in order]
    for (value, _), position in sorted(last.items()):
        if value not in keep:
            dying[position].append(value)
    steps: list[Step] = []
    for position, op in enumerate(order):
        kept = tuple(v for v in graph.op_values[op] if (v, position) in last or v in keep)
        steps.append(Compute(op, None if kept == graph.op_always[op] else kept))
        steps.extend(Free(value) for value in dying[position])
    return Plan(tuple(steps))


def plain_plan(graph: Graph) -> Plan:
    """Every op once, in order, each value freed after its last use: training without rematerialization."""
    return plan_of(graph, range(graph.ops))


def recomputed(plan: Plan | Sequence[int], ops: int) -> list[int]:
    """[ops] how often each op runs again after its first computation."""
    counts = [-1] * ops
    for op in plan.computes if isinstance(plan, Plan) else plan:
        counts[op] += 1
    return [max(0, count) for count in counts]


def makers(graph: Graph, values: Iterable[int], missing: Callable[[int], bool]) -> set[int]:
    """The ops that make those of some values that are missing, and what is missing of all that these ops read.

    >>> from remat_ir import graph_of
    >>> makers(graph_of([1] * 4, [1] * 4, [[], [0], [1], [1, 2]]), [2], lambda value: value > 0)
    {1, 2}
    """
    found: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        op = graph.value_op[value]
        if op not in found and missing(value):
            found.add(op)
            todo += graph.op_inputs[op]
    return found


def permitted(graph: Graph, sequence: Iterable[int]) -> Iterator[int]:
    """The sequence less the recomputations that the graph forbids: their readers find the instance before.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1] * 4, [0, 1, 1, 1], [[], [0], [0, 1], [1, 2]], once=(2,), consumes=(0,))
    >>> tuple(permitted(graph, (0, 1, 0, 1, 2, 1, 2, 3)))
    (0, 1, 0, 1, 2, 3)
    """
    last, stage = graph.last_stage, 0
    for op in sequence:
        if op == stage:
            stage += 1
        elif last[op] < stage:
            continue
        yield op


def without_unread(graph: Graph, sequence: Sequence[int]) -> tuple[int, ...]:
    """The sequence less the recomputations of which no value is read before the next instance of it is made.

    They can only cost time and memory (Checkmate, Section 4.6, calls them spurious). Linear in inputs and outputs.

    >>> from remat_ir import graph_of
    >>> without_unread(graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]]), (0, 1, 0, 0, 1, 2))
    (0, 1, 0, 1, 2)
    """
    first = {op: position for position, op in reversed(list(enumerate(sequence)))}
    wanted: set[int] = set()  # values that something later reads and nothing in between makes
    kept: list[int] = []
    for position in range(len(sequence) - 1, -1, -1):
        op = sequence[position]
        if first[op] == position or any(value in wanted for value in graph.op_values[op]):
            kept.append(op)
            wanted.difference_update(graph.op_values[op])
            wanted.update(graph.op_inputs[op])
    return tuple(reversed(kept))
