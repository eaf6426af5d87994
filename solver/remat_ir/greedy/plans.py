"""Greedy plans of a graph: of a few walks inside a budget, of the least memory, and of one more forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ..graph import Graph
from ..plan import Plan, plain_plan, plan_of
from ..problem import plain_peak
from ..replay import replay
from ..working_set import working_set
from .prune import without_needless
from .walk import never, walk

WEIGHTS = (0.5, 0.0, 1.0)
"""Exponents of the distance to the next use that are tried, in this order."""


def greedy_plan(
    graph: Graph, budget_bytes: int, *, stop: Callable[[], bool] = never, tries: int = len(WEIGHTS)
) -> Plan | None:
    """The cheapest of a few eviction plans within the budget, or None if none was found; see `greedy_plans`."""
    last = deque(greedy_plans(graph, budget_bytes, stop=stop, tries=tries), maxlen=1)
    return last[0] if last else None


def greedy_plans(
    graph: Graph,
    budget_bytes: int,
    *,
    stop: Callable[[], bool] = never,
    tries: int = len(WEIGHTS),
    failures: int = len(WEIGHTS),
    skip: int = 0,
    patient: bool = False,
) -> Iterator[Plan]:
    """A few plans within the budget in bytes, as they are found, each cheaper than the one before.

    The plain plan alone where it fits; else the plan that computes the forward pass once more, where that fits, and
    walks through the graph by several rules, all without those recomputations that the budget does not need.
    Deterministic, as long as `stop` is.

    Args:
        stop: asked all the time; once it says so, what is under way is left, and a plan is yielded as it is.
        tries: how many walks are made once one has led to a plan.
        failures: after how many walks that have led to none it gives up.
        skip: how many rules are left out, and with them the plan that computes the forward pass once more.
        patient: the first walk is made to its end, whatever `stop` says.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1, 9, 1, 1], [4, 1, 4, 1], [[], [0], [1], [0, 2]])
    >>> [plan.computes for plan in greedy_plans(graph, 9)]
    [(0, 1, 2, 3)]
    """
    if plain_peak(graph) <= budget_bytes:
        yield plain_plan(graph)
        return
    best: int | None = None
    for order in _orders(graph, budget_bytes, stop, tries, failures, skip, patient):
        order = without_needless(graph, order, budget_bytes, stop=stop)
        cost = sum(graph.op_cost_ns[op] for op in order)
        if best is None or cost < best:
            best = cost
            yield plan_of(graph, order)


def _orders(
    graph: Graph, budget_bytes: int, stop: Callable[[], bool], tries: int, failures: int, skip: int, patient: bool
) -> Iterator[list[int]]:
    if not skip and (patient or not stop()):
        again = checkpointed(graph)
        if peak_of(graph, again) <= budget_bytes:
            yield list(again.computes)
    found = False
    for count, weight in enumerate(WEIGHTS[skip:]):
        until = never if patient and not count else stop
        if count >= (tries if found else failures) or until():
            return
        order = walk(graph, budget_bytes, weight, until)
        if order is not None:
            found = True
            yield order


def least_memory(
    graph: Graph,
    *,
    stop: Callable[[], bool] = never,
    rounds: int = 12,
    weights: tuple[float, ...] = WEIGHTS,
    above_bytes: int | None = None,
) -> Plan:
    """A plan with a small peak, at whatever cost: walks inside limits halved towards the working-set bound.

    The plain plan where nothing smaller is found. Where `stop` says so, the best so far. `weights` are
    the rules that are tried in each round. `above_bytes`, a limit that walks were not inside of, is looked no further.
    """
    low, plan = working_set(graph).least_bytes if above_bytes is None else above_bytes + 1, plain_plan(graph)
    high = plain_peak(graph)
    for number in range(rounds):
        if low >= high or stop():
            break
        middle = low if number == 0 and above_bytes is None else (low + high) // 2
        orders = (walk(graph, middle, weight, stop) for weight in weights)
        found = next((plan_of(graph, order) for order in orders if order is not None), None)
        if found is None:
            low = middle + 1
        else:
            plan, high = found, peak_of(graph, found)
    return plan


def peak_of(graph: Graph, plan: Plan) -> int:
    """The peak of a valid plan in bytes, fixed bytes included."""
    return max(moment.peak_bytes for moment in replay(graph, plan))


def checkpointed(graph: Graph) -> Plan:
    """The plan that computes the forward pass once more when the backward pass begins, and holds what it cannot.

    Of a graph without a backward pass it is the plain plan.
    """
    boundary = graph.backward_from
    if boundary is None:
        return plain_plan(graph)
    again: set[int] = set()
    stack = [v for op in range(boundary, graph.ops) for v in graph.op_inputs[op]]
    while stack:
        maker = graph.value_op[stack.pop()]
        if maker < boundary < graph.last_stage[maker] and maker not in again:
            again.add(maker)
            stack.extend(graph.op_inputs[maker])
    return plan_of(graph, (*range(boundary + 1), *sorted(again), *range(boundary + 1, graph.ops)))
