"""A problem: what is to be planned, a graph, a chain or a join, and the bytes that its peak must not exceed.

Each subject has plans of a form of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from .chain import CHAIN, Chain, ChainPlan, plain_chain_plan, replay_chain
from .chain import PLAN_FORMAT as CHAIN_PLAN
from .document import Document, Integer, Member, Nested
from .errors import InvalidData, InvalidPlan
from .graph import GRAPH, Graph
from .join import JOIN, Join, JoinPlan, plain_join_plan, replay_join
from .join import PLAN_FORMAT as JOIN_PLAN
from .node_link import NODE_LINK, from_node_link, is_node_link
from .plan import FORMAT as GRAPH_PLAN
from .plan import Plan, plain_plan, plan_document
from .read import integer, kind, parsed
from .replay import Moment, replay

Subject: TypeAlias = Graph | Chain | Join
AnyPlan: TypeAlias = Plan | ChainPlan | JoinPlan


def read_graph(data: object) -> Graph:
    """Read a `remat-graph/1`, or node-link data, which has no format; or the text of either.

    Raises:
        InvalidData: malformed in any way; the message names key and index.
    """
    data = parsed(data)
    return from_node_link(data) if is_node_link(data) else Graph.from_json(data)


SUBJECTS: dict[str, Nested] = {
    "graph": Nested((GRAPH, NODE_LINK), read_graph),
    "chain": Nested((CHAIN,), Chain.from_json),
    "join": Nested((JOIN,), Join.from_json),
}
"""The key of each subject on the wire, and what stands there."""

PLAN = plan_document(GRAPH_PLAN, CHAIN_PLAN, JOIN_PLAN)


def subject_kind(subject: Subject) -> str:
    """The key of a subject on the wire."""
    if isinstance(subject, Chain):
        return "chain"
    return "join" if isinstance(subject, Join) else "graph"


def read_plan(data: object) -> AnyPlan:
    """Read a plan of any form by its `format`; without a known one it is read, and refused, as a `remat-plan/1`.

    Raises:
        InvalidData: malformed in any way; the message names the step.
    """
    data = parsed(data)
    form = data.get("format") if isinstance(data, dict) else None
    if form == CHAIN_PLAN:
        return ChainPlan.from_json(data)
    return JoinPlan.from_json(data) if form == JOIN_PLAN else Plan.from_json(data)


def plain_plan_of(subject: Subject) -> AnyPlan:
    """Training without rematerialization."""
    if isinstance(subject, Chain):
        return plain_chain_plan(subject)
    return plain_join_plan(subject) if isinstance(subject, Join) else plain_plan(subject)


def replay_any(subject: Subject, plan: AnyPlan) -> Iterator[Moment]:
    """Run a plan step by step, without a budget, by the replay of its subject.

    Raises:
        InvalidPlan: the plan has another subject's form, or breaks a rule.
    """
    if isinstance(subject, Graph) and isinstance(plan, Plan):
        return replay(subject, plan)
    if isinstance(subject, Chain) and isinstance(plan, ChainPlan):
        return replay_chain(subject, plan)
    if isinstance(subject, Join) and isinstance(plan, JoinPlan):
        return replay_join(subject, plan)
    raise InvalidPlan(f"a {subject_kind(subject)} has plans of another form than {type(plan).__name__}")


PROBLEMS = {
    key: Document(
        f"{key.title()}Problem",
        "problem",
        f"A {key} and its budget.",
        {key: Member(subject), "budget_bytes": Member(Integer())},
    )
    for key, subject in SUBJECTS.items()
}
"""A problem on the wire, by what it is about."""


@dataclass(frozen=True)
class Problem:
    """A graph, a chain or a join, and a budget in bytes, fixed bytes included in the budget.

    Raises:
        InvalidData: the budget is not an integer from 0 to 2^53.

    Example:
        >>> from remat_ir import graph_of
        >>> Problem(graph_of([1, 2], [4, 8], [[], [0]]), 12).budget_bytes
        12
    """

    subject: Subject
    budget_bytes: int

    def __post_init__(self) -> None:
        integer(self.budget_bytes, "budget_bytes", "/budget_bytes")

    @property
    def kind(self) -> str:
        """What the subject is: "graph", "chain" or "join"."""
        return subject_kind(self.subject)

    @property
    def graph(self) -> Graph:
        """The subject of a problem that is about a graph.

        Raises:
            InvalidData: it is about something else.
        """
        if not isinstance(self.subject, Graph):
            raise InvalidData(f"this problem is about a {self.kind}, not a graph")
        return self.subject

    @property
    def capacity_bytes(self) -> int:
        """What a plan may fill: the budget, and of a join no more than its slots hold."""
        join = self.subject
        return min(self.budget_bytes, join.slots * join.slot_bytes) if isinstance(join, Join) else self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The `problem` member of a request; names stay at home."""
        return {self.kind: self.subject.to_json(), "budget_bytes": self.budget_bytes}

    @classmethod
    def from_json(cls, data: object) -> Problem:
        """Read the `problem` member of a request, or its text.

        Raises:
            InvalidData: malformed in any way; the pointer leads to the place.
        """
        data = parsed(data)
        if not isinstance(data, dict):
            raise InvalidData(f"problem must be an object, not {kind(data)}")
        keys = [key for key in PROBLEMS if key in data] or ["graph"]
        if len(keys) > 1:
            raise InvalidData(f"problem has both {keys[0]!r} and {keys[1]!r}; it is about one of them", "/" + keys[1])
        found = PROBLEMS[keys[0]].read(data)
        return cls(found[keys[0]], found["budget_bytes"])


def plain_peak(subject: Subject) -> int:
    """The peak of the plain plan in bytes, fixed bytes included."""
    # a solve asks some four times, and a replay takes half a second at 30,000 ops; what is remembered is without the
    # fixed bytes, since a twin with others shares it
    known: dict[str, int] = subject.__dict__
    if "_plain_bytes" not in known:
        peak = max(moment.peak_bytes for moment in replay_any(subject, plain_plan_of(subject)))
        known["_plain_bytes"] = peak - subject.fixed_bytes
    return known["_plain_bytes"] + subject.fixed_bytes


def budget_at(subject: Subject, fraction: float | Fraction) -> int:
    """The budget at a fraction of the plain activation peak: fixed + f · (plain peak − fixed), rounded down."""
    if not 0 <= fraction <= 1e6:
        raise InvalidData(f"a budget fraction must be between 0 and 1 (or above, for slack), not {fraction}")
    return subject.fixed_bytes + int(Fraction(fraction) * (plain_peak(subject) - subject.fixed_bytes))
