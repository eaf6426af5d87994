"""The command line and the service: solves by their ids, their list, and whether everything is in place."""

from __future__ import annotations

from typing import Any

import pytest

from client.liar import Said, in_turn, lying
from client.test_cli import chain_graph, remat
from remat.planning.greedy import greedy_answer
from remat_ir import Problem

__all__ = ["remat"]  # the fixture


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


def test_doctor_says_what_is_in_place(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {row["what"]: row for row in remat("doctor", "--json").data}
    assert found["solver"]["fine"] is True
    assert found["service"]["fine"] is None
    with lying(in_turn(Said(200, {"status": "ready"}))) as server:
        ran = remat("doctor", "--base-url", server.url)
    assert ran.code == 0
    assert "is ready" in ran.out
    assert remat("doctor", "--base-url", server.url).code == 2


def test_ids_may_be_abbreviated_and_the_list_fits_a_terminal(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first characters are enough where they name one solve; several are listed; the table has 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    ids = ["abcd1111" + "0" * 24, "abcd2222" + "0" * 24]
    answer = greedy_answer(Problem(chain_graph(), 14)).to_json()
    facts = {"status": "nothing_found", "method": "linearized-greedy", "overhead": 0.1234, "gap": 0.012345}
    rows = {"solves": [facts | {"id": each, "budget_bytes": 2**40, "seconds": 1234.5} for each in ids], "next": None}
    missing = Said(404, {"detail": "there is no such solve"})
    with lying(in_turn(missing, Said(200, rows), Said(200, {**answer, "id": ids[0]}))) as server:
        ran = remat("attach", "abcd1", "--base-url", server.url, "--json", "-q")
        assert (ran.code, ran.data["id"]) == (0, ids[0])
    with lying(in_turn(missing, Said(200, rows))) as server:
        ran = remat("cancel", "abcd", "--base-url", server.url)
        assert ran.code == 2
        assert "abcd1111, abcd2222" in ran.err
    with lying(in_turn(Said(200, rows))) as server:
        lines = remat("ls", "--base-url", server.url).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "abcd1111" in lines[1]
    assert "…" not in "".join(lines)


def test_doctor_names_the_variable_of_a_missing_key(remat: Any) -> None:
    """A service that is ready and asks for a key is not in place."""
    refused = Said(401, {"title": "unauthorized", "detail": "an API key is needed"})
    with lying(in_turn(Said(200, {}), refused)) as server:
        ran = remat("doctor", "--base-url", server.url)
    assert ran.code == 2
    assert "set REMAT_API_KEY" in " ".join(ran.out.split())
