"""Two-phase rounding: S from the linear relaxation, R the least that S demands (Checkmate, printed version, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat_ir import Graph, Problem, plan_of
from remat_ir.restrictions import ONE_PER_STAGE

from ..array_view import view_of
from ..backends.engine import Engine
from ..backends.outcome import Ending
from ..baselines.recompute import Retained, computed
from ..deadline import TimeUp
from ..formulate.checkmate import checkmate
from ..formulate.formulation import Formulation
from ..formulate.tight import tight
from ..incumbent import Incumbent
from ..options import Options, share, whole, word
from ..program import Floats
from .heuristics import say_enough
from .milp import end_of_engine, has_room, program_entries

EPSILONS = (0.1, 0.02, 0.0, 0.2, 0.05, 0.15, 0.3, 0.4, 0.5, 0.6)
"""Allowances in the order tried; 0.1 is what the authors found to work well."""
THRESHOLDS = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)
"""Where S is rounded; 0.5 is the printed one."""


@dataclass(frozen=True)
class LpRoundingOptions(Options):
    """How the allowance is chosen.

    Attributes:
        epsilon: a single allowance to try, as printed; None searches.
        threshold: round S up above this; None tries several for each relaxation.
        program: the relaxation of "tight", or of "checkmate", the paper's own rows.
        tries: relaxations to solve at most.
        memory_bytes: what the engine may use; 0 means half of what is free, but at least 1 GiB.
    """

    epsilon: float | None = share(None)
    threshold: float | None = share(None)
    program: str = word("tight", ("tight", "checkmate"))
    tries: int = whole(16, 1)
    memory_bytes: int = whole(0)


def lp_rounding(incumbent: Incumbent, options: LpRoundingOptions, spare: object = None) -> None:
    """Solve relaxations at budgets shortened by ε, round, and offer what fits the whole budget (printed Section 5).

    The budget's part above the fixed bytes is shortened to (1 − ε) of it. Costs don't fall steadily with ε, so after
    a grid the search goes on halfway between the best ε and its neighbours. The relaxation at ε = 0 bounds the cost of
    every plan with one recomputation per op and stage.
    """
    found: dict[float, int | None] = {}  # ε → cost of the cheapest rounding that fits
    say_enough(incumbent)
    method = "milp" if options.program == "checkmate" else "milp-tight"
    if not has_room(incumbent, program_entries(method, view_of(incumbent.problem)), options.memory_bytes):
        return
    most = 1.0  # relaxations from this ε on have no solution
    with Engine("highs", memory_bytes=options.memory_bytes) as engine:
        while len(found) < options.tries and not incumbent.stopped():
            epsilon = _next(found, options, most)
            if epsilon is None:
                break
            try:
                ending, best = _round(incumbent, options, epsilon, engine)
            except TimeUp:
                break
            if ending == "infeasible" and epsilon:
                most = min(most, epsilon)
            elif ending != "optimal":
                break
            found[epsilon] = best
    if incumbent.plan is None and not incumbent.infeasible and found:
        incumbent.ends_without_plan("No rounding of the relaxations tried fits the budget.")


def _next(found: dict[float, int | None], options: LpRoundingOptions, most: float) -> float | None:
    if options.epsilon is not None:
        return None if found else options.epsilon
    for epsilon in EPSILONS:
        if epsilon not in found and epsilon < most:
            return epsilon
    fitting = [(cost, epsilon) for epsilon, cost in found.items() if cost is not None]
    if not fitting:
        return None
    tried, (_, best) = sorted(found), min(fitting)
    place = tried.index(best)
    gaps = [
        (abs(near - best), (near + best) / 2) for near in (*tried[max(0, place - 1) : place], *tried[place + 1 :][:1])
    ]
    width, middle = max(gaps)
    return middle if width > 0.002 else None


def _round(
    incumbent: Incumbent, options: LpRoundingOptions, epsilon: float, engine: Engine
) -> tuple[Ending, int | None]:
    """Solve the relaxation at one ε and offer its roundings: how it ended, and the cost of the cheapest that fits.

    Raises:
        TimeUp: the time was up before the relaxation was written.
    """
    problem, graph = incumbent.problem, incumbent.problem.graph
    budget = graph.fixed_bytes + int((1 - epsilon) * (problem.budget_bytes - graph.fixed_bytes))
    make = tight if options.program == "tight" else checkmate
    formulation: Formulation = make(view_of(Problem(graph, budget)), stop=incumbent.stopped)
    outcome = engine.lp(formulation.program, deadline=incumbent.deadline, stopped=incumbent.stopped)
    end_of_engine(incumbent, outcome)
    if outcome.status == "infeasible" and epsilon == 0:
        incumbent.ends_without_plan(
            "The engine finds no solution of the linear relaxation; in floating point that proves nothing.",
            (ONE_PER_STAGE,),
        )
    if outcome.status == "optimal" and epsilon == 0 and outcome.row_dual is not None:
        bound = formulation.bound_ns(formulation.program.dual_bound(outcome.row_dual))
        incumbent.raise_bound(bound, "lp-rounding", (ONE_PER_STAGE,))
    best: int | None = None
    if outcome.x is not None:
        for threshold in THRESHOLDS if options.threshold is None else (options.threshold,):
            order = computed(graph, rounded(formulation, graph, outcome.x, threshold))
            cost = sum(graph.op_cost_ns[op] for op in order)
            if best is None or cost < best:
                peak = incumbent.offer_or_suffices(plan_of(graph, order), f"lp-rounding ε = {epsilon:.3g}")
                best = cost if peak <= problem.budget_bytes else best
            if incumbent.stopped():
                break
    return outcome.status, best


def rounded(formulation: Formulation, graph: Graph, x: Floats, threshold: float) -> Retained:
    """S from a fractional solution: retained where S exceeds the threshold.

    Stages before the program's first run their op once and retain all that has a later use.
    """
    first = graph.ops - formulation.stages.count
    there = formulation.retain[: formulation.stages.count] >= 0
    held = np.zeros((graph.ops, graph.values), dtype=np.bool_)
    held[first:][there] = x[formulation.retain[: formulation.stages.count][there]] > threshold
    for value, op in enumerate(graph.value_op):
        users = graph.users[value]
        held[op + 1 : min(first, users[-1] + 1 if users else 0), value] = True
    stages: list[list[tuple[int, int]]] = []
    for value in range(graph.values):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], held[:, value], [False]))))
        stages.append([(int(start), int(end) - 1) for start, end in edges.reshape(-1, 2)])
    return stages
