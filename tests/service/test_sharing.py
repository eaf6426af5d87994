"""Sharing groups: made, joined, left, listed; what is shared then, and nothing else."""

from __future__ import annotations

import json
import time

import pytest

from service.serving import (
    Service,
    at_peak,
    command,
    eventually,
    hard_graph,
    open_problem,
    posed,
    served,
    serving,
    training_graph,
)
from service.test_tenants import Tenant, cli

own = served(workers=1, require_keys="true")


def tenant(service: Service, name: str) -> Tenant:
    """A new tenant."""
    return Tenant(service, cli(service, "keys", "create", name, "--new-tenant"))


def moved() -> None:
    """Servers notice within two seconds."""
    time.sleep(2.2)


def refused(service: Service, *arguments: str) -> str:
    """Run a command that fails: what it says."""
    done = command(service.database_url, *arguments)
    assert done.exception is not None
    return str(done.exception)


@pytest.mark.thorough
def test_a_tenant_joins_and_leaves(own: Service) -> None:
    """Members share what they store in the group: not what they had before, and not after they have left."""
    anna, bert = tenant(own, "anna"), tenant(own, "bert")
    before, together, after = map(at_peak, map(training_graph, (3, 4, 5)))
    mine = anna.post(before).json()
    assert mine["cache"] == "miss"
    cli(own, "groups", "create", "lab")
    for name in ("anna", "bert"):
        cli(own, "groups", "join", "lab", name)
    moved()
    assert "lab: anna, bert" in cli(own, "groups", "list")
    assert bert.http.get("/v1/capabilities").json()["group"] == "lab"
    assert bert.post(before).json()["cache"] == "miss"  # what was anna's alone stays so

    theirs = anna.post(together).json()
    assert (theirs["cache"], bert.post(together).json()["cache"]) == ("miss", "hit")
    assert bert.http.get(f"/v1/solves/{theirs['id']}").status_code == 404  # requests are not shared
    anna.http.post("/v1/profiles", json={"device": "d", "profiles": {"s": [7, 0]}})
    asked = {"device": "d", "signatures": ["s"]}
    assert bert.http.post("/v1/profiles:lookup", json=asked).json() == {"profiles": {"s": [7, 0]}}

    cli(own, "groups", "leave", "bert")
    moved()
    assert anna.post(after).json()["cache"] == "miss"
    assert [bert.post(problem).json()["cache"] for problem in (together, after)] == ["miss", "miss"]
    assert bert.http.post("/v1/profiles:lookup", json=asked).json() == {"profiles": {}}
    cli(own, "groups", "leave", "anna")
    moved()
    assert anna.post(before).json()["cache"] == "hit"  # its own, found again
    assert anna.http.get(f"/v1/solves/{mine['id']}").status_code == 200
    cli(own, "groups", "delete", "lab")
    assert cli(own, "groups", "list") == ""


def test_what_is_refused(own: Service) -> None:
    """Each by a sentence that names what is missing or in the way."""
    tenant(own, "dora")
    assert "no group 'nowhere'" in refused(own, "groups", "join", "nowhere", "dora")
    assert "no group 'nowhere'" in refused(own, "tenants", "add", "emil", "--group", "nowhere")
    cli(own, "groups", "create", "somewhere")
    assert "already" in refused(own, "groups", "create", "somewhere")
    assert "no tenant 'nobody'" in refused(own, "groups", "join", "somewhere", "nobody")
    cli(own, "groups", "join", "somewhere", "dora")
    assert "has members, who have to leave first: dora" in refused(own, "groups", "delete", "somewhere")


@pytest.mark.thorough
def test_everyone_shares(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One group for all who are in none: those that are there, and those that come later."""
    with serving(tmp_path_factory.mktemp("everyone"), workers=1, require_keys="true") as own:
        fred = tenant(own, "fred")
        apart = tenant(own, "gina")
        cli(own, "groups", "create", "apart")
        cli(own, "groups", "join", "apart", "gina")
        cli(own, "groups", "create", "all", "--everyone")
        hugo = tenant(own, "hugo")
        moved()
        assert "all  everyone's: default, fred, hugo" in cli(own, "groups", "list")
        assert "everyone's already" in refused(own, "groups", "create", "more", "--everyone")
        problem = at_peak(training_graph(6))
        assert [each.post(problem).json()["cache"] for each in (fred, hugo, apart)] == ["miss", "hit", "miss"]


@pytest.mark.thorough
def test_teams_of_a_group_share_a_solve_under_way(own: Service) -> None:
    """One problem of two teams at once is solved once; each has its own request; neither may move meanwhile; the solve
    ends with the last of them. A team outside has a solve of its own.
    """
    cli(own, "groups", "create", "together")
    for name in ("sven", "tina"):
        cli(own, "tenants", "add", name, "--group", "together")
    sven, tina, outside = (tenant(own, name) for name in ("sven", "tina", "uwe"))
    asked = {"method": "staged", "time_limit_s": 60, "max_gap": 0}
    first, second, other = (each.post(open_problem(11), wait=0, **asked).json() for each in (sven, tina, outside))
    assert [each["cache"] for each in (first, second, other)] == ["miss", "joined", "miss"]
    assert "1 solves of uwe are under way" in refused(own, "groups", "join", "together", "uwe")
    assert outside.http.post(f"/v1/solves/{other['id']}/cancel").status_code == 200
    eventually(lambda: tina.http.get(f"/v1/solves/{second['id']}").json()["status"] == "running")
    assert tina.http.get(f"/v1/solves/{first['id']}").status_code == 404
    assert sven.http.post(f"/v1/solves/{first['id']}/cancel").json()["status"] == "cancelled"
    for name in ("sven", "tina"):
        assert "are under way" in refused(own, "groups", "leave", name)
    assert tina.http.get(f"/v1/solves/{second['id']}").json()["status"] == "running"
    assert tina.http.post(f"/v1/solves/{second['id']}/cancel").json()["status"] == "cancelled"
    eventually(lambda: command(own.database_url, "groups", "leave", "tina").exit_code == 0)


@pytest.mark.thorough
def test_a_team_takes_back_its_own_pin_alone(own: Service) -> None:
    """What two teams of a group have pinned stays pinned until both let go; who has pinned nothing lets go of nothing;
    a pin is let go where a better plan has come meanwhile.
    """
    cli(own, "groups", "create", "pinning")
    for name in ("quin", "rosa"):
        cli(own, "tenants", "add", name, "--group", "pinning")
    quin, rosa = tenant(own, "quin"), tenant(own, "rosa")
    problem = posed(hard_graph(8, 3), 0.6)

    def pinned() -> int:
        return int(own.rows("SELECT count(*) FROM plans WHERE pinned")[0][0])

    digest = quin.post(problem, method="greedy", time_limit_s=5).json()["digest"]

    def change(who: Tenant, method: str) -> None:
        reply = who.http.request(method, f"/v1/plans/{digest}/pin")
        assert reply.status_code == 204

    change(quin, "PUT")
    change(rosa, "DELETE")
    assert pinned() == 1
    change(rosa, "PUT")
    change(quin, "DELETE")
    assert pinned() == 1
    cost = rosa.post(problem, method="greedy", time_limit_s=5).json()["cost_ns"]
    assert rosa.post(problem, method="milp", time_limit_s=20, max_gap=0).json()["cost_ns"] <= cost
    change(rosa, "DELETE")
    assert pinned() == 0


@pytest.mark.thorough
def test_administration_is_written_down(own: Service) -> None:
    """Who did what, in order; never a secret; nothing of what was refused."""
    key = cli(own, "keys", "create", "ines", "--label", "laptop", "--new-tenant")
    refused(own, "tenants", "disable", "nobody")
    cli(own, "tenants", "quota", "ines", "--queued", "3")
    cli(own, "tenants", "disown", "ines")
    (old,) = [line.split()[0] for line in cli(own, "keys", "list").splitlines() if "ines" in line]
    fresh = cli(own, "keys", "rotate", old)
    (new,) = [line.split()[0] for line in cli(own, "keys", "list").splitlines() if "ines" in line and old not in line]
    cli(own, "keys", "revoke", old)
    text = cli(own, "history", "--limit", "5")
    lines = [json.loads(line) for line in text.splitlines()]
    acts = ["keys create", "tenants change", "tenants disown", "keys rotate", "keys revoke"]
    assert [line["act"] for line in lines] == acts
    assert lines[1]["most_queued"] == 3
    assert lines[0]["key"] == lines[3]["key"] == lines[4]["key"] == old
    assert lines[0]["tenant"] == lines[3]["tenant"] == lines[4]["tenant"] == "ines"
    assert lines[3]["new_key"] == new
    assert all("@" in line["actor"] for line in lines)
    assert key not in text
    assert fresh not in text


@pytest.mark.thorough
def test_a_mistyped_name_makes_no_tenant(own: Service) -> None:
    """A key is for a tenant that is there, or for one that is to be made; one made in error can be removed."""
    tenant(own, "olga")
    before = cli(own, "tenants", "list")
    assert "there is no tenant 'ogla'" in refused(own, "keys", "create", "ogla")
    assert cli(own, "tenants", "list") == before
    key = cli(own, "keys", "create", "ogla", "--new-tenant")
    cli(own, "tenants", "remove", "ogla")
    assert cli(own, "tenants", "list") == before
    assert own.http.get("/v1/solves", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert "there is no tenant" in refused(own, "tenants", "remove", "ogla")
    tenant(own, "paul").post(at_peak(training_graph(5)))
    assert "has asked for something" in refused(own, "tenants", "remove", "paul")
