"""How a solve ended, what was found, and what was proved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from html import escape
from typing import Any, NamedTuple

from .digest import problem_digest
from .document import AnyInteger, Array, Document, Member, Nested, Number, Text
from .errors import InvalidData
from .problem import PLAN, AnyPlan, Problem, read_plan
from .proof.certificate import Proof, read_proof
from .read import kind, members, parsed
from .verify import verify


class Status(StrEnum):
    """Where a solve stands. Expected endings are values, not exceptions."""

    QUEUED = "queued"
    RUNNING = "running"
    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NOTHING_FOUND = "nothing_found"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self not in (Status.QUEUED, Status.RUNNING)


_WORD, _INTEGER, _NUMBER = Text(), AnyInteger(), Number()

ANSWER = Document(
    "AnswerDocument",
    "answer",
    "The answer to a solve, in whatever state it is; `plan` is there when it has ended with one.",
    {
        "id": Member(_WORD, nullable=True),
        "status": Member(Text(words=tuple(status.value for status in Status))),
        "method": Member(_WORD),
        "budget_bytes": Member(_INTEGER),
        "cost_ns": Member(_INTEGER, nullable=True),
        "bound_ns": Member(_INTEGER, nullable=True),
        "overhead": Member(_NUMBER, nullable=True),
        "gap": Member(_NUMBER, nullable=True),
        "peak_bytes": Member(_INTEGER, nullable=True),
        "seconds": Member(_NUMBER),
        "limit": Member(Text(words=("gap", "time", "cancel", "memory")), nullable=True),
        "restricted_to": Member(Array(_WORD)),
        "least_budget_bytes": Member(_INTEGER, nullable=True),
        "least_budget_bound_bytes": Member(_INTEGER, nullable=True),
        "digest": Member(_WORD),
        "message": Member(_WORD),
        "cache": Member(Text(words=("hit", "near", "joined", "miss")), nullable=True),
        "claimed_bound_ns": Member(_INTEGER, nullable=True),
        "claimed_by": Member(_WORD, nullable=True),
        "chain_cost_ns": Member(_INTEGER, None, "A baseline: the best persistent chain schedule found.", nullable=True),
        "dropped_methods": Member(Array(_WORD), (), "Methods of which a plan did not verify and was dropped."),
        "plan": Member(Nested((PLAN,), read_plan), None, nullable=True, sparse=True),
        "proof": Member(Nested((), read_proof), None, nullable=True, sparse=True),
    },
    open=True,
)
"""What an answer holds on the wire. Its reader takes less: what came first, and whatever else is there."""


LEAST_SPENT_S = 1.0
"""Seconds of a solve that are never thought too many."""


class Progress(NamedTuple):
    """One improvement while a solve runs: seconds since its start, best cost and bound in ns, and who found it.

    `bound_ns` holds within `restricted_to`, `whole_bound_ns` over the whole space; `proof` is its certificate, None
    where there is none.
    """

    seconds: float
    cost_ns: int | None
    bound_ns: int | None
    source: str
    plan: AnyPlan | None = None
    restricted_to: tuple[str, ...] = ()
    whole_bound_ns: int | None = None
    proof: Proof | None = None

    def __str__(self) -> str:
        """One line without the plan, so that `on_progress=print` can be read.

        >>> print(Progress(1.25, 2_000_000, 1_900_000, "search"))
        1.2 s: cost 2 ms, at least 1.9 ms, gap 5 % (search)
        """
        if self.cost_ns is None:
            return f"{self.seconds:.1f} s: no plan yet"
        cost = f"{self.seconds:.1f} s: cost {self.cost_ns / 1e6:.6g} ms"
        if self.bound_ns is None:
            return f"{cost} ({self.source})"
        gap = 100 * gap_of(self.cost_ns, self.bound_ns)
        return f"{cost}, at least {self.bound_ns / 1e6:.6g} ms, gap {gap:.2g} % ({self.source})"


@dataclass(frozen=True)
class Answer:
    """The answer to a solve, in the library, on the wire and in the store alike.

    Attributes:
        status: how it ended, or that it has not.
        method: the method that was asked for.
        cost_ns, peak_bytes: of the plan, as the verifier replayed them; None without a plan.
        bound_ns: proved lower bound on the cost of any plan of the space that `restricted_to` names, in ns.
        overhead: cost / (sum of each op once) − 1.
        gap: (cost − bound) / cost.
        seconds: what the solve took.
        limit: what stopped it: "gap", "time", "cancel", "memory", or None when it ran to its end.
        restricted_to: the restrictions that the bound, or without a plan the search, is confined to, by their names in
            `remat_ir.restrictions`; empty means the whole space, and only then is "optimal" a claim about every plan.
        least_budget_bytes: a budget known to suffice.
        least_budget_bound_bytes: a budget proved necessary.
        message: one sentence for a person.
        proof: the certificate of `bound_ns`, or, of an infeasible problem, that no plan fits into one byte less than
            `least_budget_bound_bytes`; None where each op once is all that is certified. Within `tags` it may be of the
            graph that `remat_ir.tags.confined` gives. See `verify_answer`.
        claimed_bound_ns, claimed_by: a bound that somebody says without a certificate, and who; without a plan and such
            a bound, who claims that no plan fits.
        chain_cost_ns: the cost of the best persistent chain schedule found (RR-9302), where `auto` has planned a graph
            whose network is linear and one fits: a baseline for the plan; None elsewhere.
        dropped_methods: the methods of which a plan did not verify and was dropped, which is a bug in them.

    Example:
        >>> from remat_ir import Problem, graph_of, plain_plan
        >>> problem = Problem(graph_of([1, 2], [4, 8], [[], [0]]), 12)
        >>> answer = Answer.of_plan(problem, plain_plan(problem.graph), method="greedy")
        >>> answer.ending, answer.overhead, answer.peak_bytes
        ('optimal', 0.0, 12)
    """

    status: Status
    method: str
    budget_bytes: int
    cost_ns: int | None = None
    bound_ns: int | None = None
    overhead: float | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0
    limit: str | None = None
    restricted_to: tuple[str, ...] = ()
    least_budget_bytes: int | None = None
    least_budget_bound_bytes: int | None = None
    digest: str = ""
    message: str = ""
    id: str | None = None
    cache: str | None = None
    plan: AnyPlan | None = None
    claimed_bound_ns: int | None = None
    claimed_by: str | None = None
    chain_cost_ns: int | None = None
    proof: Proof | None = None
    dropped_methods: tuple[str, ...] = ()

    @classmethod
    def of_plan(
        cls,
        problem: Problem,
        plan: AnyPlan,
        *,
        method: str,
        bound_ns: int | None = None,
        **known: Any,
    ) -> Answer:
        """A verified plan as an answer: optimal within `restricted_to` where its cost is the bound, else feasible.

        Args:
            bound_ns: a proved lower bound on the cost within `restricted_to`; each op once where there is none.
            known: what else there is to say, by the names of the answer's attributes.

        Raises:
            InvalidPlan: the plan is wrong, or over the budget.
            InvalidData: the bound is above the cost.

        >>> from remat_ir import Problem, graph_of, plain_plan
        >>> graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
        >>> answer = Answer.of_plan(Problem(graph, 15), plain_plan(graph), method="greedy")
        >>> answer.status.value, answer.cost_ns, answer.overhead, answer.gap
        ('optimal', 6, 0.0, 0.0)
        """
        cost, peak = verify(problem, plan)
        total = problem.subject.total_cost_ns
        bound = total if bound_ns is None else bound_ns
        if bound > cost:
            raise InvalidData(f"the bound of {bound} ns is above the cost of the plan, {cost} ns", "/bound_ns")
        return cls(
            status=Status.OPTIMAL if bound == cost else Status.FEASIBLE,
            method=method,
            budget_bytes=problem.budget_bytes,
            digest=problem_digest(problem),
            plan=plan,
            **known,
        ).priced(total, cost, bound, peak)

    def priced(
        self, total_cost_ns: int | None, cost_ns: int | None, bound_ns: int | None, peak_bytes: int | None
    ) -> Answer:
        """This answer with the cost, bound and peak of its plan, and the overhead and gap that follow from them.

        Args:
            total_cost_ns: the sum of each op once, in ns; without it there is no overhead.
        """
        return replace(
            self,
            cost_ns=cost_ns,
            bound_ns=bound_ns,
            overhead=None if cost_ns is None or total_cost_ns is None else overhead_of(cost_ns, total_cost_ns),
            gap=None if cost_ns is None or bound_ns is None else gap_of(cost_ns, bound_ns),
            peak_bytes=peak_bytes,
        )

    @property
    def ran_to_its_end(self) -> bool:
        """Whether more time would change nothing.

        A solve also ends where an engine claims the gap that was asked for and nobody could certify it in time: then
        the next one may want a smaller gap.
        """
        if self.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return True
        claimed, cost = self.claimed_bound_ns, self.cost_ns
        claim_only = claimed is not None and cost is not None and (self.bound_ns or 0) < claimed < cost
        return self.status in (Status.FEASIBLE, Status.NOTHING_FOUND) and self.limit is None and not claim_only

    @property
    def claims_infeasible(self) -> bool:
        """Whether nothing was found and somebody claims, without a certificate, that no plan fits."""
        claimed = self.claimed_by is not None and self.claimed_bound_ns is None
        return self.status is Status.NOTHING_FOUND and claimed

    @property
    def ending(self) -> str:
        """The status for a person: an optimum of a restricted space is not called optimal alone."""
        if self.status is Status.OPTIMAL and self.restricted_to:
            return f"{self.status.value} within {', '.join(self.restricted_to)}"
        return self.status.value

    @property
    def chain_overhead(self) -> float | None:
        """The overhead of the best persistent chain schedule found, to put next to the plan's.

        >>> Answer(Status.FEASIBLE, "auto", 9, cost_ns=110, overhead=0.1, chain_cost_ns=112).chain_overhead
        0.12
        """
        if self.chain_cost_ns is None or self.cost_ns is None or self.overhead is None:
            return None
        return round(overhead_of(self.chain_cost_ns, round(self.cost_ns / (1 + self.overhead))), 12)

    def _repr_html_(self) -> str:
        """What a notebook shows: each member that is known, but neither the plan's steps nor the certificate."""
        shown = asdict(replace(self, plan=None, proof=None)) | {"status": self.ending}
        known = {name: value for name, value in shown.items() if value not in (None, "", ())}
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in known.items())
        return f"<table>{rows}</table>"

    def to_json(self) -> dict[str, Any]:
        """The answer object of the wire; `plan` is there only when there is one."""
        return ANSWER.write(self)

    @classmethod
    def from_json(cls, data: object) -> Answer:
        """Read an answer object, or its text. Members of later versions are ignored.

        Raises:
            InvalidData: not an answer; the message says which member.
        """
        data = parsed(data)
        if not isinstance(data, dict):
            raise InvalidData(f"answer must be an object, not {kind(data)}")
        known = {name: data[name] for name in ANSWER.members if name in data}
        members(known, "answer", required=("status", "method", "budget_bytes"), optional=known)
        for name, value in known.items():
            known[name] = ANSWER.members[name].read(value, f"answer: {name}", "/" + name)
        try:
            known["status"] = Status(known["status"])
        except ValueError:
            raise InvalidData(f"answer has an unknown status {known['status']!r}", "/status") from None
        return cls(**known)


def gap_of(cost_ns: int, bound_ns: int) -> float:
    """(cost − bound) / cost, and 0 where nothing costs anything."""
    return max(0, cost_ns - bound_ns) / cost_ns if cost_ns else 0.0


def overhead_of(cost_ns: int, total_cost_ns: int) -> float:
    """cost / (sum of each op once) − 1, and 0 where nothing costs anything."""
    return cost_ns / total_cost_ns - 1 if total_cost_ns else 0.0


def worth_more_time(cost_ns: int | None, bound_ns: int | None, steps: int | None, spent_s: float) -> bool:
    """Whether a better plan could still save more, over the steps to come, than the time that was spent.

    Whoever stops there has spent at most twice what would have been best, whatever more time would have found.

    Args:
        cost_ns, bound_ns: of the best plan, and of any.
        steps: of training that will run by the plan; None: any gain is worth it.
        spent_s: seconds of solving so far; the first is always worth it.

    >>> [worth_more_time(100_000_000, 99_000_000, 10_000, spent_s) for spent_s in (5, 10)]
    [True, False]
    """
    if steps is None or cost_ns is None or spent_s < LEAST_SPENT_S:
        return True
    return max(0, cost_ns - (bound_ns or 0)) * steps > spent_s * 1e9
