"""Names of solves: given ones are sent, others stay here unless the settings say that they may be sent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.commands import command as command  # a fixture
from client.liar import Said, in_turn, lying
from remat.planning.service import submission
from remat.training.step import name_of
from remat_ir import InvalidData, Problem, graph_of

GRAPH = graph_of([1, 2], [4, 8], [[], [0]])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        return self.one(x).tanh() + more["y"]


CALL = (torch.ones(4, 8), {"y": torch.ones(4, 1)})


def sent_names(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> list[Any]:
    """What the requests of a job to a service that refuses them are called."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(folder))
    with lying(lambda _: Said(422, {"title": "no", "detail": "no"})) as server:
        remat.optimize(Small(), CALL, budget="100%", planner=server.url, **options)
        bodies = [asked.body for asked in server.asked if asked.path == "/v1/solves"]
    assert bodies
    assert "Small" not in str([{**body, "name": None} for body in bodies])
    return [body.get("name") for body in bodies]


def test_a_name_leaves_the_client_only_where_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its option, or by the setting; the option stands over it."""
    assert set(sent_names(monkeypatch, tmp_path / "a")) == {None}
    assert set(sent_names(monkeypatch, tmp_path / "b", name="mine")) == {"mine"}
    monkeypatch.setenv("REMAT_SEND_NAMES", "1")
    assert set(sent_names(monkeypatch, tmp_path / "c")) == {"Small 4×8"}
    assert set(sent_names(monkeypatch, tmp_path / "d", name="mine")) == {"mine"}


MODEL = """
import torch

def make_model(batch=4):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(batch, 8)
"""


@pytest.mark.parametrize(
    "asked",
    [
        ("sweep", "graph.json", "--budgets", "100%"),
        ("compare", "graph.json", "--budget", "100%", "--methods", "auto"),
        ("max-batch", "graph.json", "--budget", "1KiB"),
        pytest.param(
            ("compare", "model.py:make_model", "--budget", "100%", "--methods", "auto", "--device", "h100"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("fit", "model.py:make_model", "--device", "h100"), marks=pytest.mark.slow),
    ],
    ids=lambda asked: " ".join(asked[:2]),
)
def test_commands_send_the_name_that_they_are_given(
    asked: tuple[str, ...], command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And without one that of the model, where the setting says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(replace(GRAPH, backward_from=1).to_json()))
    (tmp_path / "model.py").write_text(MODEL)
    of_model = "Sequential 4×8" if "model" in asked[1] else None
    for more, setting, name in (((), "0", None), (("--name", "mine"), "1", "mine"), ((), "1", of_model)):
        monkeypatch.setenv("REMAT_SEND_NAMES", setting)
        with lying(lambda _: Said(422, {"title": "no", "detail": "no"})) as server:
            command(*asked, "--base-url", server.url, *more)
            posted = [
                request.body for request in server.asked if request.path.endswith(("/solves", "/sweeps", "/max-batch"))
            ]
        assert posted
        assert {body.get("name") for body in posted} == {name}


def test_a_name_is_of_the_class_and_the_first_tensor() -> None:
    assert name_of(Small(), (), {"n": 3, "x": [torch.ones(2, 3)], "y": torch.ones(1)}) == "Small 2×3"
    assert name_of(Small(), (), {}) == "Small"
    assert len(name_of(type("N" * 200, (nn.Module,), {})(), (), {})) == 100


@pytest.mark.parametrize("name", ["", "n" * 101, "a\nb", "\x1b[31m", 3])
def test_a_name_that_no_list_can_show_is_refused(name: Any) -> None:
    with pytest.raises(InvalidData, match=r"^name must be 1 to 100 printable characters"):
        remat.SolveOptions(name=name)


def test_a_body_without_a_name_is_as_before() -> None:
    """So that requests of one problem stay equal, byte by byte."""
    problem = Problem(GRAPH, 12)
    assert "name" not in submission(problem, remat.SolveOptions())["body"]
    assert submission(problem, remat.SolveOptions(name="x"))["body"]["name"] == "x"


def test_the_list_shows_names_within_80_columns(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where they are long, without what a terminal would obey; whole where there is room."""
    long = "GPT2LMHeadModel 8×1024"
    facts = {"status": "nothing_found", "method": "linearized-greedy", "overhead": 0.1234, "gap": 0.012345}
    facts |= {"budget_bytes": 2**40, "seconds": 1234.5, "cache": "joined"}
    names = (long, "[bold]x[/bold]", "\x1b[31mred", None)
    rows = {"solves": [facts | {"id": f"{i}" * 32, "name": name} for i, name in enumerate(names)], "next": None}
    shown = {}
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        with lying(in_turn(Said(200, rows))) as server:
            shown[columns] = command("ls", "--base-url", server.url).out.splitlines()
    assert max(map(len, shown["80"])) <= 80
    assert "GPT2LMHeadMod… nothing_found" in shown["80"][1]
    assert long in shown["120"][1]
    assert re.search(r"joined *$", shown["120"][1])
    assert "[bold]x[/bold]" in shown["80"][2]
    assert " [31mred" in shown["80"][3]
