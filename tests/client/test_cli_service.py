"""The command line and the service: solves by their ids, their list, and whether everything is in place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client.commands import remat, written
from client.liar import Asked, Said, in_turn, lying
from client.test_cli import CHAIN, JOIN, chain_graph, graph_file
from remat.cli.app import BAD_INPUT, NOTHING_FOUND, SERVICE
from remat.planning.greedy import greedy_answer
from remat_ir import Problem, Subject
from service.serving import Service, serving

__all__ = ["graph_file", "remat"]  # the fixtures


@pytest.mark.thorough
def test_solves_at_the_service(remat: Any) -> None:
    problem = Problem(chain_graph(), 14)
    answer = {**greedy_answer(problem).to_json(), "id": "a" * 32}
    with lying(in_turn(Said(200, answer))) as server:
        ran = remat("attach", "a" * 32, "--base-url", server.url, "--json")
        assert (ran.code, ran.data["id"]) == (0, "a" * 32)
        assert "a" * 32 in remat("cancel", "a" * 32, "--base-url", server.url).out
        assert [request.method for request in server.asked] == ["GET", "POST"]
    with lying(in_turn(Said(200, {"solves": [{"id": "b", "status": "running", "gap": 0.5}], "next": None}))) as server:
        assert remat("ls", "--base-url", server.url, "--json").data[0]["id"] == "b"
        assert "running" in remat("ls", "--base-url", server.url).out
    with lying(in_turn(Said(404, {"detail": "there is no such solve"}))) as server:
        assert remat("attach", "c" * 32, "--base-url", server.url).code == 2
    assert remat("attach", "../etc", "--base-url", server.url).code == 2
    assert "REMAT_BASE_URL" in remat("ls").err


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("own"), workers=1) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.parametrize("subject", [chain_graph(), CHAIN, JOIN], ids=["graph", "chain", "join"])
def test_a_sweep_at_the_service_is_one_row_of_its_list(
    remat: Any, own: Service, subject: Subject, tmp_path: Path
) -> None:
    """And has the table, the exit code and a line of progress for each budget, as a sweep that is solved here."""
    file, name = written(tmp_path / "subject.json", subject.to_json()), type(subject).__name__
    words = ("sweep", file, "--budgets", "1%,60%,80%,100%", "-t", "5")
    there, here = remat(*words, "--base-url", own.url, "--name", name), remat(*words, "--local")
    (row,) = own.http.get("/v1/solves", params={"fold": True, "search": name}).json()["solves"]
    assert (row["name"], row["group"]["kind"], row["group"]["requests"]) == (name, "sweep", 4)
    assert (there.code, there.out) == (here.code, here.out) == (0, there.out)
    told = [line.partition(":")[0] for line in there.err.splitlines()]
    assert [line.strip().split("  ")[0] for line in there.out.splitlines()[1:5]] == told[::-1]


@pytest.mark.thorough
def test_a_sweep_at_the_service_without_a_plan_or_with_too_many_budgets(
    remat: Any, own: Service, graph_file: Path
) -> None:
    words = ("sweep", graph_file, "--base-url", own.url, "--budgets")
    assert remat(*words, "1%", "-q").code == NOTHING_FOUND
    refused = remat(*words, ",".join(f"{n}B" for n in range(1, 66)))
    assert (refused.code, refused.err.count("\n")) == (BAD_INPUT, 1)
    assert "more than the 64 allowed" in refused.err


@pytest.mark.parametrize("solves", [None, [], [{"id": "a"}, {"id": "b"}], [{"id": 1}], ["a"]])
def test_a_sweep_without_a_solve_for_each_budget_is_refused(remat: Any, graph_file: Path, solves: Any) -> None:
    with lying(lambda _: Said(202, {"id": "c" * 32, "ended": False, "solves": solves})) as server:
        ran = remat("sweep", graph_file, "--budgets", "100%", "--base-url", server.url)
        assert [request.path for request in server.asked] == ["/v1/sweeps"]
    assert ran.code == SERVICE
    assert "not one solve for each budget" in ran.err


@pytest.mark.thorough
def test_doctor_says_what_is_in_place(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {row["what"]: row for row in remat("doctor", "--json").data}
    assert found["solver"]["fine"] is True
    assert found["service"]["fine"] is None
    with lying(in_turn(Said(200, {"status": "ready"}))) as server:
        ran = remat("doctor", "--base-url", server.url)
    assert ran.code == 0
    assert "is ready" in ran.out
    assert remat("doctor", "--base-url", server.url).code == 2


@pytest.mark.thorough
def test_ids_may_be_abbreviated_and_the_list_fits_a_terminal(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first characters are enough where they name one solve; several are listed; the table has 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    ids = ["abcd1111" + "0" * 24, "abcd2222" + "0" * 24]
    answer = greedy_answer(Problem(chain_graph(), 14)).to_json()
    facts = {"status": "nothing_found", "method": "linearized-greedy", "overhead": 0.1234, "gap": 0.012345}
    rows = {"solves": [facts | {"id": each, "budget_bytes": 2**40, "seconds": 1234.5} for each in ids], "next": None}
    with lying(in_turn(Said(200, rows), Said(200, {**answer, "id": ids[0]}))) as server:
        ran = remat("attach", "abcd1", "--base-url", server.url, "--json", "-q")
        assert (ran.code, ran.data["id"]) == (0, ids[0])
    with lying(in_turn(Said(200, rows))) as server:
        ran = remat("cancel", "abcd", "--base-url", server.url)
        assert ran.code == 2
        assert "abcd1111, abcd2222" in ran.err
    with lying(in_turn(Said(200, rows))) as server:
        lines = remat("ls", "--base-url", server.url).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "abcd1111" in lines[1]
    assert "…" not in "".join(lines)


@pytest.mark.thorough
def test_every_id_of_a_list_is_taken(remat: Any, own: Service) -> None:
    """Of a burst of solves, whose ids begin alike, each that a short list prints names one, also behind the list."""
    graph = chain_graph()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda size: own.post(Problem(graph, size), wait=0, method="greedy"), range(14, 44)))
    printed = [line.split()[0] for line in remat("ls", "-n", "7", "--base-url", own.url).out.splitlines()[1:]]
    newest = [row["id"] for row in own.http.get("/v1/solves", params={"limit": 7}).json()["solves"]]
    assert len(printed) == 7
    for short, whole in zip(printed, newest, strict=True):
        ran = remat("attach", short, "--base-url", own.url, "--json", "-q")
        assert ran.data["id"] == whole, ran.err


@pytest.mark.parametrize("words", [("solve",), ("sweep", "--budgets", "14B")], ids=["solve", "sweep"])
def test_a_lost_connection_names_the_way_back(remat: Any, graph_file: Path, words: tuple[str, ...]) -> None:
    """The solve was posted, so its answer is found by its id once the service is back."""
    running = {"id": "a" * 32, "status": "running", "method": "auto", "budget_bytes": 14}
    posted = running | {"ended": False, "solves": [running]}

    def script(asked: Asked) -> Said:
        return Said(202, posted if words[0] == "sweep" else running) if asked.method == "POST" else Said(drop=True)

    with lying(script) as server:
        budget = ("--budget", "14B") if words[0] == "solve" else ()
        ran = remat(words[0], graph_file, *words[1:], *budget, "--base-url", server.url, "-t", "1")
    assert ran.code == SERVICE
    assert f"`remat attach {'a' * 32}` gets its answer" in ran.err


def test_doctor_names_the_variable_of_a_missing_key(remat: Any) -> None:
    """A service that is ready and asks for a key is not in place."""
    refused = Said(401, {"title": "unauthorized", "detail": "an API key is needed"})
    with lying(in_turn(Said(200, {}), refused)) as server:
        ran = remat("doctor", "--base-url", server.url)
    assert ran.code == 2
    assert "set REMAT_API_KEY" in " ".join(ran.out.split())
