"""From a problem to an answer: the one function through which everybody solves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from remat_ir import (
    Answer,
    AnyPlan,
    Graph,
    InvalidData,
    InvalidPlan,
    Problem,
    Progress,
    Proof,
    plain_peak,
    readable,
)
from remat_ir.proof import InvalidProof, carried, certifiable, graph_of_subject, prove

from .bounds import MOST_VALUES, known_budget, least_need, pair_need, pair_proof, pair_table
from .deadline import Deadline, Work
from .incumbent import Incumbent, checked
from .kernels import await_kernels, loaded
from .methods import method_named, runner_of


def solve(
    problem: Problem,
    *,
    method: str = "auto",
    time_limit_s: float | None = 60.0,
    max_gap: float = 0.001,
    steps: int | None = None,
    options: Mapping[str, object] | None = None,
    start: AnyPlan | None = None,
    bound_ns: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    certify: bool = True,
    proof: Proof | None = None,
) -> Answer:
    """Plan a problem: the best verified plan found in the time given, and what was proved about it.

    Args:
        method: a name of `remat_solver.METHODS`, or of a method that another installed package adds (entry points of
            the group `remat.methods`); "auto" picks and combines.
        time_limit_s: wall-clock seconds; None means until done. They begin once the method's kernels are loaded: in a
            new installation these are compiled first.
        max_gap: stop once (cost − bound) / cost is no more than this.
        steps: of training that will run by the plan: stop once all that they could still gain is less than the time
            that was spent (`remat_ir.worth_more_time`); None, or `max_gap` 0, asks for the gap whatever it takes.
        options: the method's own options.
        start: a plan to start from; must be valid for the problem.
        bound_ns: a bound already proved for the whole space.
        on_progress: called at each improvement, from the thread that found it; must be quick.
        cancelled: polled; once it returns True the solve ends with what it has.
        certify: whether `bound_ns` of a graph is what a certificate proves, and other bounds are kept apart as claimed;
            False takes the engines' word for theirs, and `claimed_by` names who gave it.
        proof: a certificate of a problem with the same structure, at any budget and costs; what it still proves here is
            the bound to start with.

    Returns:
        An answer; infeasible, out of time and cancelled are answers too.

    Raises:
        InvalidData: an unknown method, option, or a limit that is not a number in range.
        InvalidPlan: `start` is not valid for the problem.
    """
    chosen = method_named(method)
    _in_range(time_limit_s, max_gap, steps)
    chosen_options = chosen.read_options(options)
    runner = runner_of(chosen, problem)
    work = Work() if getattr(chosen_options, "deterministic", False) else None
    if work is not None and time_limit_s is None:
        raise InvalidData("deterministic needs time_limit_s: the seconds of work to count", "/time_limit_s")
    incumbent = Incumbent(
        problem, Deadline(time_limit_s, work), max_gap, on_progress, cancelled, certify, steps if max_gap else None
    )

    if not chosen.any_budget and _hopeless(incumbent):
        return checked(problem, incumbent.answer(method))
    if start is not None:
        incumbent.try_offer(start, "start")
    if bound_ns is not None:
        incumbent.raise_bound(bound_ns, "start")
    if proof is not None and certifiable(problem.subject):
        _carry(incumbent, proof)
    if chosen.kernels and (chosen.any_budget or not _fits_plainly(problem)):
        _await_kernels(incumbent)
    if not incumbent.stopped():
        try:
            runner(incumbent, chosen_options)
        except InvalidPlan as error:  # a bug in the method; what was found so far is still the answer
            incumbent.drop(None, method, error)
    incumbent.stopped()  # notes which limit, if any, has been reached by now
    return checked(problem, incumbent.answer(method))


def _in_range(time_limit_s: float | None, max_gap: float, steps: int | None) -> None:
    if time_limit_s is not None and not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise InvalidData(f"time_limit_s must be a positive number, not {time_limit_s}", "/time_limit_s")
    if steps is not None and steps < 1:
        raise InvalidData(f"steps must be at least 1, or None, not {steps}", "/steps")
    if not 0 <= max_gap < 1:
        raise InvalidData(f"max_gap must be at least 0 and below 1, not {max_gap}", "/max_gap")


def _hopeless(incumbent: Incumbent) -> bool:
    """Whether a single op needs more than the budget; then the incumbent knows that no plan fits, and why."""
    problem = incumbent.problem
    needed, who = least_need(problem.subject)
    incumbent.needs_at_least(needed)
    if needed <= problem.capacity_bytes:
        return False
    impossible = None
    # the verdict is certain by now; what more there is to say of budgets takes no longer than is left
    if certifiable(problem.subject) and not incumbent.stopped():
        graph = graph_of_subject(problem)
        table = pair_table(graph, incumbent.stopped) if graph.values <= MOST_VALUES else None
        least = pair_need(graph, table).least_bytes
        incumbent.needs_at_least(least)
        impossible = pair_proof(replace(problem, budget_bytes=least - 1), table) if incumbent.certifies else None
    _await_kernels(incumbent)
    incumbent.suffices(known_budget(problem.subject, incumbent.stopped))
    incumbent.prove_infeasible(
        f"No plan fits: {who} alone needs {readable(needed)}; the budget is {readable(problem.capacity_bytes)}.",
        proof=impossible,
    )
    return True


def _await_kernels(incumbent: Incumbent) -> None:
    """Wait until every kernel can run: neither the time limit nor what `steps` are worth counts before that."""
    if loaded():
        return
    with incumbent.deadline.held():
        ready = await_kernels(incumbent.stopped)
    if not ready:
        incumbent.note("No program and no search has run: their kernels were still being compiled.")


def _fits_plainly(problem: Problem) -> bool:
    """Whether the plan without recomputations fits: `auto` looks at no other. What asks for budgets does."""
    return isinstance(problem.subject, Graph) and plain_peak(problem.subject) <= problem.budget_bytes


def _carry(incumbent: Incumbent, proof: Proof) -> None:
    """Record what a certificate of another budget or other costs proves here, if anything."""
    problem = incumbent.problem
    with contextlib.suppress(InvalidProof):
        here = carried(proof, problem)
        bound_ns = prove(problem, here).bound_ns
        if bound_ns is None:
            reason = f"No plan fits into {readable(problem.budget_bytes)}, as proved before."
            incumbent.prove_infeasible(reason, problem.budget_bytes + 1, here)
        else:
            incumbent.raise_bound(bound_ns, "start", proof=here)
