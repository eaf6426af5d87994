"""RematBench: graphs are what the manifest says, methods answer or say why not, runs go on, scores are right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from benchmarks.rematbench import check, instances
from benchmarks.rematbench.__main__ import BENCH, main, read_rows
from benchmarks.rematbench.instances import FAMILIES, lifted, load, manifest, recipes, stored
from benchmarks.rematbench.intervals import alone, retained
from benchmarks.rematbench.methods import METHODS, Question, measure
from benchmarks.rematbench.report import primal_integral, profiles, shifted, table_of
from benchmarks.rematbench.unanswered import Unanswered

from remat_ir import plain_peak, recomputed, verify
from remat_ir.digest import graph_digest
from solver.brute import ONE_PER_STAGE, optimum
from solver.little import little_problems

SMALL = "checkmate-segnet-b1"
MADE_ANEW = ("checkmate-segnet-b1", "dag-100-s1", "random-25-s1", "unet-4-whole", "join-4-4", "chain-random-16")


def test_the_manifest_is_of_graphs_that_there_are() -> None:
    known, made = manifest(), recipes()
    assert set(known) <= set(made)
    assert {entry["family"] for entry in known.values()} == set(FAMILIES)
    for name, entry in known.items():
        assert stored(name).exists() == (entry["ops"] <= instances.STORED_OPS), name
        budgets = entry["budgets"]
        assert len(budgets) == 6
        assert budgets == sorted(set(budgets))
        assert entry["least_known_bytes"] < budgets[0]
        assert budgets[-1] == entry["plain_peak_bytes"] * 9 // 10
    assert {path.name.removesuffix(".json.xz") for path in stored("").parent.iterdir()} <= set(known)


def test_the_bench_is_there() -> None:
    assert len(BENCH) == 24
    assert set(BENCH) <= set(manifest())


@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_graph_that_is_made_anew_is_the_same(name: str) -> None:
    entry, graph = manifest()[name], lifted(recipes()[name].make())
    assert graph_digest(graph) == entry["digest"] == load(name).digest
    assert plain_peak(graph) == entry["plain_peak_bytes"]
    assert check.digest(check.read_graph(json.loads(json.dumps(graph.to_json())))) == entry["digest"]


def test_a_graph_with_another_digest_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({SMALL: manifest()[SMALL] | {"digest": "0" * 64}}))
    monkeypatch.setattr(instances, "MANIFEST", path)
    with pytest.raises(ValueError, match="another digest"):
        load(SMALL)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"staged", "search", "milp", "tags"}))
def test_a_method_gives_a_plan_or_says_why_not(name: str) -> None:
    for instance in (SMALL, "chain-random-16", "vgg-16-pcie4"):
        found = measure(METHODS[name], Question(load(instance), 4), 2.0)
        assert (found.cost_ns is None) == bool(found.why), (instance, found.why)
        assert "refused" not in found.why
        assert found.cost_ns is None or found.bound_ns <= found.cost_ns


def test_dtr_computes_again_only_where_memory_is_short() -> None:
    """Each heuristic gives each op once at the plain peak, and more below it."""
    for name in ("dtr", "dtr-lru", "dtr-msps"):
        costs = [measure(METHODS[name], Question(load(SMALL), number), 10.0).cost_ns for number in (5, 2)]
        total = load(SMALL).graph.total_cost_ns
        assert costs[0] is not None
        assert costs[1] is None or total <= costs[0] <= costs[1]


def test_retention_intervals_against_brute_force() -> None:
    """With two runs an op: the optimum of one computation an op and stage, where that takes no more than two."""
    problems = [problem for seed in range(16) for problem in little_problems(seed, 7, rich=False, budgets=3)]
    compared = 0
    with alone() as process:
        asked = [process.submit(retained, problem, 20.0) for problem in problems]
        for problem, answer in zip(problems, asked, strict=True):
            best = optimum(problem, ONE_PER_STAGE)
            more = best.plan is not None and max(recomputed(best.plan, problem.graph.ops)) > 1
            try:
                plan = answer.result()
            except Unanswered:
                assert best.plan is None or more
                continue
            cost = verify(problem, plan).cost_ns
            assert max(recomputed(plan, problem.graph.ops)) <= 1
            assert best.cost_ns is not None
            assert cost == best.cost_ns or (cost > best.cost_ns and more)
            compared += cost > problem.graph.total_cost_ns
    assert compared > 5


def test_a_run_goes_on_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, release = tmp_path / "rows.jsonl", tmp_path / "release"
    asked = ["--instances", SMALL, "--budgets", "1,4", "--seconds", "2", "--rows", str(rows), "--answers", str(release)]
    assert main([*asked, "--methods", "greedy"]) == 0
    first = rows.read_text()
    rows.write_text(first[:-40])  # as a kill leaves it
    assert main([*asked, "--methods", "greedy,dtr-lru", "--report", str(tmp_path / "page")]) == 0
    found = read_rows(rows)
    assert sorted((row["problem"], row["method"]) for row in found) == sorted(
        (f"{SMALL}@{number}", method) for number in (1, 4) for method in ("greedy", "dtr-lru")
    )
    assert found[0] == json.loads(first.splitlines()[0])
    assert "| greedy | 2 | 2 |" in capsys.readouterr().out
    assert (tmp_path / "page" / "index.html").read_text().count("<svg") == 2
    assert check.main([str(release)]) == 0


def row(method: str, problem: str, cost: int | None, bound: int, **more: object) -> dict[str, object]:
    known = {"seconds": 1.0, "seconds_given": 10.0, "progress": [], "why": "", "load": 0.1, "commit": "c"}
    known |= {"machine": "m", "date": "d", "family": "random"}
    return {"method": method, "problem": problem, "cost_ns": cost, "bound_ns": bound, **known, **more}


def test_scores_are_those_of_the_page() -> None:
    rows = [row("a", "p", 100, 90), row("a", "q", None, 10), row("b", "p", 110, 100), row("b", "q", 20, 20)]
    assert shifted([0.0, 3.0]) == pytest.approx(1.0)
    lines = table_of(rows).splitlines()
    b, a = lines[2], lines[3]
    mean = math.sqrt((1 + 100 * 10 / 110) * 1) - 1
    assert b.startswith(f"| b | 2 | 2 | {mean:.3f} | 1 | 1 | 1 |")
    assert a.startswith(f"| a | 2 | 1 | {math.sqrt(101) - 1:.3f} | 1 | 1 | 0 |")
    assert profiles(rows) == {"a": [1.0, math.inf], "b": [1.0, 1.1]}


def test_the_primal_integral_is_over_the_time_given() -> None:
    progress = [[2.0, 200, 0], [6.0, 100, 0]]
    assert primal_integral(row("a", "p", 100, 1, progress=progress), 100) == pytest.approx((2 + 4 * 0.5) / 10)
    assert primal_integral(row("a", "p", 100, 1, seconds=4.0), 100) == pytest.approx(0.4)
    assert primal_integral(row("a", "p", None, 1), 100) == 1.0
