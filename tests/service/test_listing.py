"""Lists of requests: what is filtered, sorted, paged and folded is what a straightforward program would list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from remat_ir import Problem, budget_at, plain_peak
from service.serving import Service, serving, training_graph
from tiers import first

GRAPHS = (training_graph(6), training_graph(9, fixed=500))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two sweeps, plans of two graphs, and a problem without one."""
    with serving(tmp_path_factory.mktemp("listing"), workers=1) as running:
        for graph in GRAPHS:
            for fraction in (1.0, 0.8, 0.7):
                running.post(Problem(graph, budget_at(graph, fraction)))
            running.post(Problem(graph, budget_at(graph, 0.7)), method="greedy")
        running.post(Problem(GRAPHS[0], 1))
        for name in ("Vit-Large 8×224", "100 % of_it"):
            running.post(Problem(GRAPHS[0], budget_at(GRAPHS[0], 0.8)), name=name)
        for points in (3, 4):
            sweep = {"graph": GRAPHS[0].to_json(), "points": points, "time_limit_s": 5}
            running.http.post("/v1/sweeps", json=sweep, headers={"Prefer": "wait=30"})
        yield running


def listed(service: Service, limit: int = 200, **asked: Any) -> list[dict[str, Any]]:
    """All pages, put together."""
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = service.http.get("/v1/solves", params={"limit": limit, **asked, **after}).json()
        assert len(page["solves"]) <= limit
        found += page["solves"]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}


@pytest.mark.parametrize(
    "sort", first(2, ["created_at", "gap", "status", "ops", "budget_bytes", "overhead", "seconds"])
)
@pytest.mark.parametrize("order", first(1, ["asc", "desc"]))
def test_pages_put_together_are_the_sorted_list(own: Service, sort: str, order: str) -> None:
    """In any order and with any size of page each request comes once, and what has no value comes last or first."""
    everything = listed(own)

    def key(row: dict[str, Any]) -> tuple[Any, str]:
        value = row["id"] if sort == "created_at" else row[sort]
        return (-1 if value is None else value), row["id"]

    wanted = [row["id"] for row in sorted(everything, key=key, reverse=order == "desc")]
    for limit in (1, 4, 200):
        assert [row["id"] for row in listed(own, limit, sort=sort, order=order)] == wanted


def test_filters_leave_what_they_say(own: Service) -> None:
    """By status, by method and by the beginning of an id; several statuses are taken together."""
    everything = listed(own)
    for asked, keeps in (
        ({"status": "infeasible"}, lambda row: row["status"] == "infeasible"),
        ({"status": ["infeasible", "feasible"]}, lambda row: row["status"] in ("infeasible", "feasible")),
        ({"search": "GREEDY"}, lambda row: row["method"] == "greedy"),
        ({"search": everything[3]["id"][:20]}, lambda row: row["id"] == everything[3]["id"]),
        ({"search": "vit-large 8×"}, lambda row: row["name"] == "Vit-Large 8×224"),
        ({"search": "%"}, lambda row: row["name"] == "100 % of_it"),
        ({"search": "f_i"}, lambda row: row["name"] == "100 % of_it"),
        ({"search": "no such"}, lambda row: False),
    ):
        wanted = [row["id"] for row in everything if keeps(row)]
        assert [row["id"] for row in listed(own, **asked)] == wanted
    assert own.http.get("/v1/solves", params={"status": "fine"}).status_code == 422
    assert own.http.get("/v1/solves", params={"sort": "id"}).status_code == 422


@pytest.mark.thorough
def test_sweeps_fold_into_their_newest_request(own: Service) -> None:
    """One row a sweep says how many requests it stands for; its id lists them; a filter folds what it leaves."""
    everything = listed(own)
    groups = {row["group"]["id"] for row in everything if row["group"]}
    folded = listed(own, 3, fold=True)
    assert len(folded) == len(everything) - 3 - 4 + 2
    for group in groups:
        members = [row for row in everything if row["group"] and row["group"]["id"] == group]
        (row,) = [row for row in folded if row["group"] and row["group"]["id"] == group]
        assert row["id"] == max(member["id"] for member in members)
        assert row["group"] == {
            "id": group,
            "kind": "sweep",
            "requests": len(members),
            "ended": sum(member["status"] not in ("queued", "running") for member in members),
            "planned": sum(member["overhead"] is not None for member in members),
            "least_budget_bytes": min(member["budget_bytes"] for member in members),
            "most_budget_bytes": max(member["budget_bytes"] for member in members),
            "best_batch": None,
            "bound": None,
        }
        assert [r["id"] for r in listed(own, group=group)] == [member["id"] for member in members]
        oldest = min(member["id"] for member in members)
        assert [r["id"] for r in listed(own, fold=True, search=oldest)] == [oldest]


@pytest.mark.thorough
def test_rows_say_what_plain_training_needs(own: Service) -> None:
    """With the fixed bytes of each request's own problem."""
    needed = {graph.ops: plain_peak(graph) for graph in GRAPHS}
    for row in listed(own):
        assert row["plain_peak_bytes"] == needed[row["ops"]]


def test_a_page_goes_on_behind_what_is_there(own: Service) -> None:
    """An id that is not there is an error where its place cannot be known; by age, ids say it themselves."""
    reply = own.http.get("/v1/solves", params={"after": "f" * 32, "sort": "gap"})
    assert (reply.status_code, reply.json()["detail"]) == (422, "query after: there is no solve with this id")
    assert len(own.http.get("/v1/solves", params={"after": "f" * 32}).json()["solves"]) == len(listed(own))


@pytest.mark.thorough
def test_a_name_is_each_requests_own(own: Service) -> None:
    """Equal problems are one solve, whatever they are called; a repeated body keeps its name; others have none."""
    problem, before = Problem(GRAPHS[1], budget_at(GRAPHS[1], 0.8)), listed(own)
    assert {row["name"] for row in before} == {None, "Vit-Large 8×224", "100 % of_it"}
    for name in ("a", "b", "b", None):
        code, answer = own.post(problem, name=name)
        assert (code, answer["cache"]) == (200, "hit")
        assert "name" not in answer
    assert [row["name"] for row in listed(own)[:4]] == [None, "b", "b", "a"]
    for wrong in ("", "n" * 101, 3, "nul\x00"):
        code, refused = own.post(problem, name=wrong)
        assert (code, refused["pointer"]) == (422, "/name")
