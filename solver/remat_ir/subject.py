"""What a problem can be about, a graph, a chain or a join, and the form that each one's plans take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from .chain import CHAIN, Chain
from .chain_plan import FORMAT as CHAIN_PLAN
from .chain_plan import ChainPlan, plain_chain_plan
from .chain_replay import replay_chain
from .document import Nested
from .errors import InvalidPlan
from .graph import GRAPH, Graph
from .join import JOIN, Join, JoinPlan, plain_join_plan
from .join import PLAN_FORMAT as JOIN_PLAN
from .join_replay import replay_join
from .node_link import NODE_LINK, from_node_link, is_node_link
from .plan import FORMAT as GRAPH_PLAN
from .plan import Plan, plain_plan, plan_document
from .read import parse
from .replay import Moment, replay

Subject: TypeAlias = Graph | Chain | Join
AnyPlan: TypeAlias = Plan | ChainPlan | JoinPlan


def read_graph(data: object) -> Graph:
    """Read a `remat-graph/1`, or node-link data, which has no format; or the text of either.

    Raises:
        InvalidData: malformed in any way; the message names key and index.
    """
    if isinstance(data, (str, bytes)):
        data = parse(data)
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
    if isinstance(data, (str, bytes)):
        data = parse(data)
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
