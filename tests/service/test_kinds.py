"""Chains and joins over the wire: every method that takes them, with and without a link; sweeps; batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remat_ir import (
    Answer,
    Chain,
    Graph,
    Join,
    Link,
    Offload,
    Plan,
    Problem,
    budget_at,
    from_node_link,
    graph_digest,
    graph_of,
    plain_peak,
    to_node_link,
    verify,
)
from remat_solver import METHODS
from service.serving import Service, at_peak, checked, example, training_graph
from tiers import first

CHAIN = Chain(
    forward_ns=(5000, 7000, 3000, 6000, 2000),
    backward_ns=(9000, 11000, 4000, 8000, 3000),
    forward_workspace_bytes=(0, 100, 0, 0, 0),
    backward_workspace_bytes=(200, 0, 0, 0, 0),
    tape_bytes=(3000, 4000, 1000, 2500, 500),
    activation_bytes=(1000, 1000, 2000, 500, 800, 100),
    gradient_bytes=(1000, 1000, 2000, 500, 800, 100),
)
MOVING = ("offload-all", "offload-only", "layer-fractions", "save-on-cpu", "transfers")
LINKED = replace(CHAIN, link_bytes_per_s=10**9)
JOIN = Join(lengths=(3, 4), forward_ns=4, backward_ns=6, turn_ns=1, slots=6)


def _methods(kind: str) -> list[str]:
    return [method.name for method in METHODS.values() if kind in method.takes]


def _fraction(method: str) -> float:
    return 1.0 if method in ("sequential", *MOVING) else 0.8


def _solved(service: Service, problem: Problem, **asked: object) -> dict[str, Any]:
    """The answer, however long it takes: a kernel may have to be compiled first."""
    status, data = service.post(problem, **asked)
    while status == 202:
        status, data = service.get(data["id"])
    assert status == 200, data
    return data


_COMPILED = ("blocks",)  # has a kernel to compile first


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in _COMPILED)) for name in _methods("graph")],
)
def test_every_method_of_graphs(service: Service, method: str) -> None:
    """Each is reachable by its name, and what it finds is verified and its own."""
    graph = training_graph(5, cost=3001)
    if METHODS[method].linked and method != "auto":
        graph = graph.with_link(Link(10**9, 10**9))
    problem = Problem(graph, plain_peak(graph))
    data = _solved(service, problem, method=method, time_limit_s=300 if method in _COMPILED else 30)
    assert data["method"] == method
    assert data["status"] in ("optimal", "feasible"), data
    checked(problem, data)


def test_a_graph_with_a_link(service: Service) -> None:
    """Planned with transfers, verified, stored and served again; without its link it is another problem."""
    reads = [[], [0], *([i] for i in range(1, 10)), [0, 10]]
    graph = graph_of([100] * 12, [200, *[10] * 5, 200, *[10] * 5], reads)
    problem = Problem(graph.with_link(Link(10**9, 10**9)), 230)
    for cache in ("miss", "hit"):
        data = _solved(service, problem, method="auto", time_limit_s=60)
        assert (data["cache"], data["status"]) == (cache, "optimal"), data
        checked(problem, data)
        plan = Plan.from_json(data["plan"])
        assert any(isinstance(step, Offload) for step in plan.steps)
    status, data = service.post(Problem(graph, 230), method="greedy", time_limit_s=20)
    assert (status, data["cache"], data["cost_ns"]) == (200, "miss", 1300), data


@pytest.mark.parametrize("method", first(2, sorted(_methods("chain"), key=lambda name: name not in ("rotor", "pofo"))))
def test_every_method_of_chains(service: Service, method: str) -> None:
    """Solved, verified, stored and served again; what does nothing but offload finds nothing without a link."""
    subject = LINKED if method in ("pofo", *MOVING) else CHAIN
    problem = Problem(subject, budget_at(subject, _fraction(method)))
    for cache in ("miss", "hit"):
        data = _solved(service, problem, method=method, time_limit_s=60)
        assert (data["cache"], data["method"]) == (cache, method), data
        assert data["status"] in ("optimal", "feasible"), data
        checked(problem, data)
    assert Problem.from_json(service.http.get(f"/v1/solves/{data['id']}/problem").json()) == problem
    if method in MOVING:
        status, data = service.post(Problem(CHAIN, problem.budget_bytes), method=method, time_limit_s=5)
        assert (status, data["status"]) == (200, "nothing_found")


@pytest.mark.parametrize("method", [name for name in _methods("join") if name != "auto"])
def test_every_method_of_joins(service: Service, method: str) -> None:
    """The same for joins, whose budget is a number of slots."""
    problem = Problem(JOIN, plain_peak(JOIN))
    status, data = service.post(problem, method=method, time_limit_s=30)
    assert (status, data["method"]) == (200, method), data
    assert data["status"] in ("optimal", "feasible"), data
    checked(problem, data)


def test_a_join_is_stored_and_read_back(service: Service) -> None:
    """By `auto`, as a graph is; a method that takes none says so."""
    problem = at_peak(replace(JOIN, lengths=(3, 2), slots=12))
    for cache in ("miss", "hit"):
        data = _solved(service, problem, time_limit_s=120)
        assert data["cache"] == cache, data
        checked(problem, data)
    assert Problem.from_json(service.http.get(f"/v1/solves/{data['id']}/problem").json()) == problem
    status, data = service.post(problem, method="chen-sqrt")
    assert (status, data["pointer"]) == (422, "/method")


@pytest.mark.thorough
def test_sweep_over_a_chain(service: Service) -> None:
    """Less memory never costs less; every plan is one of the chain."""
    body = {"chain": CHAIN.to_json(), "points": 5, "method": "rotor", "time_limit_s": 30}
    reply = service.http.post("/v1/sweeps", json=body, headers={"Prefer": "wait=30"})
    assert reply.status_code == 200, reply.text
    rows = reply.json()["solves"]
    costs = [row["cost_ns"] for row in rows if row["cost_ns"] is not None]
    assert len(costs) >= 3
    assert costs == sorted(costs)
    for row in rows:
        if row["cost_ns"] is not None:
            answer = Answer.from_json(service.get(row["id"], 0)[1])
            verify(Problem(CHAIN, row["budget_bytes"]), answer.plan, cost_ns=row["cost_ns"])


def test_batches_of_a_chain_are_refused(service: Service) -> None:
    """A chain's stages say nothing of what grows with the batch: 422 with the place."""
    body = {"problem": Problem(CHAIN, 10**6).to_json(), "batch": 1, "batches": [1, 2]}
    reply = service.http.post("/v1/max-batch", json=body)
    assert (reply.status_code, reply.json()["pointer"]) == (422, "/problem")
    assert "graphs only" in reply.json()["detail"]


def test_validate(service: Service) -> None:
    """What is valid is described, of whatever kind; a graph that is not is refused with the pointer of the place."""
    body = example("validate")
    asked = {"graph": Graph.from_json(body["graph"]), "chain": LINKED, "join": JOIN}
    for kind, subject in asked.items():
        data = service.http.post("/v1/graphs:validate", json={kind: subject.to_json()}).json()
        assert (data["kind"], data["plain_peak_bytes"]) == (kind, plain_peak(subject))
        assert data["digest"] == graph_digest(subject)
    body["graph"]["op_inputs"][1] = [3]
    reply = service.http.post("/v1/graphs:validate", json=body)
    assert (reply.status_code, reply.json()["pointer"]) == (422, "/graph/op_inputs/1/0")


def test_node_link_graphs_come_in_and_go_out(service: Service) -> None:
    """The same problem as its `remat-graph/1`, answered from the store; what a node-link can't say is refused."""
    graph = training_graph(4, cost=3011)
    budget = plain_peak(graph)
    _, first = service.post(Problem(graph, budget))
    body = {"problem": {"graph": to_node_link(graph), "budget_bytes": budget}}
    reply = service.http.post("/v1/solves", json=body, headers={"Prefer": "wait=20"})
    assert (reply.status_code, reply.json()["cache"], reply.json()["digest"]) == (200, "hit", first["digest"])
    route = f"/v1/solves/{reply.json()['id']}/problem"
    out = service.http.get(route, params={"graph": "node-link"}).json()
    assert from_node_link(out["graph"]) == graph
    assert Problem.from_json(out) == Problem(graph, budget)
    assert Problem.from_json(service.http.get(route).json()) == Problem(graph, budget)
    body["problem"]["graph"]["links"].append({"source": 0, "target": 99})
    refused = service.http.post("/v1/solves", json=body)
    assert (refused.status_code, refused.json()["pointer"].startswith("/problem/graph/links/")) == (422, True)
    assert service.http.post("/v1/graphs:validate", json={"graph": to_node_link(graph)}).json()["ops"] == graph.ops


@pytest.mark.thorough
def test_what_node_link_data_cannot_say_is_refused_on_the_way_out(service: Service) -> None:
    """An op of two values has no node; a chain is no graph."""
    two = Graph(op_cost_ns=(3013, 1), op_inputs=((), (0,)), value_op=(0, 0), value_bytes=(1, 1))
    for problem in (Problem(two, 10), Problem(CHAIN, 10**6)):
        _, answer = service.post(problem)
        reply = service.http.get(f"/v1/solves/{answer['id']}/problem", params={"graph": "node-link"})
        assert reply.status_code == 422, reply.text
