"""Model files that other engines read, and the solutions that they return, as plans."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import highspy
import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat_ir import Graph, InvalidData, Problem, Status, budget_at, graph_of, verify
from remat_solver import solve
from remat_solver.external import METHODS, export_model, import_solution
from remat_solver.interchange import FORMATS, read_solution
from solver.brute import ONE_PER_STAGE, optimum
from solver.programs import brute_optimum, random_program
from tiers import first

GRAPH = graph_of(
    [3, 1, 4, 1, 5, 9, 2, 6],
    [9, 7, 9, 3, 2, 3, 2, 4],
    [[], [0], [1], [2], [2, 3], [1, 4], [0, 5], [6]],
    backward_from=4,
    fixed_bytes=5,
)
PROBLEM = Problem(GRAPH, budget_at(GRAPH, 0.8))


def highs_solution(model: str, form: str, folder: Path) -> tuple[str, float]:
    """What HiGHS writes after it has read and solved a model file, and its optimum."""
    path = folder / f"model.{form}"
    path.write_text(model)
    engine = highspy.Highs()
    engine.silent()
    assert engine.readModel(str(path)) == highspy.HighsStatus.kOk
    engine.run()
    engine.writeSolution(str(folder / "found.sol"), 0)
    return (folder / "found.sol").read_text(), engine.getInfo().objective_function_value


def cbc_solution(model: str, form: str, folder: Path) -> str:
    """What CBC writes after it has read and solved a model file; it leaves zeros out."""
    path = folder / f"model.{form}"
    path.write_text(model)
    binary = pulp.PULP_CBC_CMD(msg=False).path
    command = [binary, str(path), "-branch", "-solution", str(folder / "found.sol")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return (folder / "found.sol").read_text()


@pytest.mark.parametrize("form", FORMATS)
def test_other_readers_find_the_same_optimum(form: str, tmp_path: Path) -> None:
    """Equations, ranges, free and fixed columns, an offset: as brute force sees them."""
    seen = 0
    for seed in range(30):
        program = random_program(seed)
        expected = brute_optimum(program)
        text, found = highs_solution(FORMATS[form](program), form, tmp_path)
        if expected is None:
            with pytest.raises(InvalidData, match="Infeasible"):
                read_solution(text, [f"C{c}" for c in range(program.columns)])
            continue
        seen += 1
        assert found == pytest.approx(expected, abs=1e-6), seed
        x = read_solution(text, [f"C{c}" for c in range(program.columns)]).x
        assert program.objective(x) == pytest.approx(expected, abs=1e-6)
    assert seen > 5


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("method", first(1, METHODS))
def test_a_solution_comes_back_as_the_optimal_plan(method: str, form: str, tmp_path: Path) -> None:
    expected = solve(PROBLEM, method=method, max_gap=0.0, time_limit_s=60)
    assert expected.status is Status.OPTIMAL
    model = export_model(PROBLEM, form, method=method)
    for text in (highs_solution(model, form, tmp_path)[0], cbc_solution(model, form, tmp_path)):
        answer = import_solution(PROBLEM, text, method=method)
        assert verify(PROBLEM, answer.plan).cost_ns == answer.cost_ns == expected.cost_ns
        assert answer.bound_ns == GRAPH.total_cost_ns, "what another engine says is no proof"


def test_the_optimum_of_coarse_stages_bounds_every_plan(tmp_path: Path) -> None:
    """More stages bound more; the text says what a unit of the objective is."""
    least = optimum(PROBLEM).cost_ns
    found = []
    for cuts in ([], [5], [4, 5, 6], None):
        model = export_model(PROBLEM, "mps", method="staged", options={} if cuts is None else {"cuts": cuts})
        text, objective = highs_solution(model, "mps", tmp_path)
        unit = float(model.split(" is ")[1].split()[0])
        found.append(objective * unit)
        answer = import_solution(PROBLEM, text, method="staged", options={} if cuts is None else {"cuts": cuts})
        assert found[-1] <= least + 1e-6 <= answer.cost_ns + 1e-6
    assert found[:3] == sorted(found[:3])
    assert found[-1] > GRAPH.total_cost_ns


@pytest.mark.parametrize("cuts", [[3, 3], [4, 2], [8], [-1], ["x"], 3])
def test_coarse_stages_end_at_ops(cuts: object) -> None:
    with pytest.raises(InvalidData, match="cuts"):
        export_model(PROBLEM, "mps", method="staged", options={"cuts": cuts})


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(graph=graphs(most_ops=5), share=st.sampled_from([0.7, 0.85, 1.0]))
def test_brute_force_agrees(graph: Graph, share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    problem = Problem(graph, budget_at(graph, share))
    expected = optimum(problem, ONE_PER_STAGE)
    if expected.cost_ns is None:
        return
    model = export_model(problem, "mps")
    text, _ = highs_solution(model, "mps", tmp_path_factory.mktemp("model"))
    assert import_solution(problem, text).cost_ns == expected.cost_ns


def test_the_forms_of_solution_files() -> None:
    names = ["R_0_0", "R_1_0", "S_1_0"]
    expected = [1.0, 0.0, 1.0]
    for text in (
        "Model status\nOptimal\n\n# Primal solution values\nFeasible\nObjective 2\n# Columns 3\nR_0_0 1\nR_1_0 0\n"
        "S_1_0 1\n# Rows 1\nr0 1\n\n# Dual solution values\nNone\n",
        "Optimal - objective value 2.00000000\n      0 R_0_0  1   0\n**    2 S_1_0  1   0\n      0 r0   1   0\n",
        "# Objective value = 2\nR_0_0 1\nR_1_0 0\nS_1_0 1\n",
        "solution status: optimal solution found\nobjective value:    2\nR_0_0    1 \t(obj:1)\nS_1_0  1 \t(obj:0)\n",
        '<?xml version = "1.0"?>\n<CPLEXSolution>\n<variables>\n<variable name="R_0_0" index="0" value="1"/>\n'
        '<variable name="S_1_0" index="2" value="1"/>\n</variables></CPLEXSolution>\n',
    ):
        assert read_solution(text, names).x.tolist() == expected, text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no solution"),
        ("Infeasible - objective value 0.0\n", "no solution: Infeasible"),
        ("R_0_0 1\nR_99_0 1\n", "'R_99_0' that the model has not"),
        ("R_0_0 1\nR_0_0 0\n", "'R_0_0' twice"),
        ("R_0_0 one\n", "line 1 of the solution is no column"),
        ("R_0_0 1e999\n", "no finite number"),
        ("# Columns 900\nR_0_0 1\n", "cut off"),
        ("R_0_0 0.5\n", "R_0_0 = 0.5: a relaxation's"),
        ("Optimal - objective value 3\n 0 R_0_0\n", "line 2 of the solution"),
    ],
)
def test_refuses_what_is_no_solution(text: str, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        import_solution(PROBLEM, text)


def test_a_solution_of_a_larger_budget_is_refused(tmp_path: Path) -> None:
    larger = Problem(GRAPH, budget_at(GRAPH, 1.0))
    text, _ = highs_solution(export_model(larger, "mps"), "mps", tmp_path)
    with pytest.raises(InvalidData, match="over the budget"):
        import_solution(PROBLEM, text)


def test_a_solution_that_recomputes_nothing_where_it_must_is_no_plan(tmp_path: Path) -> None:
    """A damaged file: every recomputation is taken out, while what it made is still read."""
    text, _ = highs_solution(export_model(PROBLEM, "mps"), "mps", tmp_path)
    names = [line.split() for line in text.splitlines() if line.startswith("R_")]
    again = [name for name, value in names if float(value) > 0.5 and len(set(name.split("_")[1:])) == 2]
    assert again, "the optimum recomputes something"
    for name in again:
        text = text.replace(f"\n{name} 1\n", f"\n{name} 0\n")
    with pytest.raises(InvalidData, match=r"over the budget|is no plan"):
        import_solution(PROBLEM, text)


def test_refuses_what_has_no_model() -> None:
    with pytest.raises(InvalidData, match="format of a program is one of mps, lp"):
        export_model(PROBLEM, "gms")
    with pytest.raises(InvalidData, match="method must be one of"):
        export_model(PROBLEM, "mps", method="auto")
    with pytest.raises(InvalidData, match="no plan fits"):
        export_model(Problem(GRAPH, 6), "mps")
    with pytest.raises(InvalidData, match="has no option"):
        export_model(PROBLEM, "mps", options={"colour": 1})
    with pytest.raises(InvalidData, match="of memory, more than the 10 B"):
        export_model(PROBLEM, "mps", options={"memory_bytes": 10})
    with pytest.raises(InvalidData, match="where its backward pass begins"):
        export_model(Problem(graph_of([1], [1], [[]]), 1), "lp", method="milp-forward")
    marked = Problem(graph_of([1, 1], [1, 1], [[], [0]], backward_from=1), 2)
    with pytest.raises(InvalidData, match="use milp-tight for more"):
        export_model(marked, "lp", method="milp-forward", options={"recomputations": 2})


def test_numbers_read_back_exactly(tmp_path: Path) -> None:
    program = random_program(3)
    cost = np.nextafter(program.cost / 3, 1.0)
    program = replace(program, cost=cost)
    for form, write in FORMATS.items():
        path = tmp_path / f"exact.{form}"
        path.write_text(write(program))
        engine = highspy.Highs()
        engine.silent()
        engine.readModel(str(path))
        assert list(engine.getLp().col_cost_) == cost.tolist()
