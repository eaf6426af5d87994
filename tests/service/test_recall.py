"""Answers given again from memory: only while every row that they rest on is what it was."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Graph, Problem, plain_peak
from remat_service.context import Context
from remat_service.identity import Caller, Retry
from remat_service.memory import Lru
from remat_service.requests.parse import Ask
from remat_service.requests.read import find_request
from remat_service.requests.submit import Submission
from remat_service.storage.tables import requests
from service.database import default_tenant, process
from service.serving import Service, at_peak, checked, eventually, hard_graph, served, serving, training_graph

own = served(workers=1)
"""A service of this file's own, whose database its tests may damage; each asks about another structure."""


def _recalls(service: Service) -> float:
    return service.metric('remat_recalls_total{by="body"}')


def _post(service: Service, graph: Graph, **more: Any) -> dict[str, Any]:
    status, data = service.post(at_peak(graph), time_limit_s=10, **more)
    assert status == 200
    return data


def _warm(service: Service, graph: Graph, **more: Any) -> dict[str, Any]:
    """Post until an answer comes from memory."""
    for _ in range(4):
        before = _recalls(service)
        data = _post(service, graph, **more)
        if _recalls(service) == before + 1:
            assert data["cache"] == "hit"
            return data
    raise AssertionError("never from memory")


def test_a_recalled_answer_is_a_request_like_any(own: Service) -> None:
    """A fresh id each time, readable at once, listed, with its problem; the same plan."""
    graph = training_graph(8, cost=501, fixed=77)
    first = _post(own, graph)
    assert (first["status"], first["cache"]) == ("optimal", "miss")
    assert own.get(first["id"], 0) == (200, first)
    data = _warm(own, graph)
    again = _warm(own, graph)
    assert len({first["id"], data["id"], again["id"]}) == 3
    checked(at_peak(graph), again)
    assert again["plan"] == first["plan"]
    assert own.get(again["id"], 0) == (200, again)
    assert own.get(again["id"], 0) == (200, again)
    assert again["id"] in [row["id"] for row in own.http.get("/v1/solves").json()["solves"]]
    assert own.http.get(f"/v1/solves/{again['id']}/problem").status_code == 200
    last = _warm(own, graph)
    own.stop()  # what is still on its way is written
    own.start()
    assert own.get(last["id"], 0) == (200, last)


@pytest.mark.thorough
def test_a_key_makes_it_the_same_request(own: Service) -> None:
    """An Idempotency-Key used on a recalled answer or on a solve finds it again, and is refused with another body."""
    graph = training_graph(10, cost=503)
    _warm(own, graph)
    body = {"problem": at_peak(graph).to_json(), "time_limit_s": 10}
    headers = {"Idempotency-Key": uuid.uuid4().hex, "Prefer": "wait=30"}
    before = _recalls(own)
    first = own.http.post("/v1/solves", json=body, headers=headers).json()
    second = own.http.post("/v1/solves", json=body, headers=headers).json()
    assert first == second
    assert _recalls(own) > before
    assert own.http.post("/v1/solves", json={**body, "max_gap": 0.5}, headers=headers).status_code == 409
    body, headers = {"problem": at_peak(training_graph(11, cost=504)).to_json()}, headers | {"Idempotency-Key": "a"}
    given = [own.http.post("/v1/solves", json=body, headers=headers).json() for _ in range(2)]
    assert given[0] == given[1]
    assert given[0]["cache"] == "miss"


def test_a_flipped_bit_is_a_miss_for_memory_too(own: Service) -> None:
    """Each column of a remembered plan damaged in turn, by another process: solved anew, never the damaged plan."""
    graph = training_graph(6, cost=505)
    for damage in (
        "UPDATE plans SET data = CAST(substr(data, 1, 20) || x'ff' || substr(data, 22) AS BLOB)",
        "UPDATE plans SET cost_ns = cost_ns - 1",
        "UPDATE plans SET peak_bytes = peak_bytes - 1",
        "UPDATE plans SET data = CAST(substr(data, 1, length(data) - 3) AS BLOB)",
        "DELETE FROM plans",
    ):
        given = _warm(own, graph)
        own.get(given["id"], 0)
        assert own.edit(damage) >= 1
        status, _ = own.get(given["id"], 0)
        assert status == 410, damage
        again = _post(own, graph)
        assert again["cache"] == "miss", damage
        checked(at_peak(graph), again)


@pytest.mark.thorough
def test_an_answer_edited_after_it_was_given_is_not_given_again(own: Service) -> None:
    """What was checked is remembered with the row that it was read from, whole."""
    given = _post(own, training_graph(5, cost=506))
    for _ in range(2):
        assert own.get(given["id"], 0)[0] == 200
    cost = f'"cost_ns": {given["cost_ns"]}'
    edit = "UPDATE requests SET answer = replace(answer, ?, ?) WHERE id = ? AND instr(answer, ?)"
    assert own.edit(edit, cost, '"cost_ns": 1', given["id"], cost) == 1
    assert own.get(given["id"], 0)[0] == 410


@pytest.mark.thorough
def test_a_bound_that_is_gone_is_a_miss(own: Service) -> None:
    """Not only the plan: what proves its gap is looked at as well."""
    graph = training_graph(7, cost=507)
    _warm(own, graph)
    own.edit("DELETE FROM efforts")
    own.edit("UPDATE bounds SET bound_ns = bound_ns - 1")
    before = _recalls(own)
    checked(at_peak(graph), _post(own, graph))
    assert _recalls(own) == before


@pytest.mark.thorough
def test_a_better_plan_replaces_what_is_remembered(service: Service) -> None:
    """The same body after a better plan was stored: the better plan."""
    graph = hard_graph(14, 8)
    problem = Problem(graph, int(0.7 * plain_peak(graph)))
    ask = {"time_limit_s": 15, "max_gap": 0.99}
    service.post(problem, method="greedy", **ask)
    costs = [service.post(problem, **ask)[1]["cost_ns"] for _ in range(4)]
    _, best = service.post(problem, time_limit_s=15, max_gap=0)
    _, after = service.post(problem, **ask)
    assert after["cost_ns"] == best["cost_ns"] <= costs[-1]
    checked(problem, after)


@pytest.mark.thorough
def test_infeasible_is_remembered_too(service: Service) -> None:
    """An answer without a plan rests on its floor."""
    graph = training_graph(23, cost=509)
    problem = Problem(graph, 1900)
    before = _recalls(service)
    for _ in range(5):
        status, data = service.post(problem, time_limit_s=5)
        assert (status, data["status"]) == (200, "infeasible")
    assert _recalls(service) > before


@pytest.mark.thorough
def test_evicted_is_gone_from_memory(tmp_path: Path) -> None:
    """What housekeeping has thrown out is not given from memory either."""
    with serving(tmp_path, workers=1, housekeeping_s=0.2, store_days=2e-5) as own:  # under two seconds
        graph = training_graph(5, cost=511)
        given = _post(own, graph)
        eventually(lambda: own.get(given["id"], 0)[0] in (404, 410), 30)
        assert _post(own, graph)["cache"] == "miss"


def test_lru_is_bounded() -> None:
    """The oldest goes first; the newest stays, even where it is over the bound by itself."""
    held: Lru[str, int] = Lru(10)
    for i, name in enumerate("abc"):
        held.put(name, i, 4)
    assert (held.get("a"), held.get("b"), held.size) == (None, 1, 8)
    held.put("b", 5, 1)
    assert (held.get("b"), held.size) == (5, 5)
    held.put("huge", 9, 99)
    assert (held.size, held.get("huge")) == (99, 9)


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[tuple[Context, Caller, dict[str, Any]]]:
    """A context of its own, a caller, and a row of a request with an idempotency key that is in its database."""
    async with process(f"sqlite:///{tmp_path}/rows.sqlite") as context:
        caller = await default_tenant(context)
        ask = Ask(Problem(training_graph(4, fixed=10), 5))  # hopeless, and so answered without a solver
        request_id = await Submission(context, caller, ask, Retry("same key", "0" * 64)).submit()
        found = dict((await find_request(context, caller, request_id))._mapping)
        columns = {column.name for column in requests.columns}
        yield context, caller, {name: value for name, value in found.items() if name in columns}


@pytest.mark.thorough
async def test_a_key_that_came_twice_at_once_loses_no_row(asked: tuple[Context, Caller, dict[str, Any]]) -> None:
    """Two rows with one idempotency key, one of them still on its way: both can be read by their ids."""
    context, caller, row = asked
    await context.write_behind.add(row | {"id": "f" * 32})
    assert context.write_behind.holds("f" * 32)
    assert context.write_behind.holds_key(caller.tenant_id, "same key")
    assert (await find_request(context, caller, "f" * 32)).ended
    assert (await find_request(context, caller, row["id"])).idempotency_key == "same key"
    assert not context.write_behind.holds("f" * 32)


@pytest.mark.thorough
async def test_a_row_that_is_there_already_holds_no_other_up(asked: tuple[Context, Caller, dict[str, Any]]) -> None:
    """Its commit was not heard of, or its tenant is gone: the rows that came after it are written, with their keys."""
    context, caller, row = asked
    gone = row | {"id": "d" * 32, "tenant_id": "0" * 32, "idempotency_key": "of nobody"}
    for one in (row, gone, row | {"id": "e" * 32, "idempotency_key": "another key"}):
        await context.write_behind.add(one)
    await context.write_behind.flush()
    assert not any(map(context.write_behind.holds, (row["id"], "d" * 32, "e" * 32)))
    assert (await find_request(context, caller, row["id"])).idempotency_key == "same key"
    assert (await find_request(context, caller, "e" * 32)).idempotency_key == "another key"
