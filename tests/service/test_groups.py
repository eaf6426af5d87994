"""Sweeps, the largest batch, validation, events."""

from __future__ import annotations

import json

import pytest

from remat_ir import Graph, InvalidData, Problem, budget_at, graph_digest, plain_peak
from remat_ir.batch import BatchFamily
from remat_service.requests.groups import curve
from service.serving import Service, at_peak, eventually, example, training_graph


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


def test_max_batch(service: Service) -> None:
    """The largest of the batch sizes that has a plan; twice the batch, twice the bytes."""
    graph = training_graph(6, cost=81)
    body = {
        "problem": Problem(graph, 2 * plain_peak(graph)).to_json(),
        "batch": 4,
        "batches": [4, 8, 64],
        "time_limit_s": 5,
    }
    reply = service.http.post("/v1/max-batch", json=body, headers={"Prefer": "wait=30"})
    assert (reply.status_code, reply.json()["best_batch"]) == (200, 8)
    assert plain_peak(BatchFamily(graph, 1, 4).scaled(8)) == 2 * plain_peak(graph)
    with pytest.raises(InvalidData, match="2\\^53"):
        BatchFamily(graph, 1).scaled(2**45)


def test_validate(service: Service) -> None:
    """A valid graph is described, an invalid one refused with the pointer of the place."""
    body = example("validate")
    data = service.http.post("/v1/graphs:validate", json=body).json()
    graph = Graph.from_json(body["graph"])
    assert data["digest"] == graph_digest(graph)
    assert data["plain_peak_bytes"] == plain_peak(graph)
    body["graph"]["op_inputs"][1] = [3]
    reply = service.http.post("/v1/graphs:validate", json=body)
    assert reply.status_code == 422
    assert reply.json()["pointer"] == "/graph/op_inputs/1/0"


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


def test_queue_limit(service: Service) -> None:
    """A request that waits longer than it wanted to ends without a plan; the page of capabilities names the limits."""
    limits = service.http.get("/v1/capabilities").json()["limits"]
    body = example("solve") | {"time_limit_s": limits["most_time_limit_s"] + 1}
    reply = service.http.post("/v1/solves", json=body)
    assert (reply.status_code, reply.json()["pointer"]) == (422, "/time_limit_s")
    assert eventually(lambda: service.http.get("/readyz").status_code == 200)
