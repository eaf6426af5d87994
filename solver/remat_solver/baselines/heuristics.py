"""The baselines of Checkmate's Table 1, each searching its own parameter for the cheapest plan within the budget.

With what they ask of a graph: whether its forward pass is linear, and which ops cut it in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from remat_ir import Graph, Plan, plain_peak, plain_plan, plan_of, readable

from ..incumbent import Incumbent
from ..options import Options, word
from .recompute import Retained, computed, plan_as_given
from .retained import advances, by_size, chen_retained, every_root, revolve_retained, thresholds


def checkpoint_all(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plain plan if it fits (Checkmate, Table 1)."""
    if not keep_everything(incumbent):
        peak = plain_peak(incumbent.problem.graph)
        incumbent.ends_without_plan(f"Keeping every value needs {readable(peak)}, over the budget.")


def keep_everything(incumbent: Incumbent) -> bool:
    """Whether the plain plan fits, which is offered; no plan costs less, since every op runs at least once."""
    graph = incumbent.problem.graph
    peak = plain_peak(graph)
    incumbent.suffices(peak)
    if peak > incumbent.problem.budget_bytes:
        return False
    incumbent.offer(plain_plan(graph), "checkpoint-all")
    return True


def linear(graph: Graph, forward: int) -> bool:
    """Whether ops 0 … forward−1 form a path: each reads values of the op before it and of no other."""
    return all(
        {graph.value_op[value] for value in graph.op_inputs[op]} == ({op - 1} if op else set()) for op in range(forward)
    )


def articulation_points(graph: Graph, forward: int) -> list[int]:
    """Forward ops whose removal disconnects the forward pass, seen as an undirected graph, ascending.

    The step's input is joined to op 0 and its backward pass to op forward−1, so that on a linear graph every op is
    one, and the heuristics that use them are the original ones (Checkmate, Section 5.1.1).
    """
    import networkx as nx  # some three hundred modules, which no other method needs

    # op + 1 at each place; the step's input is at 0
    edges = {(graph.value_op[value] + 1, op + 1) for op in range(forward) for value in graph.op_inputs[op]}
    found = nx.articulation_points(nx.Graph([(0, 1), (forward, forward + 1), *edges]))
    return sorted(place - 1 for place in found if 0 < place <= forward)


MOST_SLOTS = 128
"""Numbers of slots that the search of `griewank` tries."""
MOST_REPEATS = 60
"""Steps per forward op above which a revolve schedule is not tried: it is far from any plan that anyone would run."""


@dataclass(frozen=True)
class BaselineOptions(Options):
    """When a baseline's values are freed.

    Attributes:
        freeing: "last-use": after the last use in the plan, which needs less memory; "paper": what the baseline's
            matrix S retains is held as long as S says, memory by equations 2 to 5 of Checkmate, as its tables count it.
    """

    freeing: str = word("last-use", ("last-use", "paper"))


@dataclass(frozen=True)
class Baseline:
    """A baseline as a method: calling it offers the plans of all its choices that fit and are cheaper.

    Attributes:
        summary: for a person.
        settings: S of each setting of its parameter, of a graph and the number of its forward ops.
        only_linear: whether it is for linear graphs alone.
        options: the class of its options; where S ends at each value's last use there are none: both freeings are one.
    """

    name: str
    summary: str
    settings: Callable[[Graph, int], Iterable[Retained]]
    only_linear: bool = False
    options: type[Options] = BaselineOptions

    def why_not(self, graph: Graph) -> str | None:
        """One sentence on why it does not apply to a graph, or None."""
        forward = graph.backward_from
        if not forward:
            return f"{self.name} does not apply: the graph marks no backward pass after a forward one."
        if self.only_linear and not linear(graph, forward):
            return f"{self.name} does not apply: the forward pass is not linear."
        return None

    def choices(self, graph: Graph, options: Options) -> Iterator[tuple[int, Callable[[], Plan]]]:
        """The cost of each of its plans in ns, and what makes the plan; none where the baseline does not apply."""
        if self.why_not(graph) is not None:
            return
        as_given = options == BaselineOptions("paper")
        for retained in self.settings(graph, graph.backward_from or 0):
            order = computed(graph, retained)
            plan = partial(plan_as_given, graph, retained) if as_given else partial(plan_of, graph, order)
            yield sum(graph.op_cost_ns[op] for op in order), plan

    def __call__(self, incumbent: Incumbent, options: Options = BaselineOptions()) -> None:
        """Offer the plans of all choices that fit and are cheaper than what is there."""
        graph = incumbent.problem.graph
        why_not = self.why_not(graph)
        if why_not is not None:
            incumbent.ends_without_plan(why_not)
            return
        best: int | None = None
        least: int | None = None
        for cost_ns, plan in self.choices(graph, options):
            # its replay, here and of the answer, takes as long again: a deep linear order may take nine computations
            # an op
            if incumbent.interrupted():
                return
            if best is None or cost_ns < best:
                peak = incumbent.offer_or_suffices(plan(), self.name)
                least = peak if least is None else min(least, peak)
                if peak <= incumbent.problem.budget_bytes:
                    best = cost_ns
            if incumbent.stopped():
                return
        if best is None:
            incumbent.ends_without_plan(
                f"{self.name} has no plan within the budget; its least peak is {readable(least or 0)}."
            )


def _all_forward(graph: Graph, forward: int) -> Sequence[int]:
    return range(forward)


def _roots(candidates: Callable[[Graph, int], Sequence[int]], graph: Graph, forward: int) -> Iterator[Retained]:
    """√n segments (Chen et al., Section 3.1)."""
    yield chen_retained(graph, forward, every_root(candidates(graph, forward)))


def _greedy(candidates: Callable[[Graph, int], Sequence[int]], graph: Graph, forward: int) -> Iterator[Retained]:
    """Segments of about equal memory, with a search over their size (Chen et al., Alg. 3)."""
    allowed = candidates(graph, forward)
    seen: set[tuple[int, ...]] = set()
    for threshold in thresholds(graph, forward):
        chosen = by_size(graph, forward, allowed, threshold)
        if chosen not in seen:
            seen.add(chosen)
            yield chen_retained(graph, forward, chosen)


def _revolutions(graph: Graph, forward: int) -> Iterator[Retained]:
    """Revolve, from as many slots as steps to few (Griewank and Walther, Algorithm 799)."""
    for slots in _spread(forward, MOST_SLOTS):
        if advances(forward, slots) <= MOST_REPEATS * forward:
            yield revolve_retained(graph, forward, slots)


def _spread(most: int, count: int) -> list[int]:
    """most … 1; where that is more than `count` numbers, all the small ones and ever fewer of the large."""
    if most <= count:
        return list(range(most, 0, -1))
    half = count // 2
    ratio = (most / half) ** (1 / half)
    return sorted({*range(1, half + 1), *(round(half * ratio**i) for i in range(half + 1))}, reverse=True)


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("griewank", "revolve's binomial schedule, on linear graphs", _revolutions, True, Options),
        Baseline(
            "chen-sqrt", "√n segments of √n ops, on linear graphs", partial(_roots, _all_forward), only_linear=True
        ),
        Baseline(
            "chen-greedy",
            "segments of equal memory, their size searched, on linear graphs",
            partial(_greedy, _all_forward),
            only_linear=True,
        ),
        Baseline("ap-sqrt", "chen-sqrt between articulation points", partial(_roots, articulation_points)),
        Baseline("ap-greedy", "chen-greedy between articulation points", partial(_greedy, articulation_points)),
        Baseline("linearized-sqrt", "chen-sqrt along the topological order", partial(_roots, _all_forward)),
        Baseline("linearized-greedy", "chen-greedy along the topological order", partial(_greedy, _all_forward)),
    )
}
"""Checkmate, Table 1 and Sections 5.1.1 (articulation points) and 5.1.2 (topological order)."""
