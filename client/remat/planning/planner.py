"""Who is asked for a plan, in which order, and why no answer is taken on trust.

The way of a problem: this machine's memo → the service, if one is set → the local solver, if installed → the client's
own greedy plan. Each answer is replayed on the caller's own problem before anybody sees it; whoever fails, lies or
stalls is passed over with a warning, unless `strict` makes that an error.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import httpx2

from remat_ir import Answer, Graph, InvalidData, Problem, Status, readable, working_set

from ..errors import BudgetTooSmall, NothingFound, Refused
from ..settings import Settings, checked_url, settings
from .budget import Budget, share_for
from .budget import Fraction as Share
from .check import checked
from .coordinator import Coordinator
from .http import Timeouts
from .memo import Memo
from .options import DEFAULT, SolveOptions
from .profiles import DiskProfiles, ProfileTable, SharedProfiles
from .sources import PATIENCE_S, GreedyPlanner, LocalPlanner, OnProgress, ServicePlanner

log = logging.getLogger("remat")


@runtime_checkable
class Planner(Protocol):
    """Anybody who answers problems.

    Example:
        >>> isinstance(GreedyPlanner(), Planner)
        True
    """

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """An answer; infeasible and out of time are answers too.

        While training goes on it is called from threads, in a process from two at once: it must not wait for a third.

        Args:
            options: of which `method`, `time_limit_s` and `max_gap` concern a planner.

        Raises:
            RematError: there is none.
        """
        ...


class FallbackPlanner:
    """Planners asked in turn until one has a plan, with a memo in front; `strict` lets the first failure out.

    Args:
        planners: in the order in which they are asked; named for the log by their class.
    """

    def __init__(self, planners: Sequence[Planner], *, memo: Memo | None = None, strict: bool = False) -> None:
        self.planners = tuple(planners)
        self.memo, self.strict = memo, strict
        self.stood_in: set[str] = set()
        """Digests of the problems for which the greedy plan stands in for that of a planner that failed."""

    def __repr__(self) -> str:
        return f"FallbackPlanner({self.planners!r}, memo={self.memo!r}, strict={self.strict})"

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """The first answer with a plan or a proof that there is none, checked; else the last one that had neither.

        Raises:
            RematError: every planner failed, or one did and `strict` is set.
        """
        known = self.remembered(problem, options)
        if known is None and self.memo is not None:
            known = self.memo.near(problem, options.method, options.max_gap)
        if known is not None:
            return known
        last: Answer | None = None
        failure: Exception | None = None
        for planner in self.planners:
            try:
                answer = checked(problem, planner.plan(problem, options, on_progress=on_progress))
            except (InvalidData, Refused) as error:
                # a method asked for by name, which nobody else may swap for another
                if options.method != "auto" and (isinstance(error, InvalidData) or error.status in (400, 413, 422)):
                    raise
                failure = error
            except Exception as error:  # noqa: BLE001 – whatever it is, the training job goes on
                failure = error
            else:
                infeasible = answer.status is Status.INFEASIBLE
                if answer.plan is not None or (infeasible and answer.claimed_by is None):
                    self.stood_in.discard(answer.digest or "")
                    if failure is not None and answer.plan is not None:
                        log.warning("%s", _in_its_place(planner, answer))
                        if isinstance(planner, GreedyPlanner) and answer.digest is not None:
                            self.stood_in.add(answer.digest)
                    # a greedy plan must not stand in the way of the service's once that is back
                    if self.memo is not None and not isinstance(planner, GreedyPlanner):
                        self.memo.put(problem, options.method, answer, options.time_limit_s)
                    return answer
                # that no plan fits is believed with a certificate, or where nobody else finds one
                last = answer if last is None or infeasible else last
                continue
            if self.strict:
                raise failure
            log.warning("%s gave no usable answer and is passed over: %s", _name(planner), failure)
        if last is None:
            raise failure or InvalidData("there is no planner to ask")
        return last

    def remembered(self, problem: Problem, options: SolveOptions = DEFAULT) -> Answer | None:
        """The answer to this very problem that this machine has kept, if it needs no more work."""
        if self.memo is None:
            return None
        return self.memo.get(problem, options.method, options.time_limit_s, options.max_gap, options.steps)


class CoordinatedPlanner:
    """Who is asked, the table of measured costs that goes with it, and what the processes of a job agree on.

    Attributes:
        asked: who is asked, in one of the processes and without a word to the others.
        profiles: the table that all processes see.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 200)
        >>> from remat.planning.profiles import DiskProfiles
        >>> from pathlib import Path
        >>> CoordinatedPlanner(GreedyPlanner(), DiskProfiles(Path("profiles"))).plan(problem).cost_ns
        2
    """

    def __init__(self, asked: Planner, profiles: ProfileTable, coordinator: Coordinator | None = None) -> None:
        self.asked = asked
        self.coordinator: Coordinator = coordinator or Coordinator()
        self.profiles = self.coordinator.table(profiles)

    def here(self) -> CoordinatedPlanner:
        """The planner that the present call may ask: itself, where all processes of the job make the same call."""
        return self

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """One answer for all processes.

        Raises:
            RanksDiffer: some process poses another problem.
            RematError: there is no answer; every process hears why.
        """
        return self.coordinator.answer(problem, lambda: self.asked.plan(problem, options, on_progress=on_progress))


def _name(planner: Planner) -> str:
    """A planner in a message: a service by its URL, any other by its class, since what it shows may be secret."""
    return repr(planner) if isinstance(planner, ServicePlanner) else type(planner).__name__


def _in_its_place(planner: Planner, answer: Answer) -> str:
    """Whose plan is taken where another planner failed, and what that may cost."""
    said = f"the plan is {_name(planner)}'s instead"
    if answer.cost_ns is None or not answer.bound_ns:
        return said
    tenths = -((answer.bound_ns - answer.cost_ns) * 1000 // answer.bound_ns)  # rounded up
    return f"{said}: it costs at most {tenths / 10:g} % more than the best plan"


def check_method(planner: Planner, method: str) -> None:
    """Refuse a method that is not one of the local solver's, where that is asked first: before anything is captured.

    Raises:
        InvalidData: the message lists the solver's methods.
    """
    first = planner.planners[0] if isinstance(planner, FallbackPlanner) else planner
    if method != "auto" and isinstance(first, LocalPlanner):
        first.check_method(method)


def service_of(planner: Planner) -> ServicePlanner | None:
    """The service that a planner asks, if there is one."""
    asked = planner.planners if isinstance(planner, FallbackPlanner) else (planner,)
    return next((each for each in asked if isinstance(each, ServicePlanner)), None)


def page_of(planner: Planner, answer: Answer) -> str | None:
    """The URL at which a browser shows a solve, if a service made the answer."""
    service = service_of(planner)
    return None if service is None or answer.id is None else service.page(answer.id)


def planner_for(
    planner: Planner | str | None = None,
    *,
    strict: bool = False,
    given: Settings | None = None,
    transport: httpx2.AsyncBaseTransport | None = None,
    timeouts: Timeouts | None = None,
    patience_s: float = PATIENCE_S,
) -> CoordinatedPlanner:
    """The planner that an argument means, with its service's table of measured costs, or this machine's own.

    Args:
        planner: None: the service of REMAT_BASE_URL if set, the local solver if installed, the greedy plan;
            a URL: that service, with the same fallbacks; "local": the local solver, which must be installed;
            "greedy": the client's own plan; a `Planner`: that one, its answers checked. A `RankPlanner` stays as it is:
            ranks that fell back each by itself would run different plans.
        strict: raise at the first failure instead of falling back.

    Raises:
        InvalidData: neither a planner nor one of these words, or "local" without a solver.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 200)
        >>> planner_for("greedy").plan(problem).ending
        'optimal'
    """
    if isinstance(planner, CoordinatedPlanner):
        return planner
    here = given or settings()
    disk = DiskProfiles(here.cache_dir / "profiles")
    if isinstance(planner, FallbackPlanner):
        return CoordinatedPlanner(planner, disk)
    memo: Memo | None = Memo(here.cache_dir / "answers")
    asked: list[Planner] = []
    if planner is not None and not isinstance(planner, str):
        _refuse_no_planner(planner)
        asked, memo = [planner], None
    elif planner == "greedy":
        memo = None
    elif planner == "local":
        asked = [LocalPlanner()]
    else:
        if planner is not None and "://" not in planner:
            raise InvalidData(f"a planner is a URL, 'local' or 'greedy', not {planner!r}")
        url = here.service_url if planner is None else checked_url(planner)
        if url is not None and not here.offline:
            asked = [
                ServicePlanner(url, api_key=here.api_key, transport=transport, timeouts=timeouts, patience_s=patience_s)
            ]
        if not (strict and asked):
            try:
                asked.append(LocalPlanner())
            except InvalidData as error:
                log.debug("no local solver: %s", error)
    if not (strict and asked):
        asked.append(GreedyPlanner())
    first = asked[0]
    table = SharedProfiles(first.http, disk) if isinstance(first, ServicePlanner) else disk
    return CoordinatedPlanner(FallbackPlanner(asked, memo=memo, strict=strict), table)


def _refuse_no_planner(planner: object) -> None:
    """Refuse what cannot be asked as a `Planner` is.

    Raises:
        InvalidData: it has no method `plan`, or one that takes other arguments.
    """
    if not isinstance(planner, Planner) or not callable(planner.plan) or isinstance(planner, type):
        raise InvalidData(f"a planner must have a method `plan`; {planner!r} has none")
    try:
        inspect.signature(planner.plan).bind(None, DEFAULT, on_progress=None)
    except TypeError as error:
        raise InvalidData(
            f"the method `plan` of {type(planner).__name__} must take (problem, options, *, on_progress): {error}"
        ) from None


def plan_or_raise(answer: Answer, graph: Graph | None = None, budget: Budget | None = None) -> Answer:
    """The answer if it has a plan; the error names the op of `graph` that needs the most.

    Args:
        budget: what was asked for; where it is a share, the error names the one that is enough.

    Raises:
        BudgetTooSmall, NothingFound: it has none; the message says what is enough.
    """
    if answer.plan is not None:
        return answer
    infeasible = answer.status is Status.INFEASIBLE
    said = (answer.message or ("No plan fits" if infeasible else f"The solve ended {answer.status.value}")).rstrip(".")
    if graph is not None and "alone needs" in said:  # a service knows no names
        said = re.sub(r"\bop (\d+)(?= alone)", lambda found: graph.op_label(int(found[1])), said)
    elif graph is not None:
        op, need = working_set(graph)
        said += f"; {graph.op_label(op)} alone needs {readable(need)} of the {readable(answer.budget_bytes)} given"
    if infeasible and answer.claimed_by is not None:
        said += f", as {answer.claimed_by} claims without a certificate"
    least = answer.least_budget_bytes
    if least:
        said += f"; {readable(least, up=True)} is enough"
        if graph is not None and isinstance(budget, Share):
            said += f", a share of {share_for(graph, least)}"
    raise (BudgetTooSmall if infeasible else NothingFound)(said, answer)
