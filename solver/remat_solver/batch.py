"""The largest batch that trains within a budget at bounded extra cost (Checkmate, equations 9 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from remat_ir import Answer, Graph, InvalidData, Plan, Problem, Progress, verify

from .bounds import least_need
from .deadline import Deadline
from .sweep import Curve


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch found, and the largest that is not proved impossible.

    Attributes:
        batch: the largest batch with a verified plan, 0 if there is none.
        bound: no batch above it has a plan within the budget and the cost; equal to `batch` when that is optimal.
        most_cost_ns: the cost that a plan may have at a batch of 1.
        answer: the plan at `batch`, judged on the graph scaled to it; None if there is none.
        seconds: what the search took.
    """

    batch: int
    bound: int
    most_cost_ns: int
    answer: Answer | None
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether no larger batch is possible."""
        return self.batch == self.bound


def scaled(graph: Graph, batch: int, batch_bytes: int = 0) -> Graph:
    """A graph of batch 1 at another batch: costs, sizes and workspaces grow with it, and `batch_bytes` of the fixed."""
    return replace(
        graph,
        op_cost_ns=tuple(batch * cost for cost in graph.op_cost_ns),
        value_bytes=tuple(batch * size for size in graph.value_bytes),
        op_workspace_bytes=tuple(batch * size for size in graph.op_workspace_bytes),
        fixed_bytes=graph.fixed_bytes + (batch - 1) * batch_bytes,
    )


def one_forward_pass_more(graph: Graph) -> int:
    """The right side of equation 9: twice the forward ops and once the backward ones, in ns.

    Raises:
        InvalidData: the graph does not say where its backward pass begins.
    """
    if graph.backward_from is None:
        raise InvalidData("the graph marks no backward pass, so one more forward pass has no cost", "/backward_from")
    return graph.total_cost_ns + sum(graph.op_cost_ns[: graph.backward_from])


def max_batch(
    graph: Graph,
    budget_bytes: int,
    *,
    batch_bytes: int = 0,
    most_cost_ns: int | None = None,
    method: str = "auto",
    time_limit_s: float | None = 60.0,
    total_s: float | None = 600.0,
    options: Mapping[str, object] | None = None,
    on_step: Callable[[LargestBatch], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> LargestBatch:
    """The largest batch with a plan within the budget that costs no more than one additional forward pass.

    Costs and sizes grow in proportion to the batch (equation 9), so batch b within M bytes is the graph of batch 1
    within fixed + ⌊(M − fixed) / b⌋ bytes, and the limit on relative cost stays. Batches are bisected: a plan cheap
    enough raises the floor to the largest batch that its own peak allows (equation 10), a bound above the limit lowers
    the ceiling. Where neither comes in time, the batch counts as out of reach for the floor, and the ceiling is then
    looked for above it; what time is left then goes to what is unclear, three times as long for each.

    Args:
        graph: at a batch of 1.
        budget_bytes: fixed bytes included.
        batch_bytes: how many of the fixed bytes grow with the batch: the input. The rest stays: parameters and so on.
        most_cost_ns: the limit on the cost at a batch of 1; None means one forward pass more (equation 9).
        method, time_limit_s, options: of each solve.
        total_s: seconds for all.
        on_step: called after each solve with what is known by then.

    Raises:
        InvalidData: `batch_bytes` above the fixed bytes, a graph without bytes that grow, no backward pass marked.
    """
    if not 0 <= batch_bytes <= graph.fixed_bytes:
        raise InvalidData(f"batch_bytes must be from 0 to the {graph.fixed_bytes} fixed bytes, not {batch_bytes}")
    search = _Search(graph, budget_bytes, batch_bytes, most_cost_ns, Deadline(total_s))
    unclear: set[int] = set()
    while not search.deadline.passed() and not (cancelled is not None and cancelled()):
        batch = search.next_batch(unclear)
        if batch is None:
            if search.floor == search.ceiling or not search.timed_out or time_limit_s is None:
                break
            unclear, time_limit_s, search.timed_out = set(), 3 * time_limit_s, False
            continue
        if not search.try_batch(batch, method, time_limit_s, options, cancelled):
            unclear.add(batch)
        if on_step is not None:
            on_step(search.result(method))
    return search.result(method)


class _Search:
    def __init__(
        self, graph: Graph, budget_bytes: int, batch_bytes: int, most_cost_ns: int | None, deadline: Deadline
    ) -> None:
        self.graph, self.budget, self.batch_bytes, self.deadline = graph, budget_bytes, batch_bytes, deadline
        self.most = one_forward_pass_more(graph) if most_cost_ns is None else most_cost_ns
        self.curve = Curve(graph)
        self.floor = 0
        self.plan: Plan | None = None
        self.timed_out = False
        least = least_need(graph)[0]
        if least - graph.fixed_bytes + batch_bytes <= 0:
            raise InvalidData("nothing in the graph grows with the batch, so there is no largest one")
        self.ceiling = self._largest(least) if self.most >= graph.total_cost_ns else 0

    def _budget(self, batch: int) -> int:
        """What a batch leaves for the graph of batch 1, fixed bytes included."""
        staying = self.graph.fixed_bytes - self.batch_bytes
        return staying + (self.budget - staying) // batch

    def _largest(self, peak: int) -> int:
        """Equation 10: the largest batch at which a plan with this peak at batch 1 fits."""
        staying = self.graph.fixed_bytes - self.batch_bytes
        return max(0, (self.budget - staying) // (peak - staying))

    def next_batch(self, unclear: set[int]) -> int | None:
        """The middle between the floor and what lies above it, then between the unclear and the ceiling."""
        stops = sorted(batch for batch in unclear if self.floor < batch <= self.ceiling)
        low, high = self.floor, (stops[0] if stops else self.ceiling + 1)
        if high - low > 1:
            return (low + high) // 2
        if stops and stops[-1] < self.ceiling:
            return (stops[-1] + self.ceiling + 1) // 2
        return None

    def try_batch(
        self,
        batch: int,
        method: str,
        time_limit_s: float | None,
        options: Mapping[str, object] | None,
        cancelled: Callable[[], bool] | None,
    ) -> bool:
        """Solve until the plan is cheap enough or the bound too high; whether one of both was reached."""
        budget = self._budget(batch)

        def decided(news: Progress) -> bool:
            cheap = news.cost_ns is not None and news.cost_ns <= self.most
            return cheap or (news.whole_bound_ns is not None and news.whole_bound_ns > self.most)

        limit = min(time_limit_s or float("inf"), self.deadline.remaining())
        answer = self.curve.solve(
            budget, method, None if limit == float("inf") else limit, options, cancelled, enough=decided
        )
        known = self.curve.best(budget)
        if known is not None and known[0] <= self.most and isinstance(known[1], Plan):
            peak = verify(Problem(self.graph, budget), known[1]).peak_bytes
            self.plan, self.floor = known[1], max(self.floor, self._largest(peak))
            return True
        if self.curve.infeasible(budget) or self.curve.bound(budget) > self.most:
            self.ceiling = min(self.ceiling, batch - 1)
            return True
        self.timed_out |= answer.limit == "time"
        return False

    def result(self, method: str) -> LargestBatch:
        answer = None
        if self.plan is not None:
            problem = Problem(scaled(self.graph, self.floor, self.batch_bytes), self.budget)
            known = Curve(problem.graph).at(self.budget).with_plan(verify(problem, self.plan), self.plan)
            answer = known.answer(method, seconds=round(self.deadline.elapsed(), 6))
        ceiling = max(self.floor, self.ceiling)
        return LargestBatch(self.floor, ceiling, self.most, answer, round(self.deadline.elapsed(), 6))
