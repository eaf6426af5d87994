"""What can go wrong in the client, and what it is called.

RematError                    anything that remat refuses (remat_ir)
├── InvalidData               a graph, plan or problem that cannot be one (remat_ir)
├── InvalidPlan               a plan that the verifier refuses (remat_ir)
├── PlanMismatch              a plan file that is not for the step at hand, or does not fit its budget
├── CaptureError              a module whose training step cannot be captured as a graph
├── PlanningError             no plan: the answer is at hand
│   ├── BudgetTooSmall        no plan fits the budget, certified or as the message says; the least budget is at hand
│   └── NothingFound          none was found in the time given
├── RanksDiffer               the ranks of a job do not train the same step
└── ServiceError              the service did not give a usable answer; `request_id` is its name for the call
    ├── Unreachable           no connection, or no reply in time
    ├── Refused               4xx: the request is at fault; `pointer` leads to the place
    │   ├── NotAllowed        401, 403: the key is missing, wrong or not enough
    │   ├── NotFound          404, 410: no such solve or plan
    │   └── RateLimited       429: still over the quota after the retries; `retry_after_s` says when
    ├── ServiceFailed         5xx: the service is at fault
    └── InvalidResponse       a reply that is not what it claims to be: nonsense, a lie, another graph's plan
"""

from __future__ import annotations

from typing import ClassVar, TypedDict, Unpack

from remat_ir import Answer
from remat_ir import InvalidData as InvalidData
from remat_ir import InvalidPlan as InvalidPlan
from remat_ir import RematError as RematError

REMEDIES = {
    InvalidData: "Mend what the message names; nothing has been done yet.",
    InvalidPlan: "Plan again: the plan is of another graph or budget, or was changed since it was made.",
}
"""What to do about the errors of `remat_ir`; each class here has its own as `remedy`."""


class _Remedied(Exception):
    """Shows what to do below the message, where an error ends a program."""

    remedy: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.add_note(self.remedy)


class _Reply(TypedDict, total=False):
    """What a reply of the service says besides: its name for the call, and when to call again."""

    request_id: str | None
    retry_after_s: float | None


class CaptureError(_Remedied, RematError):
    """A module whose training step cannot be captured; the message says why and what to do.

    Attributes:
        stages_may_do: whether the same modules, run as they are stage by stage, may train by a chain plan.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> try:
        ...     with torch.no_grad():
        ...         remat.optimize(model, x, budget="1GiB", planner="greedy")
        ... except CaptureError as error:
        ...     print(error)
        gradients are disabled: plan a training step outside of torch.no_grad()
    """

    remedy = (
        "Do what the message says. To train such a model all the same leave `on_failure` at its default: "
        "the part that cannot be captured runs without a plan."
    )

    def __init__(self, message: str, *, stages_may_do: bool = False) -> None:
        super().__init__(message)
        self.stages_may_do = stages_may_do


class PlanMismatch(_Remedied, RematError):
    """A plan file holds no plan for the step at hand: another graph, or other fixed bytes than the budget allows.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/plan.json"
        >>> remat.save_plans(remat.optimize(model, x, budget="100%", planner="greedy"), path)
        >>> try:
        ...     remat.optimize(torch.nn.Linear(8, 8), x, plan=path)
        ... except PlanMismatch:
        ...     print("planned for another step")
        planned for another step
    """

    remedy = (
        "Capture the step that is trained now, `remat plan MODEL -o FILE`, or raise the budget to that of the file."
    )


class PlanningError(_Remedied, RematError):
    """There is no plan to run; `answer` says how the solve ended.

    Example:
        >>> from remat_ir import Status
        >>> from remat.planning.planner import plan_or_raise
        >>> try:
        ...     plan_or_raise(Answer(Status.NOTHING_FOUND, "auto", 100, least_budget_bytes=120))
        ... except PlanningError as error:
        ...     print(error.answer.least_budget_bytes)
        120
    """

    remedy = "Give a larger budget, or more time (`time_limit_s`); `error.answer` has all that the solve found out."

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.answer = answer


class BudgetTooSmall(PlanningError):
    """No plan fits the budget, and that is certified; or the message names who claims it.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 120)
        >>> from remat.planning.planner import plan_or_raise, planner_for
        >>> try:
        ...     plan_or_raise(planner_for("greedy").plan(problem))
        ... except BudgetTooSmall as error:
        ...     print(error.answer.least_budget_bytes)
        150
    """

    remedy = "Give the budget that the message says is enough, a smaller batch, or `link=` to move values to the host."


class NothingFound(PlanningError):
    """No plan was found in the time given, and none was proved impossible.

    Example:
        >>> from remat_ir import Status
        >>> from remat.planning.planner import plan_or_raise
        >>> try:
        ...     plan_or_raise(Answer(Status.NOTHING_FOUND, "auto", 100, limit="time"))
        ... except NothingFound as error:
        ...     print(error.answer.limit)
        time
    """

    remedy = (
        "Give more time (`time_limit_s=`) or a larger budget; `remat sweep` shows from which budget on there are plans."
    )


class RanksDiffer(_Remedied, RematError):
    """The ranks of a job do not train the same step: their graphs or budgets are not equal.

    Example:
        >>> str(RanksDiffer("rank 1 trains another graph"))
        'rank 1 trains another graph'
    """

    remedy = (
        "Give all ranks the same model, budget and options; ranks that run other stages take a planner of their group."
    )


class ServiceError(_Remedied, RematError):
    """The service did not give a usable answer.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> problem = Problem(graph_of([1, 1], [100, 50], [[], [0]]), 200)
        >>> import remat
        >>> from remat.planning.sources import ServicePlanner
        >>> try:
        ...     ServicePlanner("http://127.0.0.1:9").plan(problem, remat.SolveOptions(time_limit_s=0.1))
        ... except ServiceError as error:
        ...     print(type(error).__name__)
        Unreachable
    """

    remedy = "Run `remat doctor`: it says what the settings are and whether the service answers."

    def __init__(self, message: str, *, request_id: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message if request_id is None else f"{message} (request {request_id})")
        self.request_id, self.retry_after_s = request_id, retry_after_s


class Unreachable(ServiceError):
    """No connection, or no reply in time."""

    remedy = (
        "Check `REMAT_BASE_URL` and that the service runs; `remat attach ID` finds the answer of a solve "
        "that was posted. Without `REMAT_BASE_URL` plans are made on this machine."
    )


class Refused(ServiceError):
    """The service found the request at fault; `status` is the HTTP status, `pointer` the JSON pointer to the place."""

    remedy = "Mend what the message and `pointer` name; `request_id` finds the call in the service's log."

    def __init__(self, message: str, *, status: int, pointer: str = "", **more: Unpack[_Reply]) -> None:
        super().__init__(message, **more)
        self.status, self.pointer = status, pointer


class NotAllowed(Refused):
    """The API key is missing, wrong, or does not allow this."""

    remedy = "An operator makes a key by `remat-service keys create TENANT`; the client reads it from `REMAT_API_KEY`."


class NotFound(Refused):
    """There is no such solve or plan."""

    remedy = "`remat ls` lists the solves that this key may see; what was trimmed is solved again when it is asked for."


class RateLimited(Refused):
    """Over a quota, also after the retries; `retry_after_s` is the service's advice, or None."""

    remedy = "Call again after `retry_after_s` seconds, or ask an operator for a larger quota."

    def __init__(self, message: str, *, status: int = 429, **more: Unpack[_Reply]) -> None:
        super().__init__(message, status=status, **more)


class ServiceFailed(ServiceError):
    """The service is at fault; `status` is the HTTP status, `retry_after_s` its advice, or None."""

    remedy = "Call again later; if it stays so, give the operator the `request_id`."

    def __init__(self, message: str, *, status: int = 500, **more: Unpack[_Reply]) -> None:
        super().__init__(message, **more)
        self.status = status


class InvalidResponse(ServiceError):
    """A reply that is not what it claims to be."""

    remedy = (
        "Check that `REMAT_BASE_URL` is a remat service and no proxy changes its answers; update the "
        "older of client and service."
    )
