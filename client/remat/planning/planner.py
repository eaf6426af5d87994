"""Who is asked for a plan, in which order, and why no answer is taken on trust.

The way of a problem: this machine's memo → the service, if one is set → the local solver, if installed → the client's
own greedy plan. Each answer is replayed on the caller's own problem before anybody sees it; whoever fails, lies or
stalls is passed over with a warning, unless `strict` makes that an error.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import httpx2

from remat_ir import Answer, Graph, InvalidData, Problem, Status
from remat_ir.working_set import working_set

from ..errors import BudgetTooSmall, NothingFound, Refused
from ..settings import Settings, checked_url, settings
from .check import checked
from .http import Http, Timeouts
from .memo import Memo
from .profiles import DiskProfiles, ProfileTable, SharedProfiles
from .sources import PATIENCE_S, GreedyPlanner, LocalPlanner, OnProgress, ServicePlanner

log = logging.getLogger("remat")


@runtime_checkable
class Planner(Protocol):
    """Anybody who answers problems."""

    def plan(
        self,
        problem: Problem,
        *,
        method: str = "auto",
        time_limit_s: float = 60.0,
        max_gap: float = 0.001,
        on_progress: OnProgress | None = None,
    ) -> Answer:
        """An answer; infeasible and out of time are answers too.

        Raises:
            RematError: there is none.
        """
        ...


class FallbackPlanner:
    """Planners asked in turn until one has a plan, with a memo in front; `strict` lets the first failure out.

    Args:
        planners: in the order in which they are asked; named for the log by their class.
        profiles: the table of measured costs that goes with them.
    """

    def __init__(
        self,
        planners: Sequence[Planner],
        *,
        memo: Memo | None = None,
        profiles: ProfileTable | None = None,
        strict: bool = False,
    ) -> None:
        self.planners = tuple(planners)
        self.memo, self.profiles, self.strict = memo, profiles, strict

    def plan(
        self,
        problem: Problem,
        *,
        method: str = "auto",
        time_limit_s: float = 60.0,
        max_gap: float = 0.001,
        on_progress: OnProgress | None = None,
    ) -> Answer:
        """The first answer with a plan or a proof that there is none, checked; else the last one that had neither.

        Raises:
            RematError: every planner failed, or one did and `strict` is set.
        """
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise InvalidData(f"time_limit_s must be a positive number, not {time_limit_s}", "/time_limit_s")
        if not 0 <= max_gap < 1:
            raise InvalidData(f"max_gap must be at least 0 and below 1, not {max_gap}", "/max_gap")
        if self.memo is not None:
            known = self.memo.get(problem, method, time_limit_s, max_gap)
            if known is not None:
                return known
        last: Answer | None = None
        failure: Exception | None = None
        for planner in self.planners:
            try:
                answer = checked(
                    problem,
                    planner.plan(
                        problem, method=method, time_limit_s=time_limit_s, max_gap=max_gap, on_progress=on_progress
                    ),
                )
            except (InvalidData, Refused) as error:
                # a method asked for by name, which nobody else may swap for another
                if method != "auto" and (isinstance(error, InvalidData) or error.status in (400, 413, 422)):
                    raise
                failure = error
            except Exception as error:  # whatever it is, the training job goes on
                failure = error
            else:
                if answer.plan is not None or answer.status is Status.INFEASIBLE:
                    self._remember(planner, problem, method, answer, time_limit_s)
                    return answer
                last = answer
                continue
            if self.strict:
                raise failure
            log.warning("%s gave no usable answer and is passed over: %s", type(planner).__name__, failure)
        if last is None:
            raise failure or InvalidData("there is no planner to ask")
        return last

    def _remember(
        self, planner: Planner, problem: Problem, method: str, answer: Answer, time_limit_s: float | None
    ) -> None:
        # a greedy plan must not stand in the way of the service's once that is back
        if self.memo is not None and not isinstance(planner, GreedyPlanner):
            self.memo.put(problem, method, answer, time_limit_s)


def in_step(planner: object) -> bool:
    """Whether a planner must be asked by all ranks of a job in the same order, and so never beside the training."""
    return any(getattr(one, "in_step", False) for one in (planner, *getattr(planner, "planners", ())))


def planner_for(
    planner: Planner | str | None = None,
    *,
    strict: bool = False,
    given: Settings | None = None,
    transport: httpx2.BaseTransport | None = None,
    timeouts: Timeouts | None = None,
    patience_s: float = PATIENCE_S,
) -> Planner:
    """The planner that an argument means.

    Args:
        planner: None: the service of REMAT_BASE_URL if set, the local solver if installed, the greedy plan;
            a URL: that service, with the same fallbacks; "local": the local solver, which must be installed;
            "greedy": the client's own plan; a `Planner`: that one, its answers checked. A `RankPlanner` stays as it is:
            ranks that fell back each by itself would run different plans.
        strict: raise at the first failure instead of falling back.

    Raises:
        InvalidData: neither a planner nor one of these words, or "local" without a solver.
    """
    if isinstance(planner, FallbackPlanner) or getattr(planner, "in_step", False):
        return planner  # type: ignore[return-value]
    here = given or settings()
    disk = DiskProfiles(here.cache_dir / "profiles")
    memo = Memo(here.cache_dir / "answers")
    if planner is not None and not isinstance(planner, str):
        if not callable(getattr(planner, "plan", None)):
            raise InvalidData(f"a planner must have a method `plan`; {type(planner).__name__} has none")
        asked: list[Planner] = [planner]
        return FallbackPlanner(
            _with_fallbacks(asked, strict, local=False), profiles=profile_table(planner, here), strict=strict
        )
    if planner == "greedy":
        return FallbackPlanner([GreedyPlanner()], profiles=disk, strict=strict)
    if planner == "local":
        return FallbackPlanner(
            _with_fallbacks([LocalPlanner()], strict, local=False), memo=memo, profiles=disk, strict=strict
        )
    if planner is not None and "://" not in planner:
        raise InvalidData(f"a planner is a URL, 'local' or 'greedy', not {planner!r}")
    url = here.service_url if planner is None else checked_url(planner)
    if url is None or here.offline:
        return FallbackPlanner(_with_fallbacks([], strict, local=True), memo=memo, profiles=disk, strict=strict)
    asking = ServicePlanner(url, api_key=here.api_key, transport=transport, timeouts=timeouts, patience_s=patience_s)
    return FallbackPlanner(
        _with_fallbacks([asking], strict, local=True),
        memo=memo,
        profiles=SharedProfiles(asking.http, disk),
        strict=strict,
    )


def profile_table(planner: object, given: Settings | None = None) -> ProfileTable:
    """The table of measured costs that goes with a planner: its service's, or this machine's own."""
    table = getattr(planner, "profiles", None)
    if table is not None:
        found: ProfileTable = table
        return found
    disk = DiskProfiles((given or settings()).cache_dir / "profiles")
    http = getattr(planner, "http", None)
    return SharedProfiles(http, disk) if isinstance(http, Http) else disk


def plan_or_raise(answer: Answer, graph: Graph | None = None) -> Answer:
    """The answer if it has a plan; the error names the op of `graph` that needs the most.

    Raises:
        BudgetTooSmall, NothingFound: it has none; the message says what would do.
    """
    if answer.plan is not None:
        return answer
    infeasible = answer.status is Status.INFEASIBLE
    said = (answer.message or ("No plan fits" if infeasible else f"The solve ended {answer.status.value}")).rstrip(".")
    if graph is not None and "alone needs" in said:  # a service knows no names
        said = re.sub(r"\bop (\d+)(?= alone)", lambda found: graph.op_label(int(found[1])), said)
    elif graph is not None:
        op, need = working_set(graph)
        said += f"; {graph.op_label(op)} alone needs {need} bytes of the {answer.budget_bytes} given"
    least = answer.least_budget_bytes
    if least:
        said += f"; {least} bytes are known to do"
    raise (BudgetTooSmall if infeasible else NothingFound)(said, answer)


def _with_fallbacks(first: list[Planner], strict: bool, *, local: bool) -> list[Planner]:
    if strict and first:
        return first
    planners = list(first)
    if local:
        try:
            planners.append(LocalPlanner())
        except InvalidData as error:
            log.debug("no local solver: %s", error)
    if not (strict and planners):
        planners.append(GreedyPlanner())
    return planners
