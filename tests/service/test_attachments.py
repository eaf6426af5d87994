"""What a job says of a solve once it runs by its plan: kept with the request, by quota, for its tenant alone."""

from __future__ import annotations

import asyncio
import random
import string

import httpx2
import pytest
from sqlalchemy import text

from remat_ir import Problem, budget_at
from remat_service.errors import Forbidden
from remat_service.requests.attachments import attach, attached
from remat_service.requests.operate import change_tenant
from remat_service.storage.tables import requests
from service.database import default_tenant, postgres, process, request_row
from service.serving import Service, eventually, served, training_graph
from service.test_tenants import Tenant, cli

GRAPH = training_graph(4)
RUN = {"predicted_bytes": 1000, "measured_bytes": 1010, "predicted_ns": 5000, "measured_ns": None, "device": "a CPU"}
NAMES = {"names": [f"net.block{op}" for op in range(GRAPH.ops)], "where": ["model.py:7"] * GRAPH.ops}


locked = served(workers=1, require_keys="true", housekeeping_s=1)


@pytest.fixture
def anna(locked: Service, request: pytest.FixtureRequest) -> Tenant:
    """A tenant of this test's own."""
    return Tenant(locked, cli(locked, "keys", "create", request.node.name, "--new-tenant"))


def solved(tenant: Tenant, share: float = 0.6) -> str:
    """A solve of a tenant."""
    reply = tenant.post(Problem(GRAPH, budget_at(GRAPH, share)))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def said(tenant: Tenant, solve: str) -> dict[str, dict[str, object] | None]:
    """What a solve's attachments are, without their dates."""
    reply = tenant.http.get(f"/v1/solves/{solve}/attachments")
    assert reply.status_code == 200, reply.text
    found: dict[str, dict[str, object] | None] = reply.json()
    for each in found.values():
        assert each is None or str(each.pop("created_at")).startswith("20")
    return found


def put(tenant: Tenant, solve: str, what: str, body: object) -> httpx2.Response:
    """Attach."""
    return tenant.http.put(f"/v1/solves/{solve}/{what}", json=body)


def test_a_run_is_reported_and_read(anna: Tenant) -> None:
    """The latest report stands; a solve of which nothing was said has null."""
    solve = solved(anna)
    assert said(anna, solve) == {"run": None, "names": None}
    assert put(anna, solve, "run", RUN).status_code == 204
    assert said(anna, solve)["run"] == RUN
    later = {"predicted_bytes": 1000, "measured_bytes": 990}
    assert put(anna, solve, "run", later).status_code == 204
    assert said(anna, solve)["run"] == later | dict.fromkeys(("predicted_ns", "measured_ns", "device"))


@pytest.mark.parametrize(
    ("what", "body", "pointer"),
    [
        ("run", {"predicted_bytes": -1, "measured_bytes": 1}, "/predicted_bytes"),
        ("run", {"measured_bytes": 1}, ""),
        ("run", RUN | {"device": "x" * 201}, "/device"),
        ("run", RUN | {"more": 1}, ""),
        ("names", {"names": ["a"]}, "/names"),
        ("names", NAMES | {"where": ["model.py:7"]}, "/where"),
        ("names", {"names": ["a" * 301] * GRAPH.ops}, "/names/0"),
        ("names", {"names": ["\x00"] * GRAPH.ops}, "/names/0"),
    ],
)
def test_what_is_wrong_is_refused_and_where(
    locked: Service, anna: Tenant, what: str, body: dict[str, object], pointer: str, request: pytest.FixtureRequest
) -> None:
    cli(locked, "tenants", "names", request.node.name, "on")
    solve = solved(anna)
    reply = put(anna, solve, what, body)
    assert reply.status_code == 422, reply.text
    assert str(reply.json().get("pointer", "")).startswith(pointer)
    assert said(anna, solve) == {"run": None, "names": None}


def test_names_are_stored_only_where_an_operator_lets_them(
    locked: Service, anna: Tenant, request: pytest.FixtureRequest
) -> None:
    """Off at first; off again deletes them; by command and by route. The client can ask, and the list says so."""
    solve, tenant = solved(anna), request.node.name
    refused = put(anna, solve, "names", NAMES)
    assert refused.status_code == 403
    assert f"tenants names {tenant} on" in refused.json()["detail"]
    assert anna.http.get("/v1/capabilities").json()["stores_names"] is False
    cli(locked, "tenants", "names", tenant, "on")
    assert anna.http.get("/v1/capabilities").json()["stores_names"] is True
    assert f"{tenant}  " in next(line for line in cli(locked, "tenants", "list").splitlines() if "names stored" in line)
    assert put(anna, solve, "names", NAMES).status_code == 204
    assert put(anna, solve, "run", RUN).status_code == 204
    assert said(anna, solve) == {"run": RUN, "names": NAMES}
    cli(locked, "tenants", "names", tenant, "off")
    assert said(anna, solve) == {"run": RUN, "names": None}
    chief = Tenant(locked, cli(locked, "keys", "create", "chiefs", "--scope", "operate", "--new-tenant"))
    path = f"/v1/operator/tenants/{tenant}"
    assert chief.http.patch(path, json={"store_names": True}).json()["store_names"] is True
    assert put(anna, solve, "names", NAMES).status_code == 204
    assert chief.http.patch(path, json={"weight": 2.0}).json()["store_names"] is True
    assert said(anna, solve)["names"] == NAMES
    assert chief.http.patch(path, json={"store_names": False}).json()["store_names"] is False
    assert said(anna, solve)["names"] is None


@pytest.mark.thorough
async def test_names_that_come_while_they_are_switched_off_are_not_stored() -> None:
    """On PostgreSQL, where an operator's transaction is open while they come: else they were stored after its end."""
    with postgres() as url:
        async with process(url) as context:
            caller = await default_tenant(context)
            row = {"id": "a" * 32, "cache": "miss", "ended": True, "epoch": caller.epoch}
            async with context.database.write() as connection:
                await connection.execute(requests.insert().values(request_row(context, caller, **row)))
                await change_tenant(connection, "operator", "default", {"store_names": True})
            async with context.database.write() as connection:
                await change_tenant(connection, "operator", "default", {"store_names": False})
                coming = asyncio.create_task(attach(context, caller, "a" * 32, "names", {"names": ["net"]}))
                waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not coming.done() and not (await context.database.rows(waits))[0][0]:
                    await asyncio.sleep(0.01)
            with pytest.raises(Forbidden):
                await coming
            assert (await attached(context, caller, "a" * 32))["names"] is None


def test_names_that_are_not_stored_are_not_compressed(anna: Tenant) -> None:
    """Permission comes before size: these would be too large to store."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices(string.printable[:94], k=299)) for _ in range(16_700)]
    refused = put(anna, solved(anna), "names", {"names": words})
    assert refused.status_code == 403, refused.text


def test_no_tenant_reads_or_writes_anothers(locked: Service, anna: Tenant) -> None:
    """Not even where both have asked the same and share the answer."""
    bert = Tenant(locked, cli(locked, "keys", "create", "bert", "--new-tenant"))
    mine, its = solved(anna), solved(bert)
    assert put(anna, mine, "run", RUN).status_code == 204
    assert put(bert, mine, "run", RUN).status_code == 404
    assert bert.http.get(f"/v1/solves/{mine}/attachments").status_code == 404
    assert said(bert, its) == {"run": None, "names": None}
    reader = Tenant(locked, cli(locked, "keys", "create", "bert", "--scope", "read"))
    assert put(reader, its, "run", RUN).status_code == 403


def test_attachments_count_for_the_quota_and_go_with_their_request(
    locked: Service, anna: Tenant, request: pytest.FixtureRequest
) -> None:
    """A tenant at its quota of bytes attaches nothing more; requests that are trimmed take theirs along."""
    tenant = request.node.name
    solve = solved(anna)
    cli(locked, "tenants", "quota", tenant, "--stored-bytes", "0")
    refused = put(anna, solve, "run", RUN)
    assert refused.status_code == 429
    assert "are stored for this tenant" in refused.json()["detail"]
    cli(locked, "tenants", "quota", tenant, "--stored-bytes", "none")
    assert put(anna, solve, "run", RUN).status_code == 204
    assert _stored(locked, solve) == 1
    cli(locked, "tenants", "quota", tenant, "--requests", "1")
    solved(anna, 0.7)
    eventually(lambda: anna.http.get(f"/v1/solves/{solve}").status_code == 404)
    assert _stored(locked, solve) == 0


def _stored(service: Service, solve: str) -> int:
    """How many attachments of a solve are in the database."""
    return int(service.rows("SELECT count(*) FROM attachments WHERE request_id = ?", solve)[0][0])
