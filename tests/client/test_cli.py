"""The command line: what it prints, where, and with which exit code; every bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.graphs.instances import instance

from client.commands import remat as remat  # a fixture
from client.liar import Said, in_turn, lying
from drawn import layered
from remat import settings
from remat.cli.app import BAD_INPUT, INFEASIBLE, INTERRUPTED, NOTHING_FOUND, ORDER, SERVICE, app
from remat.planning.greedy import greedy_answer
from remat_ir import Answer, Graph, Plan, Problem, budget_at, graph_of, plain_peak, plain_plan, verify


def chain_graph(layers: int = 8, **more: Any) -> Graph:
    return graph_of(
        [3] * 2 * layers, [2] * 2 * layers, layered(layers, read_inputs=False), backward_from=layers, **more
    )


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(chain_graph().to_json()))
    return path


def test_solve_prints_the_answer_object_and_nothing_else(remat: Any, graph_file: Path) -> None:
    ran = remat("solve", graph_file, "--budget", 14, "--json")
    assert ran.code == 0
    answer = Answer.from_json(ran.data)
    problem = Problem(chain_graph(), 14)
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    named = {"status", "method", "cost_ns", "bound_ns", "overhead", "gap", "peak_bytes", "budget_bytes", "seconds"}
    named |= {
        "id",
        "limit",
        "restricted_to",
        "least_budget_bytes",
        "least_budget_bound_bytes",
        "digest",
        "cache",
        "plan",
    }
    assert named <= set(ran.data)


def test_solve_writes_a_plan_that_verify_takes(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert remat("solve", graph_file, "-f", "0.6", "-o", plan).code == 0
    Plan.from_json(plan.read_bytes())
    ran = remat("verify", graph_file, plan, "-f", "0.6")
    assert ran.code == 0
    assert ran.out.startswith("valid: cost ")
    ran = remat("verify", graph_file, plan, "-f", "0.6", "--json")
    assert ran.data["valid"] is True
    assert ran.data["peak_bytes"] <= ran.data["budget_bytes"]


def test_verify_takes_an_answer_and_holds_it_to_its_claims(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    said = remat("solve", graph_file, "-b", "14B", "--json").data
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(said))
    assert remat("verify", graph_file, file, "-b", 14).code == 0
    file.write_text(json.dumps({**said, "cost_ns": said["cost_ns"] - 1}))
    ran = remat("verify", graph_file, file, "-b", 14)
    assert ran.code == 2
    assert "claimed cost" in ran.err


def test_verify_names_the_first_wrong_step(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plain_plan(chain_graph()).to_json()))
    ran = remat("verify", graph_file, plan, "-b", 14)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"remat: {plan}: step ")
    assert "over the budget of 14 B" in ran.err
    ran = remat("verify", graph_file, plan, "-b", 14, "--json")
    assert (ran.code, ran.data["valid"]) == (2, False)
    assert "over the budget" in ran.data["reason"]


def test_a_budget_too_small_is_an_answer(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    ran = remat("solve", graph_file, "-b", 3, "-o", plan, "--json")
    assert ran.code == 3
    assert ran.data["status"] == "infeasible"
    assert ran.data["least_budget_bound_bytes"] > 3
    assert not plan.exists()
    assert "infeasible" in remat("solve", graph_file, "-b", 3).out


def test_verify_checks_that_no_plan_fits(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(remat("solve", graph_file, "-b", 3, "--json").out)
    least = json.loads(answer.read_text())["least_budget_bound_bytes"]
    ran = remat("verify", graph_file, answer, "-b", 3)
    assert ran.code == 0
    assert ran.out.startswith("certified: no plan fits 3 B; every plan needs at least")
    assert remat("verify", graph_file, answer, "-b", 3, "--json").data["least_budget_bytes"] == least
    told = {"status": "infeasible", "method": "rumour", "budget_bytes": 14, "least_budget_bound_bytes": 99}
    answer.write_text(json.dumps(told))
    ran = remat("verify", graph_file, answer, "-b", 14)
    assert ran.code == 2
    assert "claimed by rumour" in ran.err
    answer.write_text(json.dumps(told | {"status": "nothing_found"}))
    assert "has no plan" in remat("verify", graph_file, answer, "-b", 14).err


def test_progress_goes_to_standard_error(remat: Any, graph_file: Path) -> None:
    ran = remat("solve", graph_file, "-b", 14)
    assert "incumbent" in ran.err
    assert "bound" in ran.err
    assert remat("solve", graph_file, "-b", 14, "-q").err == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"format": "remat-graph/1"', "line 1 column"),
        ("[1, 2]", "must be an object, not an array"),
        ('{"format": "other/1"}', "format must be one of remat-graph/1"),
        ('{"op_cost_ns": [1]}', "format must be one of"),
        ('{"format": "remat-graph/1", "op_cost_ns": [NaN]}', "NaN"),
        ("\x00\x01", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_no_use_is_one_line_and_exit_2(text: str, says: str, remat: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    ran = remat("solve", file, "-f", "0.5", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"remat: {file}: ")
    assert says in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op_cost_ns": [3, -1, 3, 3]}, "op 1: cost_ns must not be negative"),
        ({"op_inputs": [[], [0], [3], [2]]}, "op 2: reads value 3, which op 3 makes: a forward reference or a cycle"),
    ],
)
def test_a_bad_graph_is_named_by_its_index(change: dict[str, Any], says: str, remat: Any, tmp_path: Path) -> None:
    graph = graph_of([3, 3, 3, 3], [1, 2, 2, 1], [[], [0], [1], [2]]).to_json()
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({**graph, **change}))
    ran = remat("solve", file, "-f", "0.5")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert says in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "a budget is needed"),
        (("-b", "12", "-f", "0.5"), "exclude each other"),
        (("-b", "much"), "'much'"),
        (("-b", "-5"), "-5"),
        (("-f", "-0.5"), "fraction"),
        (("-f", "nan"), "finite"),
        (("-f", "0.5", "-m", "magic"), "unknown method 'magic'"),
        (("-f", "0.5", "-t", "0"), "--time-limit"),
        (("-f", "0.5", "-t", "inf"), "--time-limit"),
        (("-f", "0.5", "-g", "1.5"), "--max-gap"),
        (("-f", "0.5", "-O", "noequals"), "KEY=VALUE"),
        (("-f", "0.5", "-m", "greedy", "-O", "magic=1"), "no option 'magic'"),
        (("-f", "0.5", "--frobnicate"), "--frobnicate"),
        (("-f", "half"), "--budget-fraction"),
        (("-f", "0.5", "--base-url", "nowhere"), "URL"),
        (("-f", "0.5", "-o", "/nowhere/at/all/plan.json"), "cannot be written"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(words: tuple[str, ...], says: str, remat: Any, graph_file: Path) -> None:
    ran = remat("solve", graph_file, "-q", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert says in ran.err


def test_files_that_are_not_there(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    for words in (("solve", "no.json", "-f", "0.5"), ("verify", graph_file, "no.json", "-b", 9), ("show", tmp_path)):
        ran = remat(*words)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "cannot be read" in ran.err
    assert remat("solve").code == 2
    assert remat("frobnicate", graph_file).code == 2


def test_a_service_that_is_away_is_exit_5(remat: Any, graph_file: Path) -> None:
    with lying(in_turn(Said(200))) as server:
        pass
    ran = remat("solve", graph_file, "-f", "0.5", "-t", "0.5", "--base-url", server.url)
    assert (ran.code, ran.out) == (5, "")
    assert "could not be reached" in ran.err


def test_a_service_that_lies_is_exit_5_and_its_plan_is_not_printed(remat: Any, graph_file: Path) -> None:
    problem = Problem(chain_graph(), 14)
    lie = {**greedy_answer(problem).to_json(), "plan": plain_plan(problem.graph).to_json(), "status": "optimal"}
    with lying(in_turn(Said(200, lie))) as server:
        ran = remat("solve", graph_file, "-b", 14, "--base-url", server.url, "--json")
    assert (ran.code, ran.out) == (5, "")


def test_what_the_service_refuses_is_exit_2(remat: Any, graph_file: Path) -> None:
    with lying(in_turn(Said(422, {"detail": "unknown method 'x'"}, {"X-Request-ID": "r-1"}))) as server:
        ran = remat("solve", graph_file, "-f", "0.5", "-m", "x", "--base-url", server.url)
    assert ran.code == 2
    assert "unknown method 'x' (request r-1)" in ran.err


def test_show_draws_and_tells(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "memory.png"
    remat("solve", graph_file, "-b", 14, "-o", plan)
    ran = remat("show", graph_file, plan, "-b", 14, "--png", picture)
    assert ran.code == 0
    assert "█" in ran.out
    assert "peak 14 B, plain 18 B" in ran.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = remat("show", graph_file, plan, "-b", 14, "--json").data
    assert data["peak_bytes"] == max(data["memory_bytes"]) <= 14
    assert data["plain_peak_bytes"] == plain_peak(chain_graph())
    assert remat("show", graph_file, "--png", "/nowhere/x.png").code == 2


def test_explain_names_what_is_resident_and_what_runs_again(remat: Any, tmp_path: Path) -> None:
    graph = chain_graph(op_names=tuple(f"layer{i}" for i in range(16)), fixed_bytes=5)
    file, plan = tmp_path / "named.json", tmp_path / "plan.json"
    file.write_text(json.dumps(graph.to_json(names=True)))
    remat("solve", file, "-b", 19, "-o", plan)
    ran = remat("explain", file, plan)
    assert ran.code == 0
    assert "layer" in ran.out
    assert "computed again" in ran.out
    data = remat("explain", file, plan, "--json").data
    assert sum(size for _, size in data["resident"]) == data["peak_bytes"] <= 19
    assert data["recomputed"]


def test_sweep_gives_the_curve(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    table, picture = tmp_path / "curve.csv", tmp_path / "curve.png"
    words = ("sweep", graph_file, "--budgets", "20%, 60%,80%,100%", "-t", "5", "-m", "greedy")
    ran = remat(*words, "--csv", table, "--png", picture)
    assert ran.code == 0
    assert "infeasible" in ran.out
    assert len(table.read_text().splitlines()) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")
    answers = remat(*words, "--json").data["answers"]
    assert [answer["status"] for answer in answers] == ["infeasible", "feasible", "feasible", "optimal"]
    costs = [answer["cost_ns"] for answer in answers[1:]]
    assert costs == sorted(costs, reverse=True)
    assert remat("sweep", graph_file, "--budgets", "x").code == 2
    assert remat("sweep", graph_file, "--budgets", ",").code == 2
    assert remat("sweep", graph_file, "-n", "1").code == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(remat: Any, graph_file: Path) -> None:
    for words in (("sweep", graph_file), ("show", graph_file)):
        ran = remat(*words, "--png", "curve.docx")
        assert ran.code == BAD_INPUT
        assert ran.out == ""
        assert ran.err.startswith("remat: curve.docx cannot be drawn: its name must end in one of ."), ran.err
        assert ran.err.count("\n") == 1, "nothing had been solved by then"


def test_max_batch_holds_within_its_bound(remat: Any, graph_file: Path) -> None:
    ran = remat("max-batch", graph_file, "-b", 40, "-m", "greedy", "--json", "-t", "2", "--total", "20")
    assert ran.code == 0
    assert 2 <= ran.data["batch"] <= ran.data["bound"]


def test_the_commands_are_listed_in_order(remat: Any) -> None:
    out = remat("--help").out
    found = [re.search(rf"^\W*{name}\s", out, re.MULTILINE) for name in ORDER]
    places = [at.start() for at in found if at is not None]
    assert len(places) == len(ORDER)
    assert places == sorted(places)
    assert len(app.registered_commands) == len(ORDER)
    assert remat("--version").out.startswith("remat ")


@pytest.mark.thorough
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_there(shell: str) -> None:
    # which shell it is, is looked up among the processes above: there may be none in a test
    told = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [sys.executable, "-m", "remat", "--show-completion", shell]
    script = subprocess.run(words, capture_output=True, text=True, timeout=60, env=told, check=False)
    assert script.returncode == 0, script.stderr
    assert "complete" in script.stdout


def test_as_a_process(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    graph = instance("gpt-2-whole")
    file.write_text(json.dumps(graph.to_json()))
    command = [sys.executable, "-m", "remat", "solve", "-", "-b", str(budget_at(graph, 0.9)), "--local", "--json"]
    with file.open() as stdin:
        ran = subprocess.run([*command, "-m", "greedy"], stdin=stdin, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert Answer.from_json(ran.stdout).plan is not None
    bare = subprocess.run(command[:3], capture_output=True, text=True)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert "Commands" in bare.stdout


def test_the_page_lists_every_command_setting_and_exit_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name in ORDER:
        assert f"`remat {name}" in page
    names = re.findall(r"^REMAT_\w+", settings.__doc__ or "", re.MULTILINE)
    assert len(names) >= 7
    for name in names:
        assert f"`{name}`" in page
    for code in (0, BAD_INPUT, INFEASIBLE, NOTHING_FOUND, SERVICE, INTERRUPTED):
        assert f"| {code} |" in page


@pytest.mark.thorough
def test_kernels_are_compiled_ahead() -> None:
    """The command says where they are; there is nothing left to do after it."""
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-m", "remat", "warm"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert re.match(r"(\d+) of \1 kernels are compiled in ", ran.stdout)
    assert "compiling" not in ran.stderr
