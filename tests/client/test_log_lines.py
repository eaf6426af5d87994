"""What a job's log says where there is no terminal, and what an error and a terminal say to do."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from client.commands import remat as remat  # a fixture
from client.liar import Said, in_turn, lying
from remat.errors import NotAllowed, RanksDiffer
from remat.planning import phases
from remat.planning.phases import Lines, Phases, doing
from remat.planning.quick import tell_of_better
from remat_ir import Answer, Problem, graph_of, plain_plan, plan_of

JOB = """
import torch, remat, logging
{first}
layers = [torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)) for _ in range(4)]
model = torch.nn.Sequential(*layers)
x = torch.ones(512, 16)
remat.enable(model, budget="50%", planner="greedy")
for _ in range(3):
    model(x).sum().backward()
"""


def said(first: str, tmp_path: Path, **env: str) -> list[str]:
    """What a job prints on standard error, which is no terminal."""
    code = JOB.format(first=first)
    given = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "REMAT_CACHE_DIR": str(tmp_path / "cache"), **env}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given, check=True)
    return ran.stderr.splitlines()


@pytest.mark.thorough
def test_a_job_without_a_terminal_says_what_it_does(tmp_path: Path) -> None:
    """From the capture to the first step's peak; no line of torch's about blocks that it does not know."""
    lines = said("", tmp_path)
    assert lines[0] == "remat: capturing and planning a graph of the model"
    assert any(re.match(r"remat: a budget of .*: 50% of the .* that a step needs beyond the", line) for line in lines)
    assert sum("→" in line for line in lines) == 1
    assert lines[-1].startswith("remat: the first step peaked at ")
    assert all(line.startswith("remat: ") for line in lines)


def test_a_line_that_cannot_be_written_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a job's standard error is a file on a full disk, or a pipe that nobody reads any more."""
    log = logging.Logger("remat")
    log.addHandler(Lines())
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        log.warning("a first line")
        log.warning("and one that comes after it")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["logging.basicConfig(level='WARNING')", "logging.getLogger('remat').setLevel(30)"])
def test_who_configures_logging_is_left_alone(first: str, tmp_path: Path) -> None:
    assert said(first, tmp_path) == []


@pytest.mark.thorough
def test_one_rank_of_a_job_speaks(tmp_path: Path) -> None:
    assert said("", tmp_path, RANK="3") == []
    assert len(said("", tmp_path, RANK="0")) >= 5


def test_what_lasts_is_said_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The innermost of what is being done, until all is done."""
    monkeypatch.setattr(phases, "EVERY_S", 0.02)
    caplog.set_level(logging.INFO, "remat")
    with doing("capturing"), Phases(lambda _: None) as inside:
        inside.begin("planning")
        while "still planning, for 0 s so far" not in caplog.text:
            time.sleep(0.01)
    count = caplog.text.count("still")
    time.sleep(0.1)
    assert caplog.text.count("still") <= count + 1
    assert "planning took" in caplog.text


def test_what_to_do_stands_below_an_error() -> None:
    error = RanksDiffer("rank 1 trains another graph")
    assert "".join(traceback.format_exception_only(error)).rstrip().endswith(RanksDiffer.remedy)
    assert str(NotAllowed("no key", status=401)) == "no key"


def test_a_refusal_at_the_command_line_ends_with_what_to_do(remat: Any) -> None:
    """In one line."""
    refused = Said(401, {"title": "unauthorized", "detail": "an API key is needed"})
    with lying(in_turn(refused)) as server:
        ran = remat("attach", "ab" * 16, "--base-url", server.url)
    assert len(ran.err.splitlines()) == 1
    assert "an API key is needed" in ran.err
    assert "the client reads it from `REMAT_API_KEY`" in ran.err


def test_a_better_plan_is_told_by_what_it_saves(caplog: pytest.LogCaptureFixture) -> None:
    """In a share of plain training's time and in time of each step."""
    caplog.set_level(logging.INFO, "remat")
    graph = graph_of([2_000_000, 1_000_000], [4, 8], [[], [0]])
    problem = Problem(graph, 12)
    before = Answer.of_plan(problem, plan_of(graph, [0, 0, 1]), method="greedy")
    tell_of_better(Answer.of_plan(problem, plain_plan(graph), method="greedy"), before)
    assert "+0.0 % time in place of +66.7 %, 2 ms less in each step" in caplog.text
