"""The service's routes as functions of Python: what is sent, and what comes back once it has been checked for form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

from remat_ir import Answer, InvalidData, Problem, Subject, subject_kind

from ..errors import InvalidResponse, Unreachable
from .http import Http, Reply, come_back_s
from .options import SolveOptions


def submission(
    problem: Problem, options: SolveOptions, method_options: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The call that POSTs a problem: its answer is there at once where it is known."""
    body = {"problem": problem.to_json()} | _asked(options, method_options)
    return {"method": "POST", "path": "/v1/solves", "body": body}


def polling(solve_id: str, wait_s: float = 0.0, kind: str = "solves") -> dict[str, Any]:
    """The call that GETs a solve, held by the service for up to `wait_s` seconds until it ends; or a search."""
    params = {"wait": f"{wait_s:g}"} if wait_s else {}
    return {"method": "GET", "path": f"/v1/{kind}/{_segment(solve_id)}", "params": params, "wait_s": wait_s}


def cancellation(solve_id: str, kind: str = "solves") -> dict[str, Any]:
    """The call that stops a solve, or leaves it to its other subscribers: its answer is the best incumbent so far.

    A search ends with what it has found and proved.
    """
    return {"method": "POST", "path": f"/v1/{kind}/{_segment(solve_id)}/cancel"}


def answer_of(reply: Reply) -> Answer:
    """The answer in a reply to one of these calls.

    Raises:
        InvalidResponse: it is none.
    """
    try:
        return Answer.from_json(reply.data)
    except (InvalidData, TypeError) as error:
        raise InvalidResponse(f"the service's reply about a solve is not an answer: {error}") from None


def search_of(reply: Reply) -> dict[str, Any]:
    """The document of a search for the largest batch, in a reply to a call about it.

    Raises:
        InvalidResponse: it is none.
    """
    data = reply.data
    numbers = ("best_batch", "bound", "most_cost_ns")
    fine = isinstance(data, dict) and isinstance(data.get("id"), str) and isinstance(data.get("ended"), bool)
    fine = fine and all(isinstance(data.get(name, []), list) for name in ("batches", "solves"))
    fine = fine and all(isinstance(row, dict) for row in data.get("solves", []))
    if not fine or any(type(data.get(name)) not in (int, type(None)) for name in numbers):
        raise InvalidResponse("the service's reply to a search for the largest batch is none")
    return dict(data)


class Until(TypedDict, total=False):
    """Moments of `time.monotonic()`, as in `Http.call`."""

    give_up_at: float
    wait_until: float


def poll(http: Http, solve_id: str, *, wait_s: float = 0.0, **until: Unpack[Until]) -> Answer:
    """What a solve's answer is by now, or by the end of `wait_s` seconds."""
    return answer_of(held(http, polling(solve_id, wait_s), **until))


def cancel(http: Http, solve_id: str, **until: Unpack[Until]) -> Answer:
    """Stop a solve, or leave it to its other subscribers: the best incumbent so far."""
    return answer_of(http.call(**cancellation(solve_id), **until))


def start_sweep(
    http: Http,
    subject: Subject,
    budgets: Sequence[int],
    options: SolveOptions,
    method_options: Mapping[str, object] | None = None,
    **until: Unpack[Until],
) -> tuple[str, list[str]]:
    """POST a sweep: its id, and those of its solves in the order of the budgets.

    Raises:
        InvalidResponse: the reply has not one id for each budget.
    """
    body = {subject_kind(subject): subject.to_json(), "budgets_bytes": list(budgets)} | _asked(options, method_options)
    data = http.call("POST", "/v1/sweeps", body=body, **until).data
    try:
        sweep_id, solve_ids = data["id"], [row["id"] for row in data["solves"]]
    except (KeyError, TypeError):
        sweep_id, solve_ids = None, []
    if len(solve_ids) != len(budgets) or not all(isinstance(each, str) for each in (sweep_id, *solve_ids)):
        raise InvalidResponse("the service's reply to a sweep has not one solve for each budget")
    return str(sweep_id), solve_ids


@contextmanager
def found_again(solve_id: str | None) -> Iterator[None]:
    """What a connection that is lost while a solve is waited for says besides: under which id the answer is found.

    Raises:
        Unreachable: with that.
    """
    try:
        yield
    except Unreachable as error:
        raise Unreachable(f"{error}; the solve goes on there: `remat attach {solve_id}` gets its answer") from error


def solves(http: Http, most: int, search: str = "") -> list[dict[str, Any]]:
    """The newest solves without their plans, page after page.

    Args:
        search: only those whose id begins with it, or whose name or method has it.
    """
    rows: list[dict[str, Any]] = []
    after: str | None = None
    while len(rows) < most:
        params = {"limit": str(min(200, most - len(rows))), **({"after": after} if after else {})}
        params |= {"search": search} if search else {}
        data = http.call("GET", "/v1/solves", params=params).data
        page = data.get("solves") if isinstance(data, dict) else None
        if not isinstance(page, list) or not all(isinstance(row, dict) for row in page):
            raise InvalidResponse("the service's list of solves is not a list")
        rows.extend(page)
        after = data.get("next")
        if not page or not isinstance(after, str):
            break
    return rows[:most]


def put_run(http: Http, solve_id: str, run: Mapping[str, Any]) -> None:
    """Report a step by a solve's plan as it was measured: the members of the service's `RunReport`."""
    http.call("PUT", f"/v1/solves/{_segment(solve_id)}/run", body=dict(run))


def put_names(http: Http, solve_id: str, names: Sequence[str], where: Sequence[str]) -> None:
    """Send what the ops of a solve's graph are called, and where in the model's code they stand, for who looks at it.

    Raises:
        NotAllowed: the service stores no names of this tenant's.
    """
    http.call("PUT", f"/v1/solves/{_segment(solve_id)}/names", body={"names": list(names), "where": list(where)})


def lookup_profiles(http: Http, device: str, signatures: list[str]) -> dict[str, tuple[int, int]]:
    """The shared table's entries for some signatures on a device: ns and workspace bytes by signature."""
    reply = http.call("POST", "/v1/profiles:lookup", body={"device": device, "signatures": signatures})
    return _profiles(reply, set(signatures))


def put_profiles(http: Http, device: str, profiles: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Offer measured profiles to the shared table: what now stands."""
    body = {"device": device, "profiles": {key: list(value) for key, value in sorted(profiles.items())}}
    return _profiles(http.call("POST", "/v1/profiles", body=body), set(profiles))


def ready(http: Http) -> float:
    """Seconds that the service takes to say that it is ready.

    Raises:
        ServiceError: it is not.
    """
    start = time.monotonic()
    http.call("GET", "/readyz")
    return time.monotonic() - start


def held(http: Http, call: dict[str, Any], **until: Unpack[Until]) -> Reply:
    """The reply to a long poll; after one that came early, as a stopping service gives it, it is waited as advised."""
    began = time.monotonic()
    reply = http.call(**call, **until)
    pause = come_back_s(reply, call["wait_s"], time.monotonic() - began, until.get("give_up_at", float("inf")))
    if pause:
        time.sleep(pause)
    return reply


def _asked(options: SolveOptions, method_options: Mapping[str, object] | None) -> dict[str, Any]:
    body: dict[str, Any] = {"method": options.method, "time_limit_s": options.time_limit_s, "max_gap": options.max_gap}
    if method_options:
        body["options"] = dict(method_options)
    return body if options.name is None else body | {"name": options.name}


def _segment(solve_id: str) -> str:
    if not solve_id or len(solve_id) > 100 or not all(c.isalnum() or c in "-_" for c in solve_id):
        raise InvalidData(f"{solve_id[:40]!r} is not the id of a solve")
    return solve_id


def _profiles(reply: Reply, asked: set[str]) -> dict[str, tuple[int, int]]:
    rows = reply.data.get("profiles") if isinstance(reply.data, dict) else None
    if not isinstance(rows, dict):
        raise InvalidResponse("the service's profile table is not an object of profiles")
    found: dict[str, tuple[int, int]] = {}
    for signature, row in rows.items():
        fine = isinstance(row, list) and len(row) == 2 and all(type(n) is int and 0 <= n <= 2**53 for n in row)
        if signature not in asked or not fine:
            raise InvalidResponse(f"the service's profile table has a row of no use for {str(signature)[:60]!r}")
        found[signature] = (row[0], row[1])
    return found
