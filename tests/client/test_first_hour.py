"""The first hour: the README's first snippet runs as it stands, and typical mistakes get one sentence each."""

from __future__ import annotations

import copy
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.models.zoo import build
from torch import nn

import remat
from client.comparing import equal, gradients
from remat.capture.call import example_call
from remat.cli.solve import budget_of
from remat.planning.plot import plot
from remat.planning.sources import GreedyPlanner
from remat.planning.summary import headline
from remat_ir import (
    Answer,
    Compute,
    Free,
    Graph,
    InvalidData,
    Plan,
    Problem,
    Progress,
    RematError,
    Status,
    graph_of,
    plain_peak,
    plain_plan,
    replay,
)

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_readmes_first_snippet_runs_as_it_stands() -> None:
    """In a process of its own, from top to bottom, nothing added before it."""
    code = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)[0]
    assert "remat.optimize" in code
    assert len(code.splitlines()) <= 10
    more = "\nassert all(p.grad is not None for p in model.parameters())"
    done = subprocess.run([sys.executable, "-c", code + more], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(
        r"[\d.]+ → [\d.]+ MiB \(−4\d %\), \+[\d.]+ % time.*; first step: peak .* % measured\n", done.stdout
    )


@pytest.mark.slow
def test_a_key_value_cache_is_left_out_of_the_planned_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A model with the default config trains; its config, and its calls without gradients, stay as they are."""
    subject = build("gpt2")
    model: Any = subject.model
    model.config.use_cache = True
    with caplog.at_level(logging.INFO, "remat"):
        trained = remat.optimize(model, subject.inputs, budget="70%", planner="greedy")
        loss = trained(**subject.inputs).loss
    loss.backward()
    assert caplog.text.count("use_cache=False") == 1
    assert model.config.use_cache
    assert len(remat.plans_of(trained).plans) == 1
    with torch.no_grad():
        assert trained(**subject.inputs).past_key_values is not None
    model.zero_grad()
    plain = remat.disable(copy.deepcopy(model))
    torch.manual_seed(0)
    plain(**(subject.inputs | {"use_cache": False})).loss.backward()
    torch.manual_seed(0)
    trained(**subject.inputs).loss.backward()
    assert equal(gradients(plain), gradients(trained))


def test_example_calls() -> None:
    """A tensor, a tuple, a list, and a mapping of keyword arguments, alone or with more of them."""
    x = torch.ones(1)
    assert example_call(x, None) == ((x,), {})
    assert example_call([x, 2], {"y": 3}) == ((x, 2), {"y": 3})
    assert example_call({"x": x}, None) == ((), {"x": x})
    assert example_call({"x": x}, {"y": 1}) == ((), {"x": x, "y": 1})
    assert example_call((), None) == ((), {})


X = torch.ones(2, 4)
GRAPH: Graph = graph_of([1, 1], [100, 50], [(), (0,)])


def trains(**more: Any) -> Callable[[], object]:
    """A call of `optimize` with something wrong in it."""
    return lambda: remat.optimize(nn.Linear(4, 4), (X,), **{"budget": "1GiB"} | more)


def enables(**more: Any) -> Callable[[], object]:
    """A call of `enable` with something wrong in it."""
    return lambda: remat.enable(nn.Linear(4, 4), **{"budget": "1GiB"} | more)


def enabled() -> nn.Module:
    """A module that trains by plans, and has none yet."""
    return remat.enable(nn.Linear(4, 4), budget="100%", planner="greedy")


def without_gradients() -> object:
    """A call under no_grad."""
    with torch.no_grad():
        return trains()()


MISTAKES: list[tuple[str, Callable[[], object], str]] = [
    ("a bare share as text", trains(budget="0.5"), "write '50%'"),
    ("a bare share", trains(budget=0.5), "write '50%'"),
    ("a bare number of gibibytes", trains(budget=1.5), "write '1.5GiB'"),
    ("the same as text", trains(budget="1.5"), "write '1.5GiB'"),
    ("more than all", trains(budget="150%"), "at most 100%"),
    ("a misspelt unit", trains(budget="12 GiBs"), "'12GiB'"),
    ("no number", trains(budget="many"), "'12GiB'"),
    ("a float in text", trains(budget="1e9"), "'12GiB'"),
    ("nothing", trains(budget=""), "'12GiB'"),
    ("no budget", trains(budget=None), "'50%'"),
    ("a flag", trains(budget=True), "'50%'"),
    ("a list", trains(budget=[1]), "'50%'"),
    ("negative", trains(budget=-1), "negative"),
    ("a percentage as a fraction", lambda: remat.Fraction(50), "from 0 to 1"),
    ("a fraction in words", lambda: remat.Fraction("half"), "a number"),
    ("a share of activations", lambda: remat.ActivationBytes("50%"), "'12GiB'"),
    ("a bare share of a checkpoint", lambda: remat.checkpoint_contexts(nn.Linear(4, 4), X, held=0.5), "'50%'"),
    ("a percentage in -f", lambda: budget_of(GRAPH, None, 50.0), "write --budget 50%"),
    ("a bare share in --budget", lambda: budget_of(GRAPH, "0.5", None), "write '50%'"),
    ("both options", lambda: budget_of(GRAPH, "1GiB", 0.5), "exclude each other"),
    ("neither option", lambda: budget_of(GRAPH, None, None), "--budget 4GiB"),
    ("an unknown way to fail", enables(on_failure="ignore"), "'raise', 'plain'"),
    ("an unknown mode", trains(mode="eager"), "'auto', 'graph', 'chain'"),
    ("an unknown method", trains(method="fastest", planner="local"), "there are: auto, "),
    ("an unknown method of enable", enables(method="fastest", planner="local"), "there are: auto, "),
    ("a method of its own for torch.compile", lambda: remat.backend("1GiB", method="x", planner="local"), "there are:"),
    ("a word for a flag", trains(wait="no"), "True or False"),
    ("options as a dict", trains(options={"time_limit_s": 5}), "remat.SolveOptions"),
    ("an unknown planner", trains(planner="lokal"), "'local' or 'greedy'"),
    ("another protocol", trains(planner="ftp://host"), "http://"),
    ("no planner", trains(planner=object()), "method `plan`"),
    ("a class in place of a planner", trains(planner=GreedyPlanner), "method `plan`"),
    ("a number as the example", lambda: remat.optimize(nn.Linear(4, 4), 3, budget="1GiB"), "optimize(model, (x,)"),
    ("keywords in a list", lambda: remat.optimize(nn.Linear(4, 4), (X,), [X], budget="1GiB"), "a dict"),
    ("an argument twice", lambda: remat.optimize(nn.Linear(4, 4), {"x": X}, {"x": X}, budget="1GiB"), "twice"),
    ("a class in place of a module", lambda: remat.optimize(nn.Linear, (X,), budget="1GiB"), "write Linear(…)"),
    ("a function", lambda: remat.enable(len, budget="1GiB"), "torch.nn.Module"),
    ("gradients off", without_gradients, "outside of torch.no_grad()"),
    ("nothing to explain", lambda: remat.explain(nn.Linear(4, 4)), "a budget"),
    ("enabled, and no step yet", lambda: remat.explain(enabled()), "remat.explain(model, x)"),
    ("enabled, and another budget", lambda: remat.explain(enabled(), X, budget="50%"), "remat.disable"),
    ("a module for make_model", lambda: remat.max_batch(nn.Linear(4, 4), X.repeat, budget="1GiB"), "lambda: model"),
]


@pytest.mark.parametrize(("make", "says"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_gets_one_sentence(make: Callable[[], object], says: str) -> None:
    """Before anything is captured or asked for; in one line that says what to write."""
    with pytest.raises(RematError) as caught:
        make()
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.slow
def test_the_notebook_runs_and_its_last_expressions_can_be_shown(tmp_path: Path) -> None:
    """Cell by cell in one process; what a cell ends with has a representation that a notebook shows."""
    cells = json.loads((README.parent / "examples" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    runner = (
        "import ast, json, sys\n"
        "space, shown = {}, []\n"
        "for source in json.load(sys.stdin):\n"
        "    tree = ast.parse(source)\n"
        "    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None\n"
        "    exec(compile(tree, 'cell', 'exec'), space)\n"
        "    if last is not None:\n"
        "        shown.append(eval(compile(ast.Expression(last.value), 'cell', 'eval'), space))\n"
        "explained, figure, answer, own = shown\n"
        "print(json.dumps([explained._repr_html_(), answer._repr_html_(), len(figure.axes) + len(own.axes)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", runner], input=json.dumps(code), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *losses, shown = done.stdout.splitlines()
    assert float(losses[2]) < float(losses[0])
    explained, answer, axes = json.loads(shown)
    assert explained.count("<polyline") == 2
    assert "% time" in explained
    assert "<th>cost_ns</th>" in answer
    assert axes == 2


def test_an_enabled_module_is_explained_and_not_planned_twice() -> None:
    model = enabled()
    assert "where the bytes go" in remat.explain(model, X)
    model(X).sum().backward()
    assert len(remat.explain(model).plans) == 1
    with pytest.raises(RuntimeError, match=r"call remat\.disable first"):
        remat.optimize(model, X, budget="100%", planner="greedy")


def test_the_picture_of_an_answer_has_the_curves_of_both_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory over time, the budget, where the backward pass begins, and when ops run again."""
    graph = replace(graph_of([1, 2, 3, 4], [2**20] * 4, [[], [0], [1], [0, 2]]), backward_from=2)
    steps = (Compute(0), Compute(1), Free(0), Compute(2), Free(1), Compute(0), Compute(3))
    problem, plan = Problem(graph, 3 * 2**20), Plan(steps)
    answer = Answer.of_plan(problem, plan, method="greedy")
    (axes,) = plot(problem, answer).axes
    plain, planned = axes.patches
    for stairs, subject_plan in ((plain, plain_plan(graph)), (planned, plan)):
        levels, edges, _ = stairs.get_data()
        moments = [m for m in replay(graph, subject_plan) if m.op is not None]
        assert [round(level * 2**20) for level in levels] == [m.peak_bytes for m in moments]
        assert [round(edge * 1e6) for edge in edges] == [0, *(m.cost_ns for m in moments)]
    budget, boundary = axes.lines
    assert list(budget.get_ydata()) == [3, 3]
    assert list(boundary.get_xdata()) == [3e-6, 3e-6]
    (again,) = axes.collections
    (span,) = again.get_paths()
    assert sorted({round(x * 1e6) for x in span.vertices[:, 0]}) == [6, 7], "op 0 runs again from 6 to 7 ns"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        "without a plan", "plan", "budget", "backward pass begins", "run again",
    }  # fmt: skip
    with pytest.raises(InvalidData, match="the answer has no plan"):
        plot(problem, replace(answer, plan=None))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidData, match=r"pip install '\.\[plot\]'"):
        plot(problem, answer)


def test_a_line_of_progress_has_no_plan_in_it() -> None:
    """What `on_progress=print` prints."""
    plan = plain_plan(GRAPH)
    assert str(Progress(1.25, 2_000_000, 1_900_000, "search", plan)) == (
        "1.2 s: cost 2 ms, at least 1.9 ms, gap 5 % (search)"
    )
    assert str(Progress(0.5, None, None, "staged")) == "0.5 s: no plan yet"


def test_the_headline_of_a_plan() -> None:
    """Sizes in one unit, what is saved, what it costs, what is proved, and the seconds."""
    graph = graph_of([1000, 1000, 1000, 2000], [2**20, 2**20, 2**18, 2**18], [[], [0], [1], [2, 0]])
    plain = plain_peak(graph)
    answer = Answer(Status.FEASIBLE, "auto", plain, seconds=1.0).priced(5000, 5500, 5000, plain // 2)
    assert (
        headline(graph, answer, seconds=8.4)
        == "2.2 → 1.1 MiB (−50 %), +10.0 % time, within 9.1 % of optimal (certified), 8 s"
    )
    proved = replace(answer.priced(5000, 5000, 5000, plain), restricted_to=("persistent",))
    assert headline(graph, proved).endswith("optimal among plans restricted to persistent (certified), 1 s")
    claimed = replace(proved, claimed_bound_ns=5000, claimed_by="milp")
    assert headline(graph, claimed, url="http://host/#/solve/1").endswith(
        "optimal among plans restricted to persistent (claimed by milp), 1 s; http://host/#/solve/1"
    )
    assert headline(graph, Answer(Status.INFEASIBLE, "auto", 1)) == "no plan: infeasible, 0 s"


def test_each_phase_of_the_way_to_the_first_step_has_its_line_with_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "remat"):
        remat.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8), budget="100%", planner="greedy")
    lines = [record.getMessage() for record in caplog.records if " took " in record.getMessage()]
    assert [line.split()[0] for line in lines] == ["profiling", "planning", "compiling"]
    assert all(re.fullmatch(r"\w+ took \d+\.\d s", line) for line in lines)
