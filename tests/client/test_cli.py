"""The command line: what it prints, where, and with which exit code; every bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import highspy
import networkx as nx
import pytest
import torch
from benchmarks.graphs.instances import instance

from client.commands import remat as remat  # a fixture
from client.commands import written
from client.liar import Asked, Said, in_turn, lying
from drawn import layered
from remat import settings
from remat.cli.app import BAD_INPUT, INFEASIBLE, INTERRUPTED, NOTHING_FOUND, ORDER, SERVICE, app
from remat.cli.show import percent
from remat.planning.greedy import greedy_answer
from remat_ir import (
    Answer,
    Chain,
    Graph,
    Join,
    Plan,
    Problem,
    Subject,
    budget_at,
    graph_of,
    plain_peak,
    plain_plan,
    to_node_link,
    verify,
)
from remat_solver.exchange import from_networkx
from service.serving import Service, serving


def chain_graph(layers: int = 8, **more: Any) -> Graph:
    return graph_of(
        [3] * 2 * layers, [2] * 2 * layers, layered(layers, read_inputs=False), backward_from=layers, **more
    )


CHAIN = Chain(
    forward_ns=(40, 50, 30, 60, 20, 10),
    backward_ns=(80, 90, 70, 120, 40, 20),
    forward_workspace_bytes=(0, 2, 0, 1, 0, 0),
    backward_workspace_bytes=(3, 0, 0, 2, 0, 0),
    tape_bytes=(20, 30, 25, 20, 15, 1),
    activation_bytes=(8, 10, 12, 9, 10, 8, 1),
    gradient_bytes=(0, 10, 12, 9, 10, 8, 1),
    link_bytes_per_s=400_000_000,
)
JOIN = Join(lengths=(4, 6), forward_ns=3, backward_ns=5, turn_ns=2, slots=8)
GRAPH = graph_of(
    [3, 1, 4, 1, 5, 9, 2, 6],
    [9, 7, 9, 3, 2, 3, 2, 4],
    [[], [0], [1], [2], [2, 3], [1, 4], [0, 5], [6]],
    backward_from=4,
    op_names=tuple("abcdefgh"),
)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    return written(tmp_path / "graph.json", chain_graph().to_json())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "step.json", GRAPH.to_json(names=True))


def test_solve_prints_an_answer_that_verify_holds_to_its_claims(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    """The answer object, and nothing else."""
    ran = remat("solve", graph_file, "--budget", "14B", "--json")
    assert ran.code == 0
    answer = Answer.from_json(ran.data)
    problem = Problem(chain_graph(), 14)
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    named = {"status", "method", "cost_ns", "bound_ns", "overhead", "gap", "peak_bytes", "budget_bytes", "seconds"}
    named |= {"id", "limit", "restricted_to", "least_budget_bytes", "least_budget_bound_bytes", "digest", "cache"}
    assert named | {"plan"} <= set(ran.data)
    said = written(tmp_path / "answer.json", ran.data)
    assert remat("verify", graph_file, said, "-b", 14).code == 0
    written(said, {**ran.data, "cost_ns": ran.data["cost_ns"] - 1})
    held = remat("verify", graph_file, said, "-b", 14)
    assert held.code == 2
    assert "claimed cost" in held.err


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


def test_a_pipe_and_a_link_are_written_and_stay_what_they_are(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    """A rename would put a file in the place of `/dev/null` too, where the user may write there."""
    pipe, link, plan = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "plan.json"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert remat("solve", graph_file, "-f", "0.6", "-q", "-o", pipe).code == 0
        assert pipe.is_fifo()
        Plan.from_json(os.read(end, 2**16))
    finally:
        os.close(end)
    link.symlink_to(plan)
    for _ in range(2):
        assert remat("solve", graph_file, "-f", "0.6", "-q", "-o", link).code == 0
        assert link.is_symlink()
        Plan.from_json(plan.read_bytes())
        plan.write_text("")


def test_verify_names_the_first_wrong_step(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan = written(tmp_path / "plan.json", plain_plan(chain_graph()).to_json())
    ran = remat("verify", graph_file, plan, "-b", 14)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"remat: {plan}: step ")
    assert "over the budget of 14 B" in ran.err
    ran = remat("verify", graph_file, plan, "-b", 14, "--json")
    assert (ran.code, ran.data["valid"]) == (2, False)
    assert "over the budget" in ran.data["reason"]


def test_a_budget_too_small_is_an_answer_that_verify_checks(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    ran = remat("solve", graph_file, "-b", 3, "-o", plan, "--json")
    least = ran.data["least_budget_bound_bytes"]
    assert (ran.code, ran.data["status"]) == (3, "infeasible")
    assert least > 3
    assert not plan.exists()
    assert "infeasible" in remat("solve", graph_file, "-b", 3).out
    answer = written(tmp_path / "answer.json", ran.data)
    ran = remat("verify", graph_file, answer, "-b", 3)
    assert ran.code == 0
    assert ran.out.startswith("certified: no plan fits 3 B; every plan needs at least")
    assert remat("verify", graph_file, answer, "-b", 3, "--json").data["least_budget_bytes"] == least
    told = {"status": "infeasible", "method": "rumour", "budget_bytes": 14, "least_budget_bound_bytes": 99}
    ran = remat("verify", graph_file, written(answer, told), "-b", 14)
    assert ran.code == 2
    assert "claimed by rumour" in ran.err
    written(answer, told | {"status": "nothing_found"})
    assert "has no plan" in remat("verify", graph_file, answer, "-b", 14).err


def test_progress_goes_to_standard_error(remat: Any, graph_file: Path) -> None:
    ran = remat("solve", graph_file, "-b", 14)
    assert "incumbent" in ran.err
    assert "bound" in ran.err
    assert remat("solve", graph_file, "-b", 14, "-q").err == ""


STEP = graph_of([3, 3, 3, 3], [1, 2, 2, 1], [[], [0], [1], [2]]).to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"format": "remat-graph/1"', "line 1 column"),
        ("[1, 2]", "must be an object, not an array"),
        ('{"format": "other/1"}', "format must be one of remat-graph/1"),
        (json.dumps(STEP | {"op_cost_ns": [3, -1, 3, 3]}), "op 1: cost_ns must not be negative"),
        (
            json.dumps(STEP | {"op_inputs": [[], [0], [3], [2]]}),
            "op 2: reads value 3, which op 3 makes: a forward reference or a cycle",
        ),
        (json.dumps(CHAIN.to_json() | {"forward_ns": [1, 2]}), "backward_ns has 6 entries where there are 2 stages"),
        (
            json.dumps(to_node_link(GRAPH) | {"links": [{"source": 0}]}),
            "links[0]: there is no node None for its target (at /links/0/target)",
        ),
    ],
)
def test_a_file_of_no_use_is_one_line_and_exit_2(text: str, says: str, remat: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    ran = remat("solve", file, "-f", "0.5", "--json")
    ran.refused(says)
    assert ran.err.startswith(f"remat: {file}: ")


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
        (("-f", "0.5", "-t", "inf"), "--time-limit"),
        (("-f", "0.5", "-O", "noequals"), "KEY=VALUE"),
        (("-f", "0.5", "-m", "greedy", "-O", "magic=1"), "no option 'magic'"),
        (("-f", "0.5", "--frobnicate"), "--frobnicate"),
        (("-f", "half"), "--budget-fraction"),
        (("-f", "0.5", "--base-url", "nowhere"), "URL"),
        (("-f", "0.5", "-o", "/nowhere/at/all/plan.json"), "cannot be written"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(words: tuple[str, ...], says: str, remat: Any, graph_file: Path) -> None:
    remat("solve", graph_file, "-q", *words).refused(says)


def test_a_refusal_has_its_traceback_where_one_is_asked_for(remat: Any, graph_file: Path) -> None:
    """The line comes last, as it comes alone without."""
    line = remat("solve", graph_file, "-b", "much").err
    ran = remat("-v", "solve", graph_file, "-b", "much")
    assert (ran.code, ran.out) == (BAD_INPUT, "")
    assert ran.err.startswith("Traceback (most recent call last):")
    assert ran.err.endswith(f"\n{line}")


def test_files_that_are_not_there(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    for words in (("solve", "no.json", "-f", "0.5"), ("verify", graph_file, "no.json", "-b", 9), ("show", tmp_path)):
        remat(*words).refused("cannot be read")
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
    file, plan = written(tmp_path / "named.json", graph.to_json(names=True)), tmp_path / "plan.json"
    remat("solve", file, "-b", 19, "-o", plan)
    ran = remat("explain", file, plan)
    assert ran.code == 0
    assert "layer" in ran.out
    assert "computed again" in ran.out
    data = remat("explain", file, plan, "--json").data
    assert sum(size for _, size in data["resident"]) == data["peak_bytes"] <= 19
    assert data["recomputed"]
    assert "--top" in remat("explain", file, plan, "--top", -1).err


def test_names_with_brackets_are_printed_as_they_are(remat: Any, tmp_path: Path) -> None:
    """As graphs of others have them: rich takes some for styles, and refuses one that closes none."""
    names = ("conv[relu]", "pool[/relu]", ":cat:", *(f"op{i}" for i in range(13)))
    file = written(tmp_path / "named.json", chain_graph(op_names=names).to_json(names=True))
    ran = remat("explain", file, "-n", 16)
    assert ran.code == 0, ran.err
    for name in names[:3]:
        assert name in ran.out


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
        ran.refused("cannot be drawn: its name must end in one of .")
        assert ran.err.startswith("remat: curve.docx cannot"), "nothing had been solved by then"


@pytest.mark.parametrize("words", [("max-batch", "FILE", "-b", 40), ("attach", "a" * 32), ("cancel", "a" * 32)])
def test_a_plan_that_could_not_be_written_is_not_asked_for(
    words: tuple[Any, ...], remat: Any, graph_file: Path
) -> None:
    """Neither is half an hour spent on it, nor a solve ended."""
    with lying(in_turn(Said(500))) as server:
        words = tuple(graph_file if word == "FILE" else word for word in words)
        remat(*words, "--base-url", server.url, "-o", "/nowhere/plan.json").refused("there is no folder /nowhere")
    assert server.asked == []


def test_what_is_never_printed_has_no_file_called_minus(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    for words in (("sweep", graph_file, "--csv", "-"), ("plan", "gpt2", "-b", "50%", "-d", "h100", "-o", "-")):
        remat(*words, "--local").refused("give its name in place of -")
    assert not (tmp_path / "-").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_takes_no_file_is_refused_before_the_work(remat: Any, graph_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    with lying(in_turn(Said(500))) as server:
        ran = remat("solve", graph_file, "-f", "0.5", "--base-url", server.url, "-o", folder / "plan.json")
    ran.refused(f"the folder {folder} is not to be written to")
    assert server.asked == []


def test_max_batch_holds_within_its_bound(remat: Any, graph_file: Path) -> None:
    ran = remat("max-batch", graph_file, "-b", 40, "-m", "greedy", "--json", "-t", "2", "--total", "20")
    assert ran.code == 0
    assert 2 <= ran.data["batch"] <= ran.data["bound"]


def test_a_search_for_the_largest_batch_has_an_end(remat: Any, graph_file: Path) -> None:
    """By a time that is one, and without a plan in it no batch is said to train."""
    for total in ("nan", "inf", "0", "-1"):
        remat("max-batch", graph_file, "-b", 40, "--local", "--total", total).refused("--total must be a")
    ran = remat("max-batch", graph_file, "-b", 40, "--local", "-m", "milp", "--total", 1e-9, "-q")
    assert ran.code == NOTHING_FOUND
    assert ran.out.startswith("no batch was found in time that trains within 40 at the cost of one more forward pass, ")


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
    graph = instance("gpt-2-whole")
    file = written(tmp_path / "graph.json", graph.to_json())
    command = [sys.executable, "-m", "remat", "solve", "-", "-b", str(budget_at(graph, 0.9)), "--local", "--json"]
    with file.open() as stdin:
        ran = subprocess.run([*command, "-m", "greedy"], stdin=stdin, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert Answer.from_json(ran.stdout).plan is not None
    bare = subprocess.run(command[:3], capture_output=True, text=True)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert "Commands" in bare.stdout


def test_output_that_cannot_be_written_is_one_line_and_exit_2(graph_file: Path) -> None:
    """Of a few bytes, which are written when the command ends, and nothing is said where nobody reads on."""
    command = [sys.executable, "-m", "remat", "show", str(graph_file), "--json"]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "remat: the output cannot be written: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (BAD_INPUT, said)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


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


@pytest.mark.parametrize(("subject", "budget"), [(CHAIN, 60), (JOIN, 4)])
def test_a_budget_under_the_least_is_infeasible_with_the_least(
    subject: Subject, budget: int, remat: Any, tmp_path: Path
) -> None:
    file = written(tmp_path / "subject.json", subject.to_json())
    ran = remat("solve", file, "-b", budget, "--local", "--json")
    assert ran.code == 3
    answer = Answer.from_json(ran.data)
    assert answer.status.value == "infeasible"
    assert budget < answer.least_budget_bound_bytes <= answer.least_budget_bytes
    again = remat("solve", file, "-b", answer.least_budget_bytes, "-t", 3, "--local", "--json")
    assert again.code == 0


@pytest.mark.parametrize(("subject", "method"), [(CHAIN, "rotor"), (JOIN, "join"), (JOIN, "auto")])
def test_a_method_is_reached_by_its_name(subject: Subject, method: str, remat: Any, tmp_path: Path) -> None:
    budget = budget_at(subject, 0.9) if isinstance(subject, Chain) else 8
    file = written(tmp_path / "subject.json", subject.to_json())
    ran = remat("solve", file, "-b", budget, "-m", method, "-t", 5, "--local", "--json")
    assert ran.code == 0, ran.err
    answer = Answer.from_json(ran.data)
    assert answer.method == method
    verify(Problem(subject, budget), answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)


def test_a_link_for_a_graph(remat: Any, tmp_path: Path) -> None:
    """Planned with transfers, verified with the link, refused without it."""
    reads = [[], [0], *([i] for i in range(1, 10)), [0, 10]]
    graph = graph_of([100] * 12, [200, *[10] * 5, 200, *[10] * 5], reads)
    file, plan = written(tmp_path / "graph.json", graph.to_json()), tmp_path / "plan.json"
    given = ("--budget", 230, "--link", "1GB")
    ran = remat("solve", file, *given, "--local", "-t", 30, "-q", "-o", plan)
    assert ran.code == 0, ran.err
    assert '"offload"' in plan.read_text()
    assert "valid: cost" in remat("verify", file, plan, *given).out
    assert "offload needs a link to the host" in remat("verify", file, plan, "--budget", 230).err
    assert "'slow' is no link" in remat("solve", file, "--budget", 230, "--link", "slow").err


@pytest.mark.parametrize("form", ["mps", "lp"])
def test_a_model_goes_out_and_its_solution_comes_back(form: str, remat: Any, file: Path, tmp_path: Path) -> None:
    model, found, plan = tmp_path / f"model.{form}", tmp_path / "found.sol", tmp_path / "plan.json"
    assert remat("export", file, "--format", form, "-b", "80%", "-o", model).code == 0
    engine = highspy.Highs()
    engine.silent()
    engine.readModel(str(model))
    engine.run()
    engine.writeSolution(str(found), 0)
    ran = remat("import-solution", file, found, "-b", "80%", "-o", plan, "--json")
    assert ran.code == 0, ran.err
    answer, problem = Answer.from_json(ran.data), Problem(GRAPH, budget_at(GRAPH, 0.8))
    solved = remat("solve", file, "-b", "80%", "-m", "milp", "-g", 0, "--json", "-q").data
    verdict = verify(problem, Plan.from_json(json.loads(plan.read_text())))
    assert verdict.cost_ns == answer.cost_ns == solved["cost_ns"] == solved["bound_ns"]
    assert "feasible" in remat("import-solution", file, found, "-b", "80%").out


def test_a_solution_of_another_budget_is_one_line(remat: Any, file: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.sol"
    found.write_text("R_0_0 1\nR_77_0 1\n")
    remat("import-solution", file, found, "-b", "80%").refused("another graph, budget, method or option")


@pytest.mark.parametrize("name", ["resnet-2", "random-10"])
def test_node_link_files_round_trip(name: str, remat: Any, tmp_path: Path) -> None:
    """Generated instances: out as node-link data, read by networkx, and back."""
    graph = instance(name)
    first, other, back = (tmp_path / f"{word}.json" for word in ("first", "other", "back"))
    written(first, graph.to_json())
    assert remat("export", first, "--format", "node-link", "-o", other).code == 0
    assert from_networkx(nx.node_link_graph(json.loads(other.read_text()), edges="links")) == graph
    assert remat("export", other, "--format", "remat-graph/1", "-o", back).code == 0
    assert Graph.from_json(back.read_text()) == graph


def test_node_link_files_are_planned_like_any_other(remat: Any, file: Path, tmp_path: Path) -> None:
    """As public instances come: names of their own for costs and sizes, ids that are strings."""
    digraph = nx.DiGraph()
    for op, (cost, size) in enumerate(zip(GRAPH.op_cost_ns, GRAPH.value_bytes, strict=True)):
        digraph.add_node(f"n{op}", cost_cpu=cost, cost_ram=size, backward=op >= 4)
    digraph.add_edges_from((f"n{v}", f"n{op}") for op, inputs in enumerate(GRAPH.op_inputs) for v in inputs)
    other, plan = tmp_path / "public.json", tmp_path / "plan.json"
    written(other, nx.node_link_data(digraph, edges="links"))
    ran = remat("solve", other, "-b", "80%", "-o", plan, "--json", "-q")
    assert ran.code == 0, ran.err
    assert ran.data["digest"] == remat("solve", file, "-b", "80%", "--json", "-q").data["digest"]
    assert remat("verify", other, plan, "-b", "80%").out.startswith("valid")


@pytest.mark.parametrize(
    ("subject", "words", "says"),
    [
        (GRAPH, ["--format", "gms", "-b", "80%"], "format of a program is one of mps, lp"),
        (GRAPH, ["--format", "mps"], "a budget is needed"),
        (GRAPH, ["--format", "lp", "-b", "80%", "-m", "auto"], "method must be one of milp"),
        (GRAPH, ["--format", "node-link", "-b", "80%"], "takes no budget"),
        (GRAPH, ["--format", "mps", "-b", "1"], "no plan fits"),
        (CHAIN, ["--format", "mps", "-b", "80%"], "takes graphs only"),
    ],
)
def test_refused_exports(subject: Subject, words: list[str], says: str, remat: Any, tmp_path: Path) -> None:
    file, out = written(tmp_path / "subject.json", subject.to_json()), tmp_path / "out"
    ran = remat("export", file, *words, "-o", out)
    assert (ran.code, ran.out) == (BAD_INPUT, "")
    assert says in ran.err
    assert not out.exists()


def test_a_linear_network_is_answered_next_to_its_persistent_optimum(remat: Any, graph_file: Path) -> None:
    """The baseline is a member of the answer, and a line of the table."""
    told = remat("solve", graph_file, "-f", "0.6", "--json", "-q").data
    rotor = remat("solve", graph_file, "-f", "0.6", "-m", "rotor", "--json", "-q").data
    assert told["chain_cost_ns"] == rotor["cost_ns"] >= told["cost_ns"]
    out = remat("solve", graph_file, "-f", "0.6", "-q").out
    line = f"persistent chain optimum {percent(rotor['overhead'])}, this plan {percent(told['overhead'])}"
    assert line in " ".join(out.split())


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
    remat(*words, ",".join(f"{n}B" for n in range(1, 66))).refused("more than the 64 allowed")


@pytest.mark.parametrize("solves", [None, [], [{"id": "a"}, {"id": "b"}], [{"id": 1}], ["a"]])
def test_a_sweep_without_a_solve_for_each_budget_is_refused(remat: Any, graph_file: Path, solves: Any) -> None:
    with lying(lambda _: Said(202, {"id": "c" * 32, "ended": False, "solves": solves})) as server:
        ran = remat("sweep", graph_file, "--budgets", "100%", "--base-url", server.url)
        assert [request.path for request in server.asked] == ["/v1/sweeps"]
    assert ran.code == SERVICE
    assert "not one solve for each budget" in ran.err


@pytest.mark.parametrize("lie", [{"solves": ["a"]}, {"solves": None}, {"batches": 6}, {"bound": "5"}, {"id": None}])
def test_a_search_that_is_none_is_refused(remat: Any, graph_file: Path, lie: dict[str, Any]) -> None:
    found = {"id": "c" * 32, "ended": True, "best_batch": None, "bound": 5, "most_cost_ns": 100, "batches": [6]}
    with lying(in_turn(Said(200, {**found, "solves": [{"id": "d" * 32}], **lie}))) as server:
        ran = remat("max-batch", graph_file, "-b", 40, "--base-url", server.url)
    assert (ran.code, ran.out) == (SERVICE, "")
    assert "largest batch is none" in ran.err


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


@pytest.mark.thorough  # half a minute each: that long the service is waited for
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


def test_doctor_says_which_gpu_cannot_be_used(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that another process has for itself."""

    def busy(_: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might …")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    ran = remat("doctor", "--json")
    row = next(row for row in ran.data if row["what"] == "cuda:0")
    assert (ran.code, row["fine"]) == (BAD_INPUT, False)
    assert row["found"] == "cannot be used: CUDA error: all CUDA-capable devices are busy or unavailable"


def test_doctor_names_the_variable_of_a_missing_key(remat: Any) -> None:
    """A service that is ready and asks for a key is not in place."""
    refused = Said(401, {"title": "unauthorized", "detail": "an API key is needed"})
    with lying(in_turn(Said(200, {}), refused)) as server:
        ran = remat("doctor", "--base-url", server.url)
    assert ran.code == 2
    assert "set REMAT_API_KEY" in " ".join(ran.out.split())
