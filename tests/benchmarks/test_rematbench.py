"""RematBench: graphs are what the manifest says, methods answer or say why not, runs go on, scores are right."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from pathlib import Path

import pytest
from benchmarks.harness.rows import read_rows
from benchmarks.rematbench import Unanswered, check, instances
from benchmarks.rematbench.__main__ import BENCH, main
from benchmarks.rematbench.hiremate import hiremate
from benchmarks.rematbench.instances import FAMILIES, lifted, load, manifest, recipes, stored
from benchmarks.rematbench.intervals import alone, retained
from benchmarks.rematbench.methods import METHODS, Question, measure
from benchmarks.rematbench.peers import Heuristic, dtr
from benchmarks.rematbench.poet import written
from benchmarks.rematbench.report import not_run, page, primal_integral, profiles, shifted, store, table_of
from benchmarks.rematbench.report import stored as stored_rows

from remat_ir import InvalidData, Link, Prefetch, Problem, graph_of, plain_peak, recomputed, verify
from remat_ir.digest import graph_digest
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from solver.brute import FORWARD_OPS, ONE_PER_STAGE, optimum
from solver.little import little_problems
from solver.transfer_brute import least_makespan

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


@pytest.mark.parametrize("heuristic", ["h", "msps", "lru"])
def test_dtr_trains_a_chain_in_linear_time_with_the_root_of_its_memory(heuristic: Heuristic) -> None:
    """Kirisame et al., abstract: O(N) operations with memory of order √N, here 2 √N; staleness alone takes more."""
    operations = []
    for layers in (64, 256, 1024):
        inputs = [(), *((op - 1,) for op in range(1, layers))]
        inputs += [(layers - 1,), *((layers + op - 1, layers - 1 - op) for op in range(1, layers))]
        graph = graph_of([1] * 2 * layers, [1] * 2 * layers, inputs, backward_from=layers)
        problem = Problem(graph, 2 * math.isqrt(layers))
        operations.append(verify(problem, dtr(heuristic)(problem, 60.0)).cost_ns / layers)
    if heuristic == "lru":
        assert operations[0] < 4 < 9 < operations[2]
    else:
        assert max(operations) < 3.2
        assert operations[2] < 1.06 * operations[1]


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


def serial_makespan(problem: Problem) -> int:
    """The least time of computations and copies one after the other, by Dijkstra over what is resident and on the host.

    As in POET's program a copy on the host is gone once it is paged in.
    """
    graph, link = problem.graph, problem.graph.link
    assert link is not None
    room = problem.budget_bytes - graph.fixed_bytes
    best, heap = {(0, 0, 0): 0}, [(0, (0, 0, 0))]
    while heap:
        cost, state = heapq.heappop(heap)
        done, there, host = state
        if done == graph.ops:
            return cost
        if cost > best[state]:
            continue
        held = sum(size for v, size in enumerate(graph.value_bytes) if there >> v & 1)
        moves = []
        for v, size in enumerate(graph.value_bytes):
            if there >> v & 1:
                moves += [(0, (done, there & ~(1 << v), host))]
                moves += [(link.to_host_ns(size), (done, there, host | 1 << v))]
            elif host >> v & 1 and held + size <= room:
                moves += [(link.to_device_ns(size), (done, there | 1 << v, host & ~(1 << v)))]
        for op in range(done + 1):
            inputs = all(there >> v & 1 for v in graph.op_inputs[op])
            if inputs and not there >> op & 1 and held + graph.value_bytes[op] <= room:
                moves += [(graph.op_cost_ns[op], (max(done, op + 1), there | 1 << op, host))]
        for ns, after in moves:
            if cost + ns < best.get(after, cost + ns + 1):
                best[after] = cost + ns
                heapq.heappush(heap, (cost + ns, after))
    raise AssertionError("nothing fits")


def test_paging_against_brute_force() -> None:
    """POET's optimum is the least time of all plans with serial copies and computations; its plan takes no longer."""
    drawn = [problem for seed in (0, 6, 13, 25) for problem in little_problems(seed, 5, rich=False, budgets=2)]
    equal = paging = 0
    with Engine("highs") as engine:
        for alone, link in itertools.product(drawn, (Link(10**9, 10**9), Link(10**10, 10**10, host_bytes=20))):
            problem = Problem(alone.graph.with_link(link), alone.budget_bytes)
            program = written(problem)
            outcome = engine.run(program.program, deadline=Deadline(60.0))
            assert outcome.status == "optimal"
            assert outcome.x is not None
            serial, objective = serial_makespan(problem), round(outcome.objective * program.unit_ns)
            assert serial <= objective
            plan = program.plan(outcome.x)
            assert (least_makespan(problem)[0] or 0) <= verify(problem, plan).cost_ns <= objective
            equal += serial == objective
            paging += any(isinstance(step, Prefetch) for step in plan.steps)
    assert equal == 2 * len(drawn)
    assert paging > 2


@pytest.mark.parametrize("most_ops", [1, 2])
def test_the_hierarchy_against_brute_force(most_ops: int) -> None:
    """Never below the optimum; of parts of one op mostly that of recomputing forward ops; nothing more if all fits."""
    planned = equal = again = 0
    for seed in range(12):
        for problem in little_problems(seed, 7, rich=False, budgets=3):
            plain = Problem(problem.graph, 2 * plain_peak(problem.graph))
            assert most_ops > 1 or verify(plain, hiremate(plain, 20.0, 1)).cost_ns == problem.graph.total_cost_ns
            try:
                cost = verify(problem, hiremate(problem, 20.0, most_ops)).cost_ns
            except Unanswered:
                continue
            best = optimum(problem).cost_ns
            assert best is not None
            assert best <= cost
            planned += 1
            equal += cost == optimum(problem, FORWARD_OPS).cost_ns
            again += cost > problem.graph.total_cost_ns
    assert again > 5
    assert equal >= (0.8 if most_ops == 1 else 0.4) * planned


def test_the_hierarchy_has_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two parts in groups of two: a plan within each budget, that costs more the less memory there is."""
    monkeypatch.setattr("benchmarks.rematbench.hiremate.MOST_PARTS", 2)
    graph = load("unet-4-whole").graph
    costs = []
    for share in (0.9, 0.75):
        problem = Problem(graph, int(share * plain_peak(graph)))
        costs.append(verify(problem, hiremate(problem, 20.0)).cost_ns)
    assert graph.total_cost_ns < costs[0] <= costs[1] < 2 * graph.total_cost_ns


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


def test_graphs_of_others_are_measured_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, rows = tmp_path / "data", tmp_path / "rows.jsonl"
    with pytest.raises(FileNotFoundError, match="no \\*"):
        main(["--folder", str(folder), "--rows", str(rows)])
    folder.mkdir()
    nodes = [{"name": i, "out_cost": 10, "duration": 3} for i in range(6)]
    links = [{"0": i, "1": i + 1} for i in range(5)] + [{"0": 0, "1": 5}, {"0": 1, "1": 4}]
    path = folder / "random_layered_n6.json"
    path.write_text(json.dumps({"directed": True, "nodes": nodes, "links": links}))
    asked = ["--folder", str(folder), "--rows", str(rows), "--budgets", "4,5", "--methods", "greedy", "--seconds", "2"]
    assert main(asked) == 0
    found = read_rows(rows)
    assert [entry["problem"] for entry in found] == ["random_layered_n6@4", "random_layered_n6@5"]
    assert [entry["budget_bytes"] for entry in found] == [32, 36]
    assert found[1]["cost_ns"] >= found[1]["total_ns"] == 18
    assert "| greedy | 2 |" in capsys.readouterr().out
    path.write_text("{}")
    with pytest.raises(InvalidData, match="random_layered_n6"):
        main(asked)


def row(method: str, problem: str, cost: int | None, bound: int, **more: object) -> dict[str, object]:
    known = {"seconds": 1.0, "seconds_given": 10.0, "progress": [], "why": "", "load": 0.1, "commit": "c"}
    known |= {"machine": "m", "date": "d", "family": "random", "seed": 0}
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
    assert b.endswith("| – |")
    twice = [*rows, row("b", "p", 100, 100, seed=1), row("b", "q", 20, 20, seed=1)]
    assert table_of(twice).splitlines()[2].endswith(f"| 0.000 to {mean:.3f} |")


def test_the_primal_integral_is_over_the_time_given() -> None:
    progress = [[2.0, 200, 0], [6.0, 100, 0]]
    assert primal_integral(row("a", "p", 100, 1, progress=progress), 100) == pytest.approx((2 + 4 * 0.5) / 10)
    assert primal_integral(row("a", "p", 100, 1, seconds=4.0), 100) == pytest.approx(0.4)
    assert primal_integral(row("a", "p", None, 1), 100) == 1.0


def test_stored_rows_are_replaced_and_marked(tmp_path: Path) -> None:
    path, progress = tmp_path / "rows.jsonl.xz", [[1.0, None, 5], [2.0, 200, 5], [3.0, 200, 9], [4.0, 100, 9]]
    first = store([row("a", "p", 120, 9), row("b", "p", 110, 9)], path)
    assert [(r["method"], r["cost_ns"]) for r in first] == [("a", 120), ("b", 110)]
    left_out = row("c", "p", None, 9, why="doesn't answer this family")
    again = store([row("a", "p", 100, 9, progress=progress), left_out, row("a", "p", 90, 9, seed=1)], path)
    assert again == stored_rows(path)
    assert [(r["method"], r["seed"], r["cost_ns"]) for r in again] == [("a", 0, 100), ("a", 1, 90), ("b", 0, 110)]
    assert again[0]["progress"] == [[2.0, 200, 5], [4.0, 100, 9]]
    run = [row("a", "p", 100, 9)]
    assert [r["method"] for r in not_run(run, path)] == ["b (stored)"]
    assert not_run([row("a", "q", 100, 9)], path) == not_run([row("a", "p", 100, 9, machine="n")], path) == []


def test_the_page_counts_what_is_proved() -> None:
    """Of training graphs, that is not of `dag-…`, up to 1,000 ops and at 0.3 of the plain peak or more."""
    entries = manifest()

    def auto(name: str, number: int, cost: int | None, bound: int) -> dict[str, object]:
        entry = entries[name]
        more = {"ops": entry["ops"], "budget_bytes": entry["budgets"][number], "family": entry["family"]}
        return row("auto", f"{name}@{number}", cost, bound, total_ns=1000, progress=[[1.0, cost, bound]], **more)

    rows = [auto(SMALL, 5, 2000, 1999), auto(SMALL, 4, 2000, 1000), auto("dag-100-s1", 5, None, 1000)]
    text = page([*rows, row("greedy", f"{SMALL}@5", 3000, 1000)], [f"{SMALL}@5"])
    assert "| checkmate | 2 | 2 | 1 (50 %) | 1 |" in text
    assert "| all | 3 | 2 | 1 (33 %) | 1 |" in text
    assert "| *training* | 2 | 2 | 1 (50 %) | 1 |" in text
    assert "| greedy | 1 | 1 |" in text
    more_time = auto(SMALL, 4, 1500, 1000) | {"seconds_given": 60.0}
    given_more = page([*rows, more_time], [f"{SMALL}@4"])
    assert "| *training* | 2 | 2 | 1 (50 %) | 1 | 6." in given_more
    assert "| *training*, 60 s | 2 | 2 | 1 (50 %) | 1 | 5." in given_more
    assert "| auto | 1 | 1 |" in given_more
    last = text.splitlines()[-3:]
    assert last[0].startswith("| dag-100-s1@5 | 100 | – | 0.00 | 100.00")
    assert last[1] == f"| {SMALL}@4 | {entries[SMALL]['ops']} | 100.00 | 0.00 | 50.00 |"
