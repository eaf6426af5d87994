"""The narrow path: ask, wait, poll, cancel, what is refused; and who joins a solve, leaves it, or wants more."""

from __future__ import annotations

import json
import time
import uuid

import psutil
import pytest

from remat_ir import Problem, budget_at, plain_peak
from remat_service.requests.parse import read_ask
from remat_service.settings import Settings
from service.serving import (
    Service,
    at_peak,
    checked,
    eventually,
    example,
    hard_graph,
    open_problem,
    posed,
    training_graph,
)


def test_fixed_bytes_do_not_matter(service: Service) -> None:
    """The same step next to other parameters is the same problem, in its own bytes."""
    small, large = training_graph(6, fixed=0), training_graph(6, fixed=10**9)
    service.post(posed(small, 0.8), time_limit_s=5)
    problem = posed(large, 0.8)
    status, data = service.post(problem, wait=0, time_limit_s=5)
    assert (status, data["cache"]) == (200, "hit")
    assert checked(problem, data).peak_bytes > 10**9


def test_profiles_first_writer_wins(service: Service) -> None:
    """What stands is told to whoever looks it up or writes after."""
    device = uuid.uuid4().hex
    first = {"device": device, "profiles": {"a": [10, 0], "b": [20, 5]}}
    assert service.http.post("/v1/profiles", json=first).json() == {"profiles": {"a": [10, 0], "b": [20, 5]}}
    second = {"device": device, "profiles": {"b": [99, 9], "c": [30, 0]}}
    assert service.http.post("/v1/profiles", json=second).json() == {"profiles": {"b": [20, 5], "c": [30, 0]}}
    asked = {"device": device, "signatures": ["a", "b", "nobody"]}
    found = service.http.post("/v1/profiles:lookup", json=asked).json()
    assert found == {"profiles": {"a": [10, 0], "b": [20, 5]}}


def test_problem_and_progress(service: Service) -> None:
    """Of a request that was solved and of one that was answered from the store."""
    problem = at_peak(training_graph(8, cost=55))
    _, first = service.post(problem, time_limit_s=5)
    _, second = service.post(problem, time_limit_s=5)
    assert Problem.from_json(service.http.get(f"/v1/solves/{first['id']}/problem").json()) == problem
    for answer in (first, second):
        progress = service.http.get(f"/v1/solves/{answer['id']}/progress").json()["progress"]
        assert progress[-1]["cost_ns"] == first["cost_ns"]


def test_cancel_after_the_end_changes_nothing(service: Service) -> None:
    """The answer of an ended request stands."""
    _, first = service.post(at_peak(training_graph(4, cost=66)), time_limit_s=5)
    reply = service.http.post(f"/v1/solves/{first['id']}/cancel")
    assert (reply.status_code, reply.json()) == (200, first)


def test_a_timeline_is_the_judges_replay(service: Service) -> None:
    """Peak, cost and recomputations of the curve are those of the answer; without a plan there is the plain one."""
    graph = training_graph(8)
    answer = service.post(Problem(graph, budget_at(graph, 0.6)))[1]
    found = service.http.get(f"/v1/solves/{answer['id']}/timeline").json()
    assert found["kind"] == "graph"
    assert max(found["plan"]["memory_bytes"]) == answer["peak_bytes"]
    assert found["plan"]["end_ns"] == answer["cost_ns"]
    assert sum(found["plan"]["again"]) == len(found["plan"]["what"]) - graph.ops
    assert max(found["plain"]["memory_bytes"]) == plain_peak(graph)
    impossible = service.post(Problem(graph, 1))[1]
    assert service.http.get(f"/v1/solves/{impossible['id']}/timeline").json()["plan"] is None


@pytest.mark.thorough
def test_events_are_resumable(service: Service) -> None:
    """Improvements in order, then the end; from Last-Event-ID on only what came after it."""
    _, first = service.post(at_peak(training_graph(19, cost=91)), time_limit_s=5)

    def read(**headers: str) -> list[tuple[int, str, dict[str, object]]]:
        found = []
        with service.http.stream("GET", f"/v1/solves/{first['id']}/events", headers=headers) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for block in "".join(reply.iter_text()).split("\n\n"):
                fields = dict(line.split(": ", 1) for line in block.splitlines() if line)
                if "event" in fields:
                    found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
        return found

    whole = read()
    assert [name for _, name, _ in whole][-1] == "end"
    assert [number for number, name, _ in whole if name == "progress"] == list(range(1, len(whole)))
    assert whole[-1][2]["cost_ns"] == first["cost_ns"]
    assert "plan" not in whole[-1][2]
    assert read(**{"Last-Event-ID": str(whole[-1][0])}) == whole[-1:]


def test_a_time_limit_above_the_most_is_refused(service: Service) -> None:
    """Which the page of capabilities names."""
    limits = service.http.get("/v1/capabilities").json()["limits"]
    body = example("solve") | {"time_limit_s": limits["most_time_limit_s"] + 1}
    reply = service.http.post("/v1/solves", json=body)
    assert (reply.status_code, reply.json()["pointer"]) == (422, "/time_limit_s")


@pytest.mark.parametrize(("most", "has"), [(5.0, 5.0), (60.0, 60.0), (3600.0, 60.0)])
def test_a_time_limit_that_is_not_named_is_not_above_the_most_either(most: float, has: float) -> None:
    ask = read_ask({"problem": example("solve")["problem"]}, Settings(most_time_limit_s=most))
    assert ask.time_limit_s == has


def _solvers(service: Service) -> list[psutil.Process]:
    """The solver children alive now: the processes below the forkserver."""
    found = []
    for forkserver in psutil.Process(service.process.pid).children():
        found += forkserver.children(recursive=True)
    return found


def _running(service: Service, solve_id: str) -> bool:
    return bool(service.get(solve_id, 0)[1]["status"] == "running")


def test_cancel_detaches_and_the_last_one_ends_the_solve(service: Service) -> None:
    """Two share a solve: the first to leave gets what there is, the second goes on; then nothing is left running."""
    problem = open_problem(1)
    _, first = service.post(problem, wait=0, method="staged", time_limit_s=60, max_gap=0)
    _, second = service.post(problem, wait=0, method="staged", time_limit_s=60, max_gap=0)
    assert (first["cache"], second["cache"]) == ("miss", "joined")
    eventually(lambda: _running(service, second["id"]))
    reply = service.http.post(f"/v1/solves/{first['id']}/cancel")
    assert (reply.status_code, reply.json()["status"], reply.json()["limit"]) == (200, "cancelled", "cancel")
    time.sleep(0.3)
    assert _running(service, second["id"])
    assert service.http.post(f"/v1/solves/{second['id']}/cancel").json()["status"] == "cancelled"
    eventually(lambda: not _solvers(service))
    assert service.get(second["id"], 0)[0] == 200


@pytest.mark.thorough
def test_a_longer_request_extends_and_a_shorter_one_ends_in_its_time(service: Service) -> None:
    """2 s and 6 s on one solve: the first has its answer while the other goes on."""
    problem = open_problem(3)
    _, short = service.post(problem, wait=0, method="staged", time_limit_s=2, max_gap=0)
    _, long = service.post(problem, wait=0, method="staged", time_limit_s=6, max_gap=0)
    assert long["cache"] == "joined"
    _, ended = service.get(short["id"], 20)
    assert ended["limit"] == "time", {name: ended[name] for name in ("limit", "seconds", "gap", "message")}
    assert _running(service, long["id"])
    eventually(lambda: not _running(service, long["id"]), 60)
    _, ended = service.get(long["id"], 0)
    assert ended["limit"] == "time", {name: ended[name] for name in ("limit", "seconds", "gap", "message")}
    assert ended["seconds"] > 5.5
    # as much time was spent as is asked for: a hit; more: solved on
    assert service.post(problem, wait=0, method="staged", time_limit_s=5, max_gap=0)[1]["cache"] == "hit"
    more = service.post(problem, wait=0, method="staged", time_limit_s=9, max_gap=0)[1]
    assert more["cache"] == "miss"
    service.http.post(f"/v1/solves/{more['id']}/cancel")


def test_a_smaller_gap_solves_on_from_what_is_stored(service: Service) -> None:
    """First any plan, then a better one: never a more expensive plan, never a lower bound."""
    problem = posed(hard_graph(16, 4), 0.6)
    _, loose = service.post(problem, method="auto", time_limit_s=20, max_gap=0.99)
    first = checked(problem, loose)
    _, tight = service.post(problem, method="auto", time_limit_s=4, max_gap=0)
    second = checked(problem, tight)
    assert second.cost_ns <= first.cost_ns
    assert second.bound_ns >= first.bound_ns
