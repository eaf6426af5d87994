"""Join networks: k chains of equal steps that meet at a turn, in memory slots of one size (RR-9273).

What a join plan means: its steps run one by one in slots that F, B and the turn replace in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from .document import Column, Document, Integer, Member, OfDocument
from .errors import InvalidData, InvalidPlan
from .graph import Graph
from .plan import Plan, plan_document, plan_of
from .read import LARGEST_INTEGER, integer, kind
from .replay import Moment

FORMAT = "remat-join/1"
PLAN_FORMAT = "remat-join-plan/1"
MOST_BRANCHES = 64
MOST_LENGTH = 100_000

JOIN = Document(
    "JoinDocument",
    "join",
    "A `remat-join/1`: branches that meet at a turn.",
    {
        "lengths": Member(Column(Integer(most=MOST_LENGTH), 1, MOST_BRANCHES)),
        **{key: Member(Integer()) for key in ("forward_ns", "backward_ns", "turn_ns", "slots")},
        "slot_bytes": Member(Integer(least=1), 1),
        "keep": Member(
            Column(Integer(most=MOST_BRANCHES - 1), 0, MOST_BRANCHES), (), "Branches whose x̄_0 stays.", sparse=True
        ),
    },
    (FORMAT,),
)


@dataclass(frozen=True)
class Join(OfDocument):
    """k branches of forward steps F_0 … F_(ℓ−1) that meet at the turn, and their backward steps.

    Every x_i and x̄_i fills one slot; branch j starts from x_0, which is in memory at the start. Without `keep` this is
    PROB_multi (RR-9273, Problem 2), with it PROB_b-multi (Problem 3).

    Attributes:
        lengths: [branches] ℓ, the forward steps of each branch.
        forward_ns, backward_ns, turn_ns: u_f, u_b and u_t, in ns.
        slots: c, the memory slots.
        slot_bytes: the size of a slot in bytes: what a peak in slots is worth in a budget.
        keep: the branches with b = 1, ascending: their x̄_0 is in memory at the end.

    Raises:
        InvalidData: naming the branch or member that is wrong.
    """

    document = JOIN

    lengths: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    turn_ns: int
    slots: int
    slot_bytes: int = 1
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.lengths) <= MOST_BRANCHES:
            raise InvalidData(f"join has {len(self.lengths)} branches, not 1 to {MOST_BRANCHES}", "/lengths")
        for i, length in enumerate(self.lengths):
            integer(length, f"branch {i}: length", f"/lengths/{i}", most=MOST_LENGTH)
        super().__post_init__()
        for i, branch in enumerate(self.keep):
            if type(branch) is not int or not 0 <= branch < len(self.lengths):
                raise InvalidData(f"keep[{i}]: there is no branch {branch}", f"/keep/{i}")
            if i and branch <= self.keep[i - 1]:
                raise InvalidData(f"keep[{i}]: {branch} follows {self.keep[i - 1]}, but must ascend", f"/keep/{i}")
        if self.total_cost_ns > LARGEST_INTEGER:
            raise InvalidData("the cost of all steps overflows 2^53", "/forward_ns")
        if self.slots * self.slot_bytes > LARGEST_INTEGER:
            raise InvalidData("slots times slot_bytes overflows 2^53", "/slots")
        if (2 * sum(self.lengths) + 2 * len(self.lengths)) * self.slot_bytes > LARGEST_INTEGER:
            raise InvalidData("the sum of all bytes overflows 2^53", "/slot_bytes")

    @property
    def total_cost_ns(self) -> int:
        """The cost of each step once, in ns."""
        return sum(self.lengths) * (self.forward_ns + self.backward_ns) + self.turn_ns

    @property
    def stays(self) -> tuple[bool, ...]:
        """[branches] b: whether the x̄_0 of each is in memory at the end (RR-9273, Problem 3)."""
        return tuple(j in self.keep for j in range(len(self.lengths)))

    @property
    def fixed_bytes(self) -> int:
        """Nothing is resident throughout: even an x_0 leaves with its branch's last backward step."""
        return 0

    def to_graph(self, backward: Sequence[int] | None = None) -> Graph:
        """The join in bytes, where no step works in place: a step's inputs and outputs are resident at once.

        Ops: the forward steps of branch 0, 1, …; the turn; the backward steps, whose branches are `backward` in order
        (by default the last branch first, each to its end). The x_0 are fixed. One value an op, but the turn makes the
        x̄_ℓ of every branch, in order.

        Raises:
            InvalidData: `backward` does not name each branch as often as it is long.
        """
        branches, lengths = len(self.lengths), self.lengths
        if backward is None:
            backward = [j for j in reversed(range(branches)) for _ in range(lengths[j])]
        if sorted(backward) != [j for j in range(branches) for _ in range(lengths[j])]:
            raise InvalidData("backward must name each branch as often as it is long")
        starts = [sum(lengths[:j]) for j in range(branches)]
        count = sum(lengths)
        inputs: list[tuple[int, ...]] = []
        for start, length in zip(starts, lengths, strict=True):
            inputs += [() if i == 0 else (start + i - 1,) for i in range(length)]
        inputs.append(tuple(s + n - 1 for s, n in zip(starts, lengths, strict=True) if n))
        gradient = list(range(count, count + branches))
        left = list(lengths)
        for position, j in enumerate(backward):
            left[j] -= 1
            inputs.append(((starts[j] + left[j] - 1,) if left[j] else ()) + (gradient[j],))
            gradient[j] = count + branches + position
        value_op = (*range(count), *[count] * branches, *range(count + 1, 2 * count + 1))
        return Graph(
            op_cost_ns=(self.forward_ns,) * count + (self.turn_ns,) + (self.backward_ns,) * count,
            op_inputs=tuple(inputs),
            value_op=value_op,
            value_bytes=(self.slot_bytes,) * len(value_op),
            once=tuple(range(count, 2 * count + 1)),
            keep=tuple(sorted(gradient[j] for j in self.keep)),
            backward_from=count,
            fixed_bytes=branches * self.slot_bytes,
        )


class JoinVerb(StrEnum):
    """What a step of a join plan does with branch j (RR-9273, Table 3).

    F: x_i is replaced by x_(i+1). B: x̄_(i+1) and x_i are replaced by x̄_i. TURN: all x_ℓ are replaced by the x̄_ℓ.
    S: x_i is copied into a free slot. D: one x_i is discarded. D_BAR: x̄_0 is discarded.
    """

    F = "F"
    B = "B"
    TURN = "turn"
    S = "S"
    D = "D"
    D_BAR = "D_bar"


class JoinStep(NamedTuple):
    """One step on x_at of a branch, both counted from 0; the turn has neither, D_bar only a branch."""

    verb: JoinVerb
    branch: int = 0
    at: int = 0


@dataclass(frozen=True)
class JoinPlan:
    """The steps of one training step of a join, in order (`remat-join-plan/1`)."""

    steps: tuple[JoinStep, ...]

    def to_json(self) -> dict[str, Any]:
        """The `remat-join-plan/1` object: rows such as ["F", j, i], ["turn"], ["D_bar", j]."""
        rows = [[step.verb.value, step.branch, step.at][: _WIDTHS[step.verb]] for step in self.steps]
        return {"format": PLAN_FORMAT, "steps": rows}

    @classmethod
    def from_json(cls, data: object) -> JoinPlan:
        """Read a `remat-join-plan/1` object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names the step.
        """
        rows = plan_document(PLAN_FORMAT).read(data)["steps"]
        return cls(tuple(_read_step(row, i) for i, row in enumerate(rows)))


_WIDTHS = {verb: {JoinVerb.TURN: 1, JoinVerb.D_BAR: 2}.get(verb, 3) for verb in JoinVerb}


def _read_step(row: object, i: int) -> JoinStep:
    here = f"/steps/{i}"
    if not isinstance(row, (list, tuple)) or not row:
        raise InvalidData(f"step {i} must be [verb, branch, index]", here)
    if not isinstance(row[0], str) or row[0] not in JoinVerb._value2member_map_:
        what = repr(row[0]) if isinstance(row[0], str) else kind(row[0])
        raise InvalidData(f"step {i}: unknown verb {what}", here + "/0")
    verb = JoinVerb(row[0])
    if len(row) != _WIDTHS[verb]:
        raise InvalidData(f"step {i}: {verb.value} takes {_WIDTHS[verb] - 1} numbers", here)
    for position, number in enumerate(row[1:], 1):
        integer(number, f"step {i}: branch or index", f"{here}/{position}")
    return JoinStep(verb, *row[1:])


def join_in_bytes(join: Join, plan: JoinPlan) -> tuple[Graph, Plan]:
    """A join plan in bytes: the graph whose backward ops stand in the plan's order, and its plan with the same steps.

    Forward steps before the turn are put into the graph's order, branch by branch (RR-9273, Lemma 1); the peak in bytes
    is the verifier's to say, and is higher than in slots wherever a step works in place.
    """
    turn = next(i for i, step in enumerate(plan.steps) if step.verb is JoinVerb.TURN)
    starts = [sum(join.lengths[:j]) for j in range(len(join.lengths))]
    count = sum(join.lengths)
    before = sorted(starts[s.branch] + s.at for s in plan.steps[:turn] if s.verb is JoinVerb.F)
    computes, backward = [*before, count], []
    for step in plan.steps[turn + 1 :]:
        if step.verb is JoinVerb.F:
            computes.append(starts[step.branch] + step.at)
        elif step.verb is JoinVerb.B:
            backward.append(step.branch)
            computes.append(count + len(backward))
    graph = join.to_graph(backward)
    return graph, plan_of(graph, computes)


def plain_join_plan(join: Join) -> JoinPlan:
    """Every x_i kept: training without rematerialization."""
    steps: list[JoinStep] = []
    for branch, length in enumerate(join.lengths):
        for i in range(length):
            steps += (JoinStep(JoinVerb.S, branch, i), JoinStep(JoinVerb.F, branch, i))
    steps.append(JoinStep(JoinVerb.TURN))
    for branch, length in enumerate(join.lengths):
        steps += (JoinStep(JoinVerb.B, branch, i) for i in reversed(range(length)))
        if branch not in join.keep:
            steps.append(JoinStep(JoinVerb.D_BAR, branch))
    return JoinPlan(tuple(steps))


def replay_join(join: Join, plan: JoinPlan) -> Iterator[Moment]:
    """Run a join plan step by step, without a limit on slots (RR-9273, Table 3 and Definition 5).

    Memory is the filled slots times `slot_bytes`; at the start every x_0 fills one. Every backward step runs exactly
    once, the turn too, and at the end no x̄ is left but those that stay. `Moment.op` is None throughout.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.
    """
    forward: Counter[tuple[int, int]] = Counter((j, 0) for j in range(len(join.lengths)))
    gradient: dict[int, int] = {}  # branch -> the index of its x̄
    filled, cost, turned = len(join.lengths), 0, False
    for i, (verb, branch, index) in enumerate(plan.steps):
        before = filled
        if verb is not JoinVerb.TURN and not 0 <= branch < len(join.lengths):
            raise InvalidPlan(f"there is no branch {branch}", i)
        if verb is JoinVerb.TURN:
            if turned:
                raise InvalidPlan("the turn runs a second time", i)
            for j, length in enumerate(join.lengths):
                _take(forward, j, length, "the turn", i)
                gradient[j] = length
            turned = True
            cost += join.turn_ns
        elif verb is JoinVerb.F:
            if index >= join.lengths[branch]:
                raise InvalidPlan(f"there is no F {index} on branch {branch}", i)
            _take(forward, branch, index, f"F {index}", i)
            forward[branch, index + 1] += 1
            cost += join.forward_ns
        elif verb is JoinVerb.B:
            if gradient.get(branch) != index + 1:
                raise InvalidPlan(f"B {index} of branch {branch} reads x̄ {index + 1}, which is not in memory", i)
            _take(forward, branch, index, f"B {index}", i)
            gradient[branch] = index
            filled -= 1
            cost += join.backward_ns
        elif verb is JoinVerb.S:
            if not forward[branch, index]:
                raise InvalidPlan(f"S copies x {index} of branch {branch}, which is not in memory", i)
            forward[branch, index] += 1
            filled += 1
        elif verb is JoinVerb.D:
            _take(forward, branch, index, "D", i)
            filled -= 1
        else:
            if gradient.get(branch) != 0:
                raise InvalidPlan(f"D_bar discards x̄ 0 of branch {branch}, which is not in memory", i)
            gradient[branch] = -1
            filled -= 1
        yield Moment(i, None, max(before, filled) * join.slot_bytes, filled * join.slot_bytes, cost)
    if not turned:
        raise InvalidPlan("the turn is never computed")
    _check_end(join, forward, gradient, filled)


def _check_end(join: Join, forward: Counter[tuple[int, int]], gradient: dict[int, int], filled: int) -> None:
    """Nothing is left but the x̄ 0 that stay."""
    for j in range(len(join.lengths)):
        if gradient[j] > 0:
            raise InvalidPlan(f"x̄ 0 of branch {j} is never computed")
        if (gradient[j] == 0) != (j in join.keep):
            how = "is not in memory at the end" if gradient[j] else "is never discarded"
            raise InvalidPlan(f"x̄ 0 of branch {j} {how}")
    if filled > len(join.keep):
        left = min(key for key, copies in forward.items() if copies)
        raise InvalidPlan(f"x {left[1]} of branch {left[0]} is left in memory")


def _take(forward: Counter[tuple[int, int]], branch: int, index: int, who: str, i: int) -> None:
    if not forward[branch, index]:
        raise InvalidPlan(f"{who} reads x {index} of branch {branch}, which is not in memory", i)
    forward[branch, index] -= 1
