"""The narrow path: ask, wait, poll, cancel, and what is refused."""

from __future__ import annotations

import uuid

from remat_ir import Chain, Join, Problem, budget_at, plain_peak, problem_digest
from service.serving import Service, at_peak, checked, example, posed, training_graph


def test_solved_and_then_stored(service: Service) -> None:
    """A first POST solves, a second is served from the store, both with a plan that the verifier passes."""
    problem = posed(training_graph(5, size=777, fixed=12345), 1.0)  # sizes of its own: no other test is near
    status, first = service.post(problem, time_limit_s=10)
    assert (status, first["status"], first["cache"]) == (200, "optimal", "miss")
    checked(problem, first)
    status, second = service.post(problem, wait=0, time_limit_s=10)
    assert (status, second["cache"]) == (200, "hit")
    assert second["id"] != first["id"]
    assert checked(problem, second).cost_ns == first["cost_ns"]
    assert service.get(first["id"], 0) == (200, first)


def test_fixed_bytes_do_not_matter(service: Service) -> None:
    """The same step next to other parameters is the same problem, in its own bytes."""
    small, large = training_graph(6, fixed=0), training_graph(6, fixed=10**9)
    service.post(posed(small, 0.8), time_limit_s=5)
    problem = posed(large, 0.8)
    status, data = service.post(problem, wait=0, time_limit_s=5)
    assert (status, data["cache"]) == (200, "hit")
    assert checked(problem, data).peak_bytes > 10**9


def test_infeasible_is_an_answer(service: Service) -> None:
    """Below the least possible budget: 200, `infeasible`, with what is proved necessary, also from the store."""
    graph = training_graph(7, cost=77, fixed=500)
    for cache in ("miss", "hit"):
        status, data = service.post(Problem(graph, 1500), time_limit_s=5)
        assert (status, data["status"], data["cache"]) == (200, "infeasible", cache)
        assert 1500 < data["least_budget_bound_bytes"] <= plain_peak(graph)
        assert "plan" not in data
    status, data = service.post(Problem(graph, 100), time_limit_s=5)  # not even the fixed bytes
    assert (status, data["status"]) == (200, "infeasible")
    assert data["least_budget_bound_bytes"] > 1500


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


def test_listed_with_problem_and_progress(service: Service) -> None:
    """A request is in the list, page by page, and its problem and progress can be read."""
    problem = at_peak(training_graph(8, cost=55))
    _, first = service.post(problem, time_limit_s=5)
    _, second = service.post(problem, time_limit_s=5)
    page = service.http.get("/v1/solves", params={"limit": 1}).json()
    assert [row["id"] for row in page["solves"]] == [second["id"]]
    older = service.http.get("/v1/solves", params={"limit": 1, "after": page["next"]}).json()
    assert [row["id"] for row in older["solves"]] == [first["id"]]
    assert older["solves"][0]["ops"] == problem.graph.ops
    assert Problem.from_json(service.http.get(f"/v1/solves/{first['id']}/problem").json()) == problem
    for answer in (first, second):
        progress = service.http.get(f"/v1/solves/{answer['id']}/progress").json()["progress"]
        assert progress[-1]["cost_ns"] == first["cost_ns"]


def test_cancel_after_the_end_changes_nothing(service: Service) -> None:
    """The answer of an ended request stands."""
    _, first = service.post(at_peak(training_graph(4, cost=66)), time_limit_s=5)
    reply = service.http.post(f"/v1/solves/{first['id']}/cancel")
    assert (reply.status_code, reply.json()) == (200, first)


def test_chains_and_joins_travel_the_same_way(service: Service) -> None:
    """A chain and a join are solved, stored, served and verified like a graph; a method that can't says so."""
    chain = Chain(
        forward_ns=(5, 7, 3),
        backward_ns=(9, 11, 4),
        forward_workspace_bytes=(0, 1, 0),
        backward_workspace_bytes=(2, 0, 0),
        tape_bytes=(30, 40, 10),
        activation_bytes=(100, 10, 20, 5),
        gradient_bytes=(10, 10, 20, 5),
    )
    join = Join(lengths=(3, 2), forward_ns=4, backward_ns=6, turn_ns=1, slots=12)
    for subject in (chain, join):
        problem = at_peak(subject)
        for cache in ("miss", "hit"):
            status, data = service.post(problem, time_limit_s=120)  # a kernel may have to be compiled first
            while status == 202:
                status, data = service.get(data["id"])
            assert (status, data["cache"]) == (200, cache), data
            checked(problem, data)
        assert Problem.from_json(service.http.get(f"/v1/solves/{data['id']}/problem").json()) == problem
    status, data = service.post(at_peak(join), method="chen-sqrt")
    assert (status, data["pointer"]) == (422, "/method")


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
