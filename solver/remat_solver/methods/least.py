"""The least budget: the smallest one with a known plan, and the largest one proved to hold none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat_ir import (
    Answer,
    Graph,
    Plan,
    Problem,
    Progress,
    Proof,
    Status,
    certificate_for,
    plain_peak,
    plain_plan,
    readable,
    verify,
)
from remat_ir.graph import working_set
from remat_ir.greedy import least_memory, peak_of

from ..bounds import MOST_VALUES, pair_need, pair_proof, pair_table
from ..deadline import Deadline, never
from ..incumbent import Incumbent, checked
from ..kernels import await_kernels
from ..search.local import Search, least_plan
from .heuristics import StagedOptions, run_staged

METHOD = "least-budget"
Prover = Callable[[Problem, float, Callable[[], bool]], Answer]
"""Asked whether a budget suffices, within so many seconds; the third argument is polled for a cancel. Its answer's plan
is a yes; status infeasible without a restriction, claimed by nobody, is a no; anything else says nothing."""

_FIRST_TRY_S = 0.25
"""Seconds for the first attempts at a plan, doubled from round to round."""
_PROOF = 12.0
"""How many times as long a proof may take as an attempt at a plan."""
_FAILURES = 2
"""Proofs of one round that may come to nothing: each one asks for less, and most of the time would go into them."""


_UNLIMITED_S = 600.0
"""Seconds for the two sides to meet where a solve has no time limit."""


def run_least(incumbent: Incumbent, options: object = None) -> None:
    """Narrow down the least budget from both sides until they meet or the time is up; what fits is offered on the way.

    What the answer says of budgets is about every budget; its plan is the cheapest one found that fits this one.
    """
    problem, graph = incumbent.problem, incumbent.problem.graph

    def take(news: Progress) -> None:
        if news.plan is not None:
            incumbent.offer_or_suffices(news.plan, METHOD)

    seconds = min(incumbent.deadline.remaining(), _UNLIMITED_S)
    found = Interval(graph, Deadline(seconds), on_progress=take, cancelled=incumbent.stopped).narrowed()
    if plain_peak(graph) <= problem.budget_bytes:
        incumbent.offer(plain_plan(graph), METHOD)
    incumbent.suffices(found.high)
    least = min(found.low, found.high)
    incumbent.needs_at_least(least, found.below)
    if least > problem.budget_bytes:
        proof = None if found.below is None else certificate_for(problem, found.below).proof
        needs, given = readable(least), readable(problem.budget_bytes)
        reason = f"No plan fits: every plan needs at least {needs}; the budget is {given}."
        incumbent.prove_infeasible(reason, least, proof)
    elif incumbent.plan is None:
        incumbent.ends_without_plan(found.message)


def staged_prover(problem: Problem, seconds: float, cancelled: Callable[[], bool]) -> Answer:
    """The staged proof, stopped at its first plan."""
    incumbent = Incumbent(problem, Deadline(seconds), 0.999, cancelled=cancelled, certify=True)
    run_staged(incumbent, StagedOptions())
    incumbent.stopped()  # notes which limit, if any, has been reached by now
    return checked(problem, incumbent.answer("staged"))


def least_budget(
    graph: Graph,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    prover: Prover | None = staged_prover,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] = never,
) -> Answer:
    """Look for the smallest budget that suffices, from both sides, by bisection.

    From above a budget counts once a plan within it has passed the verifier; from below by what pairs of values need,
    and once `prover` has certified that no plan exists. Without a prover only plans are looked for.

    Returns:
        An answer with a plan whose peak is `least_budget_bytes`, which is its budget; every smaller budget down to
        `least_budget_bound_bytes` is undecided, and every budget below that holds no plan: `proof` shows it, or
        `claimed_by` names a prover that gave no certificate. Where the two meet the
        message says so. `cost_ns` is the plan's, of which nothing is proved but that each op must run once.
    """
    found = Interval(graph, Deadline(time_limit_s), seed, on_progress, cancelled)
    return found.narrowed(prover).answer()


class Interval:
    """Two budgets closing in on each other: `low` is proved necessary, as `below` shows; `high` has a plan."""

    def __init__(
        self,
        graph: Graph,
        deadline: Deadline,
        seed: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.graph, self.deadline, self.seed = graph, deadline, seed
        self.on_progress, self.cancelled = on_progress, cancelled
        table = pair_table(graph, self._ends) if graph.values <= MOST_VALUES else None
        self.low = pair_need(graph, table).least_bytes
        self.below: Proof | None = pair_proof(Problem(graph, self.low - 1), table) if self.low else None
        self.prover = METHOD
        self.plan = plain_plan(graph)
        self.high = plain_peak(graph)

    def narrowed(self, prover: Prover | None = staged_prover) -> Interval:
        """Both sides as `least_budget` leaves them."""
        if not self.over():
            watch = self.deadline.within(0.1 * self.deadline.remaining())
            small = least_memory(self.graph, stop=lambda: watch.passed() or self.cancelled(), rounds=8)
            self.found(small, "greedy")
        with self.deadline.held():
            await_kernels(self.over)
        seconds = _FIRST_TRY_S
        while not self.over():
            self.seek(seconds)
            if prover is not None:
                self.certify(prover, _PROOF * seconds)
            seconds *= 2
        return self

    def over(self) -> bool:
        """Whether there is a reason to stop."""
        return self.low >= self.high or self._ends()

    def _ends(self) -> bool:
        return self.deadline.passed() or self.cancelled()

    def found(self, plan: Plan, source: str) -> None:
        """Take a plan with a smaller peak, verified."""
        peak = peak_of(self.graph, plan)
        if peak < self.high:
            verdict = verify(Problem(self.graph, peak), plan)
            self.plan, self.high = plan, peak
            if self.on_progress is not None:
                self.on_progress(Progress(self.deadline.elapsed(), verdict.cost_ns, None, source, plan))

    def seek(self, seconds: float) -> None:
        """Go down from the plan of the least memory, then bisect: between its peak and what no new start reaches."""
        watch = self.deadline.within(2 * seconds)
        self.found(least_plan(self.graph, self.low, self.plan, watch, self.cancelled, self.seed), "search")
        hopeless = self.low - 1
        while not self.over() and self.high - hopeless > max(1, self.high // 1000):
            middle = (hopeless + self.high) // 2
            deadline = self.deadline.within(seconds)
            search = Search(self.graph, middle, self.seed)
            search.seek(lambda end=deadline: end.passed() or self.cancelled())  # type: ignore[misc]
            plan = search.plan()
            if plan is None:
                hopeless = middle
            else:
                self.found(plan, "search")
        self.seed += 1

    def certify(self, prover: Prover, seconds: float) -> None:
        """Bisect by certificates; where one fails to come ask for an easier one, of a smaller budget."""
        ceiling = self.high  # the smallest budget of which no more is known than that it may suffice
        failures = 0
        while not self.over() and self.low < ceiling and failures < _FAILURES:
            middle = (self.low + ceiling - 1) // 2
            spare = max(1e-3, min(seconds, self.deadline.remaining()))
            answer = prover(Problem(self.graph, middle), spare, self.cancelled)
            if isinstance(answer.plan, Plan):
                self.found(answer.plan, "proof")
                ceiling = min(ceiling, self.high)
            elif answer.status is Status.INFEASIBLE and not answer.restricted_to and answer.claimed_by is None:
                self.low = max(middle + 1, answer.least_budget_bound_bytes or 0)
                self.below, self.prover = answer.proof, answer.method
                if answer.proof is not None:
                    self.below = certificate_for(Problem(self.graph, self.low - 1), answer.proof).proof
            else:
                ceiling = middle
                failures += 1

    @property
    def message(self) -> str:
        """Both sides in one sentence."""
        if self.low >= self.high:
            return f"{readable(self.high, up=True)} suffice, and no smaller budget does."
        return f"{readable(self.high, up=True)} suffice; any budget below {readable(self.low)} is proved too small."

    def answer(self) -> Answer:
        """What was found and proved."""
        problem = Problem(self.graph, self.high)
        limit = "cancel" if self.cancelled() else "time" if self.low < self.high else None
        answer = Answer.of_plan(
            problem,
            self.plan,
            method=METHOD,
            seconds=round(self.deadline.elapsed(), 6),
            limit=limit,
            least_budget_bytes=self.high,
            least_budget_bound_bytes=min(self.low, self.high),
            message=self.message,
        )
        if self.below is None and self.low > working_set(self.graph).least_bytes:
            return replace(answer, claimed_by=self.prover)
        return checked(problem, replace(answer, proof=self.below))
