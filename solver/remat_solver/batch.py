"""The largest batch that trains within a budget at bounded extra cost (Checkmate, equations 9 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from remat_ir import Graph, Plan, Problem, Progress, Proof, verify
from remat_ir.batch import BatchFamily, LargestBatch

from .baselines.heuristics import Baseline
from .bounds import least_need
from .deadline import Deadline
from .methods import method_named
from .options import Options
from .sweep import Curve


@dataclass
class BatchSearch:
    """Which batch to try next: between the largest reached and the smallest impossible one.

    Attributes:
        floor: the largest batch with a plan that is cheap enough.
        ceiling: the largest batch that is not proved impossible.
        unclear: batches above the floor that were tried in vain in this round.
        factor: by how much longer than at first a batch is tried now.
        again: whether more time may help: some try ended for lack of it.
    """

    floor: int
    ceiling: int
    unclear: set[int] = field(default_factory=set)
    factor: int = 1
    again: bool = False

    def next_batch(self) -> int | None:
        """The middle between the floor and what lies above it, then between the unclear and the ceiling.

        After the last of a round what was unclear is tried again, three times as long; None where that can't help.
        """
        batch = self._of_round()
        if batch is None and self.floor < self.ceiling and self.again:
            self.unclear, self.again, self.factor = set(), False, 3 * self.factor
            batch = self._of_round()
        return batch

    def _of_round(self) -> int | None:
        stops = sorted(batch for batch in self.unclear if self.floor < batch <= self.ceiling)
        low, high = self.floor, (stops[0] if stops else self.ceiling + 1)
        if high - low > 1:
            return (low + high) // 2
        if stops and stops[-1] < self.ceiling:
            return (stops[-1] + self.ceiling + 1) // 2
        return None

    def reached(self, batch: int) -> None:
        """There is a plan at a batch, so at every smaller one."""
        self.floor = max(self.floor, batch)
        self.ceiling = max(self.ceiling, self.floor)

    def impossible(self, batch: int) -> None:
        """There is no plan at a batch, so at no larger one."""
        self.ceiling = max(self.floor, min(self.ceiling, batch - 1))

    def tried(self, batch: int, out_of_time: bool) -> None:
        """Neither came of a try."""
        self.unclear.add(batch)
        self.again |= out_of_time


def max_batch(
    graph: Graph,
    budget_bytes: int,
    *,
    batch: int = 1,
    values: tuple[int, ...] | None = None,
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

    Costs and sizes grow in proportion to the batch (equation 9), and the limit on relative cost stays. Batches are
    bisected: a plan cheap enough raises the floor to the largest batch that its own peak allows (equation 10), a bound
    above the limit lowers the ceiling. Where neither comes in time, the batch counts as out of reach for the floor, and
    the ceiling is then looked for above it; what time is left then goes to what is unclear, three times as long for
    each.

    A baseline solves nothing: each of its plans that costs no more than the limit has a largest batch by equation 10,
    and the largest of these is the baseline's.

    Args:
        graph: as captured.
        budget_bytes: fixed bytes included.
        batch, values, batch_bytes: of the capture, as in `remat_ir.batch.BatchFamily`.
        most_cost_ns: the limit on the cost at the batch of the capture; None means one forward pass more (equation 9).
        method, time_limit_s, options: of each solve.
        total_s: seconds for all.
        on_step: called after each solve with what is known by then.

    Raises:
        InvalidData: as `BatchFamily`; a graph in which nothing grows, with a link to the host, or without a backward
            pass to price; an unknown method or option.
    """
    family = BatchFamily(graph, budget_bytes, batch, values, batch_bytes)
    tries = _Tries(family, most_cost_ns, Deadline(total_s))
    chosen = method_named(method)
    if isinstance(chosen.run, Baseline):
        tries.run_baseline(chosen.run, chosen.read_options(options), cancelled)
        if on_step is not None:
            on_step(tries.result(method))
        return tries.result(method)
    while not tries.deadline.passed() and not (cancelled is not None and cancelled()):
        size = tries.search.next_batch()
        if size is None or (tries.search.factor > 1 and time_limit_s is None):
            break
        limit = None if time_limit_s is None else tries.search.factor * time_limit_s
        tries.try_batch(size, method, limit, options, cancelled)
        if on_step is not None:
            on_step(tries.result(method))
    return tries.result(method)


class _Tries:
    def __init__(self, family: BatchFamily, most_cost_ns: int | None, deadline: Deadline) -> None:
        self.family, self.deadline = family, deadline
        self.most = family.most_cost_ns() if most_cost_ns is None else most_cost_ns
        self.shared = Curve(family.graph) if family.uniform else None
        self.plan: Plan | None = None
        self.above: Proof | None = None
        ceiling = family.ceiling(lambda graph: least_need(graph)[0])
        self.search = BatchSearch(0, ceiling if self.most >= family.graph.total_cost_ns else 0)

    def _curve(self, problem: Problem) -> Curve:
        """What is known about a batch: of one graph at other budgets, or of its own graph and the best plan so far."""
        if self.shared is not None:
            return self.shared
        curve = Curve(problem.graph)
        if self.plan is not None:
            curve.plans.append((verify(Problem(problem.graph, 2**53), self.plan), self.plan))
        return curve

    def try_batch(
        self,
        batch: int,
        method: str,
        time_limit_s: float | None,
        options: Mapping[str, object] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        """Solve until the plan is cheap enough or the bound too high."""
        problem = self.family.at(batch)
        curve, budget = self._curve(problem), problem.budget_bytes

        def decided(news: Progress) -> bool:
            cheap = news.cost_ns is not None and news.cost_ns <= self.most
            return cheap or (news.whole_bound_ns is not None and news.whole_bound_ns > self.most)

        answer = curve.solve(budget, method, time_limit_s, self.deadline, options, cancelled, decided)
        known = curve.at(budget)
        if known.cost_ns is not None and known.cost_ns <= self.most and isinstance(known.plan, Plan):
            self.plan = known.plan
            self.search.reached(max(batch, self.family.largest(self.plan)))
        elif known.infeasible or curve.bound(budget) > self.most:
            self.search.impossible(batch)
            self.above = known.proof
        else:
            self.search.tried(batch, answer.limit == "time")

    def run_baseline(self, baseline: Baseline, options: Options, cancelled: Callable[[], bool] | None) -> None:
        """Take the plan with the largest batch by equation 10; of two with the same, the cheaper."""
        best: tuple[int, int] = 0, 0
        for cost_ns, plan_of_choice in baseline.choices(self.family.graph, options):
            if self.deadline.passed() or (cancelled is not None and cancelled()):
                break
            if cost_ns > self.most:
                continue
            plan = plan_of_choice()
            found = self.family.largest(plan), -cost_ns
            if found[0] and found > best:
                best, self.plan = found, plan
                self.search.reached(found[0])

    def result(self, method: str) -> LargestBatch:
        answer, found = None, self.search
        if self.plan is not None:
            problem = Problem(self.family.scaled(found.floor), self.family.budget_bytes)
            known = Curve(problem.graph).at(problem.budget_bytes).with_plan(verify(problem, self.plan), self.plan)
            answer = known.answer(method, seconds=round(self.deadline.elapsed(), 6))
        certain = self.family.impossible(found.ceiling + 1, self.most, self.above)
        seconds = round(self.deadline.elapsed(), 6)
        claimed_by = None if certain else method
        return LargestBatch(found.floor, found.ceiling, self.most, answer, seconds, self.above, claimed_by)
