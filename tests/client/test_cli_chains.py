"""Chains and joins on the command line: what is refused, what is infeasible, and methods by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client.commands import remat as remat  # a fixture
from remat_ir import Answer, Chain, Join, Problem, Subject, budget_at, graph_of, verify

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


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(subject: Subject, **change: Any) -> Path:
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(subject.to_json() | change))
        return path

    return write


@pytest.mark.parametrize(
    ("subject", "change", "says"),
    [
        (CHAIN, {"forward_ns": [1, 2]}, "backward_ns has 6 entries where there are 2 stages"),
        (JOIN, {"lengths": [4, -1]}, "branch 1: length must not be negative"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    subject: Subject, change: dict[str, Any], says: str, remat: Any, written: Any
) -> None:
    ran = remat("solve", written(subject, **change), "-b", 80, "--local")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert says in ran.err


@pytest.mark.parametrize(("subject", "budget"), [(CHAIN, 60), (JOIN, 4)])
def test_a_budget_under_the_least_is_infeasible_with_the_least(
    subject: Subject, budget: int, remat: Any, written: Any
) -> None:
    ran = remat("solve", written(subject), "-b", budget, "--local", "--json")
    assert ran.code == 3
    answer = Answer.from_json(ran.data)
    assert answer.status.value == "infeasible"
    assert answer.least_budget_bytes is not None
    assert answer.least_budget_bound_bytes is not None
    assert budget < answer.least_budget_bound_bytes <= answer.least_budget_bytes
    again = remat("solve", written(subject), "-b", answer.least_budget_bytes, "-t", 3, "--local", "--json")
    assert again.code == 0


@pytest.mark.parametrize(("subject", "method"), [(CHAIN, "rotor"), (JOIN, "join"), (JOIN, "auto")])
def test_a_method_is_reached_by_its_name(subject: Subject, method: str, remat: Any, written: Any) -> None:
    budget = budget_at(subject, 0.9) if isinstance(subject, Chain) else 8
    ran = remat("solve", written(subject), "-b", budget, "-m", method, "-t", 5, "--local", "--json")
    assert ran.code == 0, ran.err
    answer = Answer.from_json(ran.data)
    assert answer.method == method
    assert answer.plan is not None
    verify(Problem(subject, budget), answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)


def test_a_link_for_a_graph(remat: Any, tmp_path: Path) -> None:
    """Planned with transfers, verified with the link, refused without it."""
    reads = [[], [0], *([i] for i in range(1, 10)), [0, 10]]
    graph = graph_of([100] * 12, [200, *[10] * 5, 200, *[10] * 5], reads)
    file, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    file.write_text(json.dumps(graph.to_json()))
    given = ("--budget", 230, "--link", "1GB")
    ran = remat("solve", file, *given, "--local", "-t", 30, "-q", "-o", plan)
    assert ran.code == 0, ran.err
    assert '"offload"' in plan.read_text()
    assert "valid: cost" in remat("verify", file, plan, *given).out
    assert "offload needs a link to the host" in remat("verify", file, plan, "--budget", 230).err
    assert "'slow' is no link" in remat("solve", file, "--budget", 230, "--link", "slow").err
