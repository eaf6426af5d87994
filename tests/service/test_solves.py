"""The narrow path: ask, wait, poll, cancel, and what is refused."""

from __future__ import annotations

import uuid

from remat_ir import Problem, budget_at, plain_peak, problem_digest
from service.serving import Service, at_peak, checked, example, posed, training_graph


def test_fixed_bytes_do_not_matter(service: Service) -> None:
    """The same step next to other parameters is the same problem, in its own bytes."""
    small, large = training_graph(6, fixed=0), training_graph(6, fixed=10**9)
    service.post(posed(small, 0.8), time_limit_s=5)
    problem = posed(large, 0.8)
    status, data = service.post(problem, wait=0, time_limit_s=5)
    assert (status, data["cache"]) == (200, "hit")
    assert checked(problem, data).peak_bytes > 10**9


def test_plan_by_digest(service: Service) -> None:
    """The best plan of a problem is there under its digest; another digest is not."""
    problem = at_peak(training_graph(4, cost=31))
    service.post(problem, time_limit_s=5)
    reply = service.http.get(f"/v1/plans/{problem_digest(problem)}")
    assert reply.status_code == 200
    checked(problem, reply.json())
    assert service.http.get(f"/v1/plans/{'0' * 64}").status_code == 404


def test_idempotency_key(service: Service) -> None:
    """A repeated POST with the same key is the same request; with another body it is refused."""
    body = example("solve")
    headers = {"Idempotency-Key": uuid.uuid4().hex, "Prefer": "wait=20"}
    first = service.http.post("/v1/solves", json=body, headers=headers).json()
    again = service.http.post("/v1/solves", json=body, headers=headers).json()
    assert again == first
    other = service.http.post("/v1/solves", json=body | {"max_gap": 0.5}, headers=headers)
    assert other.status_code == 409


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
