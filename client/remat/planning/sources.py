"""Where plans come from: the client's own greedy plan, the solver installed next to it, or a service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import httpx2

from remat_ir import (
    Answer,
    BatchFamily,
    InvalidData,
    InvalidPlan,
    LargestBatch,
    Plan,
    Problem,
    Progress,
    Subject,
    verify,
    worth_more_time,
)

from ..errors import InvalidResponse, Unreachable
from ..settings import checked_url
from . import service
from .check import checked
from .greedy import greedy_answer
from .http import Http, Timeouts
from .options import DEFAULT, SolveOptions

log = logging.getLogger("remat")

LONGEST_POLL_S = 20.0
"""Seconds that one request is held by the service; it allows 30 at most."""

FIRST_LOOK_S = 0.25
"""Seconds between two looks for the first plan of a solve."""

PATIENCE_S = 30.0
"""Seconds beyond the time limit for which the service is waited for: a time limit counts solving, not queueing."""


OnProgress = Callable[[Progress], None]


class GreedyPlanner:
    """The client's own greedy plan: always there, fast, nothing proved.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 200)
        >>> GreedyPlanner().plan(problem).cost_ns
        2
    """

    def __repr__(self) -> str:
        return "GreedyPlanner()"

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """The best of a few greedy walks; `method` is not looked at."""
        limit = min(10.0, options.time_limit_s)
        return greedy_answer(problem, time_limit_s=limit, max_gap=options.max_gap, on_progress=on_progress)


class LocalPlanner:
    """The solver installed next to the client, found through the entry point group `remat.planners`.

    Raises:
        InvalidData: none is installed, or it cannot be loaded.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 200)
        >>> LocalPlanner().plan(problem).ending
        'optimal'
    """

    def __init__(self, *, options: Mapping[str, object] | None = None) -> None:
        self.options = dict(options or {})
        self._solve: Callable[..., Answer] = solver_door("local")

    def __repr__(self) -> str:
        return f"LocalPlanner(options={self.options!r})"

    def check_method(self, name: str) -> None:
        """Refuse a method that the solver has not.

        Raises:
            InvalidData: the message lists those that it has.
        """
        import_module(self._solve.__module__).method_named(name)

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """The solver's answer, found in this process and its children."""
        return self._solve(
            problem,
            method=options.method,
            time_limit_s=options.time_limit_s,
            max_gap=options.max_gap,
            steps=options.steps,
            options=self.options or None,
            on_progress=on_progress,
        )


def solver_door(name: str) -> Callable[..., Any]:
    """A function of the solver installed next to the client, which the client never imports by name.

    Raises:
        InvalidData: no solver is installed, it has no such door, or it cannot be loaded.
    """
    found = entry_points(group="remat.planners", name=name)
    if not found:
        raise InvalidData(
            "no solver is installed here; run pip install '.[solver]' in a clone of remat, or set REMAT_BASE_URL"
        )
    try:
        door: Callable[..., Any] = next(iter(found)).load()
    except (ImportError, AttributeError) as error:
        raise InvalidData(
            f"the solver is installed but cannot be loaded: {error}; run pip install '.[solver]' in a clone of remat"
        ) from None
    return door


class ServicePlanner:
    """A service by its URL.

    Args:
        transport: what carries the requests; tests plug the real application in here, in-process.
        patience_s: seconds beyond the time limit for which it is waited for.

    Example:
        >>> ServicePlanner("http://127.0.0.1:8750", api_key="secret")
        ServicePlanner('http://127.0.0.1:8750')
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        patience_s: float = PATIENCE_S,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.options = dict(options or {})
        self.http = Http(checked_url(base_url), api_key=api_key, timeouts=timeouts, transport=transport)
        self.patience_s = patience_s

    def __repr__(self) -> str:
        options = f", options={self.options!r}" if self.options else ""
        return f"ServicePlanner({self.http.base_url!r}{options})"

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """The service's answer, checked against the problem; the id of the solve is logged before it is waited for.

        Raises:
            ServiceError: unreachable for the whole time limit, refused, failed, out of time, or an answer that is not
                what it claims to be.
        """
        steps = options.steps if options.max_gap else None

        def enough(answer: Answer) -> bool:
            return not worth_more_time(answer.cost_ns, answer.bound_ns, steps, answer.seconds)

        # a solve is polled for what it has so far only where that may end it, or is shown
        look_s = LONGEST_POLL_S if on_progress is None and steps is None else 1.0
        return self._solved(problem, options, enough, look_s, on_progress)

    def first_plan(self, problem: Problem, options: SolveOptions = DEFAULT) -> Answer:
        """The first plan that the service finds, and what it says in the end where it finds none.

        Raises:
            ServiceError: as `plan`.
        """
        return self._solved(problem, options, lambda answer: answer.cost_ns is not None, FIRST_LOOK_S)

    def _solved(
        self,
        problem: Problem,
        options: SolveOptions,
        enough: Callable[[Answer], bool],
        look_s: float,
        on_progress: OnProgress | None = None,
    ) -> Answer:
        wait_until = time.monotonic() + options.time_limit_s
        give_up_at = wait_until + self.patience_s
        call = service.submission(problem, options, self.options)
        answer = service.answer_of(self.http.call(**call, give_up_at=give_up_at, wait_until=wait_until))
        if not answer.status.ended:
            if answer.id is None:
                raise InvalidResponse(f"{self.http.base_url} is solving the problem but does not say under which id")
            log.info(
                "solve %s: waiting at %s; `remat attach %s` finds it again", answer.id, self.http.base_url, answer.id
            )
            with service.found_again(answer.id):
                answer = self.wait(
                    answer.id,
                    give_up_at=give_up_at,
                    on_progress=on_progress,
                    first=answer,
                    enough=enough,
                    look_s=look_s,
                )
        return checked(problem, answer)

    def sweep(
        self,
        subject: Subject,
        budgets: Sequence[int],
        options: SolveOptions = DEFAULT,
        *,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answers at several budgets, in bytes and each another, under one id; each is checked as in `plan`.

        Args:
            options: of each solve.
            on_answer: called with each answer, in the order of the budgets.

        Raises:
            ServiceError: as `plan`.
        """
        give_up_at = time.monotonic() + self.patience_s
        wait_until = time.monotonic() + options.time_limit_s
        sweep_id, solve_ids = service.start_sweep(
            self.http,
            subject,
            budgets,
            options,
            self.options,
            give_up_at=wait_until + self.patience_s,
            wait_until=wait_until,
        )
        log.info("sweep %s: waiting at %s/#/sweep/%s", sweep_id, self.http.base_url, sweep_id)
        answers = []
        for budget, solve_id in zip(budgets, solve_ids, strict=True):
            give_up_at += options.time_limit_s  # they may be solved one after another
            with service.found_again(solve_id):
                answer = self.wait(solve_id, give_up_at=give_up_at)
            answers.append(checked(Problem(subject, budget), answer))
            if on_answer is not None:
                on_answer(answers[-1])
        return answers

    def page(self, solve_id: str) -> str:
        """The URL at which a browser shows a solve."""
        return f"{self.http.base_url}/#/solve/{solve_id}"

    def wait(
        self,
        solve_id: str,
        *,
        give_up_at: float = float("inf"),
        on_progress: OnProgress | None = None,
        first: Answer | None = None,
        enough: Callable[[Answer], bool] = lambda answer: False,
        look_s: float = LONGEST_POLL_S,
    ) -> Answer:
        """Long-poll a solve until it ends; past `give_up_at` it is cancelled and its best plan taken.

        Args:
            enough: whether what the solve has so far is taken as if it had ended.
            look_s: seconds between two looks at what it has so far, 1 at most where progress is told.

        Raises:
            ServiceError: as `plan`.
        """
        seen: tuple[int | None, int | None] | None = None
        answer = first
        while True:
            if answer is not None and on_progress is not None and (answer.cost_ns, answer.bound_ns) != seen:
                seen = (answer.cost_ns, answer.bound_ns)
                on_progress(Progress(answer.seconds, answer.cost_ns, answer.bound_ns, "service", None))
            if answer is not None and answer.status.ended:
                return answer
            left = give_up_at - time.monotonic()
            if left <= 0 or (answer is not None and enough(answer)):
                answer = service.cancel(self.http, solve_id, give_up_at=time.monotonic() + 5.0)
                if not answer.status.ended:
                    raise Unreachable(f"{self.http.base_url} did not end solve {solve_id} in the time given")
                return answer
            wait_s = min(look_s if on_progress is None else min(look_s, 1.0), left)
            answer = service.poll(
                self.http, solve_id, wait_s=round(wait_s, 2), give_up_at=give_up_at + 1.0, wait_until=give_up_at
            )


SERVICE = "the service"
"""Who claims a bound that came without a certificate."""
_BATCH_POLL_S = 2.0
_BATCH_PATIENCE_S = 60.0


def largest_batch(
    planner: ServicePlanner,
    family: BatchFamily,
    options: SolveOptions,
    *,
    total_s: float = 600.0,
    on_step: Callable[[LargestBatch], None] | None = None,
) -> LargestBatch:
    """The largest batch with a plan that costs at most one more forward pass (Checkmate, equation 9).

    The plan is verified at the batch that is claimed. The bound is certified here, or the service's word: `claimed_by`
    says which.

    Args:
        options: of each solve.
        total_s: seconds for the whole search; beyond it and a minute the search is given up, with what it has found.
        on_step: called with what is known, at every poll that brings something new; without a plan.

    Raises:
        ServiceError: unreachable, refused, or an answer that is not what it claims to be.
    """
    started = time.monotonic()
    give_up_at = started + total_s + _BATCH_PATIENCE_S
    body: dict[str, Any] = {"problem": Problem(family.graph, family.budget_bytes).to_json(), "batch": family.batch}
    body |= {"batch_bytes": family.batch_bytes, "total_s": total_s, "options": planner.options}
    body |= {"batch_values": None if family.values is None else list(family.values)}
    body |= {"method": options.method, "time_limit_s": options.time_limit_s}
    if options.name is not None:
        body["name"] = options.name
    http, wait_until = planner.http, started + total_s
    reply = http.call("POST", "/v1/max-batch", body=body, give_up_at=give_up_at, wait_until=wait_until)
    found = service.search_of(reply)
    search_id, seen = found["id"], None
    while not found["ended"]:
        known = _known_batch(found, None, started)
        if on_step is not None and (known.batch, known.bound) != seen:
            seen = (known.batch, known.bound)
            on_step(known)
        if time.monotonic() > give_up_at:
            stop = service.cancellation(search_id, "max-batch")
            found = service.search_of(http.call(**stop, give_up_at=time.monotonic() + 5.0))
            break
        poll = service.polling(search_id, _BATCH_POLL_S, "max-batch")
        found = service.search_of(service.held(http, poll, give_up_at=give_up_at, wait_until=give_up_at))
    known = _known_batch(found, _batch_plan(planner, family, found, give_up_at), started)
    proof = None
    for batch, solve in zip(found.get("batches", ()), found.get("solves", ()), strict=False):
        if batch == known.bound + 1:
            proof = service.poll(http, str(solve.get("id")), wait_until=give_up_at).proof or proof
    certain = family.impossible(known.bound + 1, known.most_cost_ns, proof)
    return replace(known, proof=proof if certain else None, claimed_by=None if certain else SERVICE)


def _known_batch(found: dict[str, Any], answer: Answer | None, started: float) -> LargestBatch:
    if found["bound"] is None or found["most_cost_ns"] is None or (found["best_batch"] or 0) > found["bound"]:
        raise InvalidResponse("the service's search for the largest batch has no bound, or one below its own batch")
    seconds = round(time.monotonic() - started, 6)
    batch, bound = found["best_batch"] or 0, found["bound"]
    return LargestBatch(batch, bound, found["most_cost_ns"], answer, seconds, claimed_by=SERVICE)


def _batch_plan(
    planner: ServicePlanner, family: BatchFamily, found: dict[str, Any], wait_until: float
) -> Answer | None:
    """The answer at the batch that is claimed, its plan replayed there."""
    if not found["best_batch"]:
        return None
    solved = service.poll(planner.http, str(found.get("best_solve")), wait_until=wait_until)
    plan = solved.plan
    if not isinstance(plan, Plan):
        raise InvalidResponse(f"the service claims a batch of {found['best_batch']} and has no plan for it")
    try:
        if verify(family.at(found["best_batch"]), plan).cost_ns > found["most_cost_ns"]:
            raise InvalidResponse(f"the service's plan for a batch of {found['best_batch']} costs more than it may")
        problem = Problem(family.scaled(found["best_batch"]), family.budget_bytes)
        return Answer.of_plan(problem, plan, method=solved.method)
    except (InvalidPlan, InvalidData) as error:
        raise InvalidResponse(f"the service's plan for a batch of {found['best_batch']} is wrong: {error}") from None
