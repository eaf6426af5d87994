"""The stage program that chooses the op order too, for small graphs."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import InvalidPlan, duration, verify
from remat_ir.restrictions import ONE_PER_STAGE

from ..array_view import view_of
from ..backends import Engine, Improvement
from ..deadline import TimeUp
from ..formulate import any_order, entries, reordered
from ..formulate.tight import OrderFormulation
from ..incumbent import Incumbent
from ..program import Floats
from .fallback import Spare
from .milp import MilpOptions, end_of_engine, has_room, starting_plan


@dataclass(frozen=True)
class OrderOptions(MilpOptions):
    """As for the paper's program; the stages of each op are one.

    Attributes:
        most_ops: larger graphs are refused: the program has a symmetry that engines do not see through.
    """

    most_ops: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.most_ops) is not int or not 1 <= self.most_ops <= 1000:
            raise ValueError(f"most_ops must be an integer from 1 to 1000, not {self.most_ops!r}")
        if self.recomputations != 1:
            raise ValueError("recomputations must be 1: an op may run in any stage, once in each")


def run_order(incumbent: Incumbent, options: OrderOptions, spare: Spare | None = None) -> None:
    """Find the best op order and plan together; what is proved holds for the graph's own order too.

    A plan in the graph's own order is offered. A cheaper one in another order is replayed by the verifier as a plan of
    the ops in that order, and only told: the graph's order is a promise to the training step, and no plan breaks it.
    """
    problem = incumbent.problem
    graph = problem.graph
    if graph.ops > options.most_ops:
        incumbent.reason = (
            f"milp-order takes graphs of up to {options.most_ops} ops (option most_ops), not {graph.ops}."
        )
        return
    # every op may run in every stage: twice the triangle
    if not has_room(incumbent, 2 * entries(view_of(problem)), options.memory_bytes):
        return
    start = starting_plan(incumbent, spare)
    try:
        formulation = any_order(problem, incumbent.stopped)
        first = None if start is None else formulation.start(start.computes, incumbent.stopped)
    except TimeUp:
        return
    found = _Found(incumbent, formulation)
    with Engine(options.engine, memory_bytes=options.memory_bytes) as engine:
        outcome = engine.run(
            formulation.program,
            deadline=incumbent.deadline,
            start=first,
            on_improvement=found,
            stopped=incumbent.stopped,
            relative_gap=incumbent.max_gap,
            threads=options.threads,
            seed=options.seed,
        )
    found.take(outcome.x, outcome.bound)
    if outcome.status == "infeasible" and incumbent.cost_ns is None:
        incumbent.ends_without_plan(
            "The engine finds no op order with a plan that fits the budget; in floating point that proves nothing.",
            (ONE_PER_STAGE,),
        )
    else:
        end_of_engine(incumbent, outcome)
    found.tell()


class _Found:
    """Takes the engine's news: plans in the graph's order are offered, the best of another order is remembered."""

    def __init__(self, incumbent: Incumbent, formulation: OrderFormulation) -> None:
        self._incumbent = incumbent
        self._formulation = formulation
        self._best: tuple[int, tuple[int, ...]] | None = None

    def __call__(self, news: Improvement) -> None:
        self.take(news.x, news.bound)

    def take(self, x: Floats | None, bound: float) -> None:
        """A solution or None, and a bound."""
        proved = self._formulation.bound_ns(bound)
        if proved > self._incumbent.problem.graph.total_cost_ns:
            # the fixed order is one of the orders, so what no order beats, it does not beat
            self._incumbent.raise_bound(proved, "milp-order", (ONE_PER_STAGE,))
        if x is None:
            return
        problem, plan, order = reordered(self._incumbent.problem, self._formulation.sequence(x))
        try:
            from_judge = verify(problem, plan).cost_ns
        except InvalidPlan:  # over the budget by the engine's tolerance
            return
        if order == tuple(range(len(order))):
            self._incumbent.offer(plan, "milp-order")
        elif self._best is None or from_judge < self._best[0]:
            self._best = (from_judge, order)

    def tell(self) -> None:
        """Say what another order would cost, if that is less."""
        cost = self._incumbent.cost_ns
        if self._best is not None and (cost is None or self._best[0] < cost):
            self._incumbent.note(
                f"In the op order {', '.join(map(str, self._best[1]))} there is a plan of {duration(self._best[0])}; "
                "it is not executed, because the graph's own order is kept."
            )
