"""Sweeps, and the largest batch over HTTP: equation 9, proof and bound, restarts, refusals, the client's check."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from client.liar import Said, in_turn, lying
from remat.errors import InvalidResponse
from remat.planning.options import SolveOptions
from remat.planning.sources import ServicePlanner, largest_batch
from remat_ir import Graph, InvalidData, Link, Problem, budget_at, plain_peak, plain_plan, verify
from remat_ir.batch import BatchFamily
from remat_service.requests.groups import curve
from service.serving import Service, eventually, example, serving, training_graph
from service.test_tenants import cli
from solver.brute import optimum

GRAPH = Graph(
    op_cost_ns=(120, 80, 200, 150, 90),
    op_inputs=((), (0,), (1,), (1, 2), (0, 3)),
    value_op=(0, 1, 2, 3, 4),
    value_bytes=(10, 7, 3, 6, 4),
    keep=(4,),
    backward_from=3,
    fixed_bytes=12,
)


def finished(service: Service, reply: Any) -> dict[str, Any]:
    data: dict[str, Any] = reply.json()
    assert reply.status_code in (200, 202), data
    while not data["ended"]:
        data = service.http.get(f"/v1/max-batch/{data['id']}", params={"wait": 10}).json()
    return data


def test_sweep_over_budgets(service: Service) -> None:
    """Every budget has an answer; less memory never costs less; each plan can be read by its solve."""
    graph = training_graph(18, cost=70)
    budgets = [budget_at(graph, fraction) for fraction in (1.0, 0.8, 0.6)]
    body = {"graph": graph.to_json(), "budgets_bytes": budgets, "method": "greedy", "time_limit_s": 5}
    reply = service.http.post("/v1/sweeps", json=body, headers={"Prefer": "wait=30"})
    assert reply.status_code == 200, reply.text
    data = reply.json()
    assert [row["budget_bytes"] for row in data["solves"]] == budgets
    costs = [row["cost_ns"] for row in data["solves"] if row["cost_ns"] is not None]
    assert costs == sorted(costs)
    assert service.get(data["solves"][0]["id"], 0)[1]["plan"]["format"] == "remat-plan/1"
    again = service.http.get(f"/v1/sweeps/{data['id']}")
    assert (again.status_code, again.json()) == (200, data)


@pytest.mark.thorough
def test_whole_curve(service: Service) -> None:
    """From the least budget proved necessary to the plain peak, where nothing is recomputed."""
    body = example("sweep")
    data = service.http.post("/v1/sweeps", json=body, headers={"Prefer": "wait=30"}).json()
    graph = Graph.from_json(body["graph"])
    assert [row["budget_bytes"] for row in data["solves"]] == curve(graph, body["points"])
    assert data["solves"][0]["overhead"] == 0.0


def test_named_sizes(service: Service) -> None:
    """The largest of them that has a plan, and no bound; twice the batch, twice the bytes."""
    graph = training_graph(6, cost=81)
    problem = Problem(graph, 2 * plain_peak(graph)).to_json()
    body = {"problem": problem, "batch": 4, "batches": [4, 8, 64], "time_limit_s": 5}
    data = finished(service, service.http.post("/v1/max-batch", json=body, headers={"Prefer": "wait=30"}))
    assert (data["batches"], data["best_batch"], data["bound"]) == ([4, 8, 64], 8, None)
    assert data["best_solve"] == data["solves"][1]["id"]
    assert plain_peak(BatchFamily(graph, 1, 4).scaled(8)) == 2 * plain_peak(graph)
    with pytest.raises(InvalidData, match="2\\^53"):
        BatchFamily(graph, 1).scaled(2**45)


@pytest.mark.parametrize(
    ("budget", "more"),
    [(100, {}), (100, {"batch": 3}), (140, {"batch_bytes": 5}), (90, {"batch_values": [0, 1, 2, 3, 4]}), (13, {})],
)
def test_the_largest_batch_is_brute_forces(service: Service, budget: int, more: dict[str, Any]) -> None:
    """By trying each batch with the exact optimum; the bound is the batch itself: that is the proof."""
    body = {"problem": Problem(GRAPH, budget).to_json(), "time_limit_s": 5, **more}
    data = finished(service, service.http.post("/v1/max-batch", json=body))
    values = more.get("batch_values")
    family = BatchFamily(
        GRAPH, budget, more.get("batch", 1), None if values is None else tuple(values), more.get("batch_bytes", 0)
    )
    assert data["most_cost_ns"] == family.most_cost_ns() == 640 + 400
    truth = 0
    while (cost := optimum(family.at(truth + 1)).cost_ns) is not None and cost <= data["most_cost_ns"]:
        truth += 1
    assert (data["best_batch"], data["bound"]) == (truth or None, truth), data
    assert data["message"] == "No larger batch has a plan within the budget and the cost."
    assert len(data["batches"]) == len(data["solves"]) == len(set(data["batches"]))


@pytest.mark.thorough
def test_a_limit_of_ones_own(service: Service) -> None:
    """Without recomputation allowed the largest batch is equation 10's."""
    graph = training_graph(6, cost=83)
    budget = 5 * plain_peak(graph)
    body = {"problem": Problem(graph, budget).to_json(), "max_overhead": 0, "time_limit_s": 1, "total_s": 20}
    data = finished(service, service.http.post("/v1/max-batch", json=body))
    assert data["best_batch"] == BatchFamily(graph, budget).largest(plain_plan(graph)) == 5
    assert data["best_batch"] <= data["bound"]


def test_a_limit_beyond_every_cost_is_none(service: Service) -> None:
    """Also where the cost that it allows is more than a float holds."""
    body = {"problem": Problem(GRAPH, 1).to_json(), "max_overhead": 1e308}
    data = finished(service, service.http.post("/v1/max-batch", json=body))
    assert (data["best_batch"], data["bound"], data["most_cost_ns"]) == (None, 0, 2**63)


def test_refused(service: Service) -> None:
    plain = {"problem": Problem(GRAPH, 100).to_json()}
    for change, pointer in (
        ({"batch": 0}, "/batch"),
        ({"batch_bytes": 13}, "/batch_bytes"),
        ({"batch_values": [9]}, "/batch_values/0"),
        ({"total_s": 0}, "/total_s"),
        ({"max_overhead": -1}, "/max_overhead"),
        ({"problem": {"graph": GRAPH.to_json() | {"backward_from": None}, "budget_bytes": 100}}, "/backward_from"),
        ({"problem": Problem(GRAPH.with_link(Link(10**9, 10**9)), 100).to_json()}, "/link"),
    ):
        reply = service.http.post("/v1/max-batch", json=plain | change)
        assert (reply.status_code, reply.json()["pointer"]) == (422, pointer), reply.text
    nothing = service.http.post("/v1/max-batch", json=plain | {"batch_values": [], "batch": 2})
    assert nothing.status_code == 422
    assert "nothing in the graph" in nothing.json()["detail"]
    assert service.http.get(f"/v1/max-batch/{'0' * 32}").status_code == 404


@pytest.mark.thorough
@pytest.mark.parametrize(
    "named", [{}, {"batches": [2, 3, 4], "method": "staged", "max_gap": 0}], ids=["search", "named"]
)
def test_a_search_can_be_given_up(service: Service, named: dict[str, Any]) -> None:
    """It ends with what it has, and so do sizes that were named; nothing of it stays in the queue."""
    graph = training_graph(60, cost=89)
    body = {"problem": Problem(graph, 2 * plain_peak(graph)).to_json(), "time_limit_s": 30, "batch_values": None}
    posted = service.http.post("/v1/max-batch", json=body | named).json()
    given_up = service.http.post(f"/v1/max-batch/{posted['id']}/cancel").json()
    assert given_up["ended"]
    assert all(solve["status"] not in ("queued", "running") for solve in given_up["solves"])
    assert service.http.get(f"/v1/max-batch/{posted['id']}").json()["message"] == given_up["message"]


@pytest.mark.thorough
def test_a_search_survives_its_process(tmp_path: Path) -> None:
    """Killed in the middle: the next process goes on at the next poll, with the batches tried before."""
    graph = training_graph(40, cost=97)
    body = {"problem": Problem(graph, 3 * plain_peak(graph)).to_json(), "time_limit_s": 1, "total_s": 15}
    with serving(tmp_path, workers=1) as first:
        posted = first.http.post("/v1/max-batch", json=body).json()
        time.sleep(1.0)
        first.stop(9)
    with serving(tmp_path, workers=1) as second:
        data = finished(second, second.http.get(f"/v1/max-batch/{posted['id']}"))
    assert data["batches"][: len(posted["batches"])] == posted["batches"]
    assert data["best_batch"] >= 3, "three times the plain peak holds three batches without a plan"
    assert data["best_batch"] <= data["bound"]


@pytest.mark.thorough
def test_the_client_replays_the_plan(service: Service) -> None:
    family = BatchFamily(GRAPH, 140, 2, None, 5)
    steps: list[Any] = []
    found = largest_batch(
        ServicePlanner(service.url), family, SolveOptions(time_limit_s=5), total_s=60, on_step=steps.append
    )
    assert found.proved
    assert verify(family.at(found.batch), found.answer.plan).cost_ns <= found.most_cost_ns
    assert found.claimed_by is None
    assert family.impossible(found.bound + 1, found.most_cost_ns, found.proof)
    assert all(step.batch <= found.batch <= found.bound <= step.bound for step in steps)


@pytest.mark.thorough
def test_the_client_believes_no_claim(service: Service) -> None:
    """A batch above what the plan holds, a cost above the limit, no bound, a bound below: each is refused."""
    family = BatchFamily(GRAPH, 100)
    body = {"problem": Problem(GRAPH, 100).to_json(), "time_limit_s": 5}
    true = finished(service, service.http.post("/v1/max-batch", json=body))
    answer = service.get(true["best_solve"])[1]
    for change, says in (
        ({"best_batch": true["best_batch"] + 1, "bound": true["bound"] + 1}, "is wrong"),
        ({"most_cost_ns": GRAPH.total_cost_ns - 1}, "costs more than it may"),
        ({"bound": None}, "no bound"),
        ({"bound": true["best_batch"] - 1}, "below its own batch"),
        ({"bound": "9"}, "is none"),
    ):
        told = in_turn(Said(202, true | change), Said(200, answer))
        with lying(told) as server, pytest.raises(InvalidResponse, match=says):
            largest_batch(ServicePlanner(server.url), family, SolveOptions())
    assert true["best_batch"] > 1
    low = {"best_batch": 1, "bound": 1}
    with lying(in_turn(Said(202, true | low), Said(200, answer))) as server:
        found = largest_batch(ServicePlanner(server.url), family, SolveOptions())
    assert (found.bound, found.proof, found.claimed_by) == (1, None, "the service")
    told = in_turn(Said(202, true), Said(200, {key: part for key, part in answer.items() if key != "plan"}))
    with lying(told) as server, pytest.raises(InvalidResponse, match="has no plan for it"):
        largest_batch(ServicePlanner(server.url), family, SolveOptions())


@pytest.mark.thorough
def test_a_damaged_try_of_a_search_says_so(tmp_path: Path) -> None:
    """As a list of solves does: of a try whose answer was edited nothing is told, and the others stand."""
    body = {"problem": Problem(GRAPH, 100).to_json(), "time_limit_s": 5}
    with serving(tmp_path, workers=1, seal_key="s" * 32) as own:
        before = finished(own, own.http.post("/v1/max-batch", json=body))
        first = before["solves"][0]["id"]
        for edit in ("json_set(answer, '$.cost_ns', 1)", "'{'"):
            with sqlite3.connect(tmp_path / "service.sqlite", timeout=20) as database:
                database.execute(f"UPDATE requests SET answer = {edit} WHERE id = ?", (first,))
            after = own.http.get(f"/v1/max-batch/{before['id']}").json()
            said = after["solves"].pop(0)
            assert (said["id"], said["status"], said["cost_ns"]) == (first, "failed", None)
            assert after == before | {"solves": before["solves"][1:]}


@pytest.mark.thorough
def test_requests_that_are_forgotten_move_no_other_to_their_place(tmp_path: Path) -> None:
    """Over the tenant's quota the oldest go: what is left of named sizes and of a search is still of its own batch."""
    graph = training_graph(6, cost=81)
    problem = Problem(graph, 8 * plain_peak(graph)).to_json()
    with serving(tmp_path, workers=1, housekeeping_s=0.5) as own:
        named = {"problem": problem, "batches": [1, 64, 2, 8, 4], "time_limit_s": 5, "method": "greedy"}
        posted = [own.http.post("/v1/max-batch", json=body) for body in (named, {"problem": problem})]
        before = [finished(own, each) for each in posted]
        assert before[0]["best_batch"] == 8
        of = [dict(zip((each["id"] for each in data["solves"]), data["batches"], strict=True)) for data in before]
        assert len(of[0]) == 5
        places = [f"/v1/max-batch/{data['id']}" for data in before]

        cli(own, "tenants", "quota", "default", "--requests", str(2 + len(of[1])))
        eventually(lambda: len(own.http.get(places[0]).json()["solves"]) == 2)
        data = own.http.get(places[0]).json()
        assert (data["batches"], data["best_batch"]) == ([8, 4], 8)
        assert of[0][data["best_solve"]] == 8

        cli(own, "tenants", "quota", "default", "--requests", "1")
        eventually(lambda: len(own.http.get(places[1]).json()["solves"]) == 1)
        data = own.http.get(places[1]).json()
        assert [of[1][each["id"]] for each in data["solves"]] == data["batches"]
        assert (data["best_batch"], data["bound"]) == (before[1]["best_batch"], before[1]["bound"])
        assert data["best_solve"] in (None, data["solves"][0]["id"])
        assert own.http.get(places[0]).status_code == 404
