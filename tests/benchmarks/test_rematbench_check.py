"""The checker that stands alone, against the project's own and brute force: plans, certificates and mutants of both."""

from __future__ import annotations

import ast
import gzip
import json
import lzma
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from benchmarks.graphs.instances import instance
from benchmarks.rematbench import check
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, sequences
from remat_ir import (
    Compute,
    Free,
    Graph,
    InvalidData,
    InvalidPlan,
    Link,
    Plan,
    Problem,
    Step,
    graph_of,
    plain_peak,
    plain_plan,
    plan_of,
    problem_digest,
    verify,
)
from remat_ir.graph import working_set
from remat_ir.proof import InvalidProof, PairProof, Proof, prove
from remat_solver import solve
from remat_solver.bounds import pair_need
from solver.brute import optimum
from solver.little import little_graph
from solver.proof_rows import every_row, laminar, proof_of, random_covers, random_limits, relaxation, with_roundings
from solver.proof_transfers import random_plan
from solver.test_proof_mutants import mutant
from solver.test_windows import certificate
from solver.test_windows import mutant as window_mutant

FILE = Path(check.__file__)
SETTINGS = settings(max_examples=examples(150), deadline=None)
LARGE = 2**50


def plain(data: object) -> Any:
    """Data as a file has it."""
    return json.loads(json.dumps(data))


def read(graph: Graph) -> check.Graph:
    return check.read_graph(plain(graph.to_json()))


def checked(graph: Graph, plan: Plan) -> tuple[int, int] | None:
    """Cost and peak by the file, None where it refuses."""
    try:
        return check.check_plan(read(graph), plain(plan.to_json()))
    except check.Refused:
        return None


def verified(graph: Graph, plan: Plan) -> tuple[int, int] | None:
    """Cost and peak by the project's verifier, None where it refuses."""
    try:
        cost, peak = verify(Problem(graph, LARGE), plan)
        return cost, peak
    except InvalidPlan:
        return None


def proved(problem: Problem, proof: Proof) -> float | None:
    """What the project's checker says that a certificate proves: infinite where no plan fits, None where it refuses."""
    try:
        bound = prove(problem, proof).bound_ns
    except (InvalidProof, InvalidData):
        return None
    return inf if bound is None else bound


def shown(problem: Problem, proof: Proof) -> float | None:
    """The same by the file."""
    try:
        return check.check_proof(read(problem.graph), problem.budget_bytes, plain(proof.to_json()))
    except check.Refused:
        return None


def changed(plan: Plan, graph: Graph, rng: random.Random) -> Plan:
    """A plan with a step left out, twice, elsewhere, or another one."""
    steps = list(plan.steps)
    at, to = rng.randrange(len(steps)), rng.randrange(len(steps))
    what = rng.choice(("out", "twice", "swap", "op", "kept", "free"))
    if what == "out":
        del steps[at]
    elif what == "twice":
        steps.insert(to, steps[at])
    elif what == "swap":
        steps[at], steps[to] = steps[to], steps[at]
    elif what == "op":
        steps[at] = Compute(rng.randrange(graph.ops))
    elif what == "kept" and isinstance(step := steps[at], Compute):
        values = range(graph.values)
        steps[at] = Compute(step.op, tuple(v for v in values if graph.value_op[v] == step.op and rng.random() < 0.5))
    elif graph.values:
        steps.insert(at, Free(rng.randrange(graph.values)))
    return Plan(tuple(steps))


def test_it_stands_alone() -> None:
    """Of the standard library alone, and short enough to be read."""
    text = FILE.read_text()
    trees = list(ast.walk(ast.parse(text)))
    names = {alias.name for tree in trees if isinstance(tree, ast.Import) for alias in tree.names}
    names |= {str(tree.module) for tree in trees if isinstance(tree, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 800


@SETTINGS
@given(graphs(), st.data())
def test_it_replays_plans_as_the_verifier_does(graph: Graph, data: st.DataObject) -> None:
    assert check.digest(read(graph), 1000) == problem_digest(Problem(graph, 1000))
    plan = plan_of(graph, data.draw(sequences(graph)))
    assert checked(graph, plan) == verified(graph, plan) is not None
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(10):
        other = changed(plan, graph, rng)
        assert checked(graph, other) == verified(graph, other)
        plan = other if other.steps and rng.random() < 0.3 else plan


links = st.builds(
    Link,
    st.sampled_from((10**9, 3 * 10**8)),
    st.sampled_from((10**9, 2 * 10**8)),
    st.sampled_from((0, 2)),
    st.none() | st.integers(0, 12),
)


@SETTINGS
@given(graphs(most_ops=6), links, st.integers(0, 2**32))
def test_it_replays_plans_with_transfers_as_the_verifier_does(graph: Graph, link: Link, seed: int) -> None:
    graph, rng = replace(graph, link=link), random.Random(seed)
    plan = random_plan(Problem(graph, plain_peak(graph)), rng)
    if plan is not None:
        assert checked(graph, plan) == verified(graph, plan) is not None
        for _ in range(20):
            steps: list[Step] = list(plan.steps)
            at, to = rng.randrange(len(steps)), rng.randrange(len(steps))
            steps.insert(to, steps.pop(at)) if rng.random() < 0.6 else steps.pop(at)
            assert checked(graph, Plan(tuple(steps))) == verified(graph, Plan(tuple(steps)))


def test_the_peak_is_that_of_the_budget_and_not_a_byte_less() -> None:
    graph = instance("resnet-2-whole")
    answer = {"budget_bytes": plain_peak(graph), "plan": plain_plan(graph).to_json(), "cost_ns": graph.total_cost_ns}
    assert "cost" in check.check_answer(read(graph), plain(answer))
    for name, wrong in (("budget_bytes", plain_peak(graph) - 1), ("cost_ns", graph.total_cost_ns - 1)):
        with pytest.raises(check.Refused):
            check.check_answer(read(graph), plain(answer | {name: wrong}))


def stage_certificates(seeds: range) -> Iterator[tuple[Problem, Any, random.Random]]:
    """Problems of small graphs, and certificates by stages that use all rows."""
    for seed in seeds:
        rng = random.Random(seed)
        graph = little_graph(seed, 3 + seed % 4)
        low, high = working_set(graph).least_bytes - 1, plain_peak(graph)
        problem = Problem(graph, max(0, rng.randint(low, max(low, high))))
        cuts = tuple(sorted({*rng.sample(range(graph.ops), rng.randint(0, graph.ops)), graph.ops - 1}))
        on = relaxation(problem, cuts, laminar(cuts, [rng.randrange(9) for _ in range(4)]))
        rows = every_row(on, [*random_covers(on, rng), *random_limits(on, rng)])
        yield problem, proof_of(problem, on, with_roundings(on, rows, rng), rng.randint(0, 5)), rng


def compare(problem: Problem, proof: Proof, least: float | None) -> bool:
    """Assert that both checkers say the same, or that what only the file says is true; whether it takes the proof."""
    by_project, by_file = proved(problem, proof), shown(problem, proof)
    assert by_project is None or by_project == by_file, proof
    assert by_file is None or least is None or by_file <= least, proof
    return by_file is not None


def attack(cases: Iterator[tuple[Problem, Any, random.Random]], change: Any, mutants: int) -> int:
    """How many mutants the file takes; asserts that none proves too much."""
    accepted, previous = 0, None
    for problem, proof, rng in cases:
        least = optimum(problem).cost_ns
        compare(problem, proof, least)
        for _ in range(mutants):
            accepted += compare(problem, change(proof, previous or proof, rng), least)
        previous = proof
    return accepted


def test_it_checks_certificates_by_stages_as_the_project_does() -> None:
    assert attack(stage_certificates(range(80)), mutant, 15) > 100


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_mutant_of_many_proves_too_much() -> None:
    assert attack(stage_certificates(range(5000, 6500)), mutant, 30) > 1000
    windows = ((*certificate(seed, 3 + seed % 4), random.Random(seed)) for seed in range(3000, 4000))
    assert attack(windows, lambda proof, _, rng: window_mutant(proof, rng), 30) > 1000


def test_it_checks_certificates_by_windows_as_the_project_does() -> None:
    cases = ((*certificate(seed, 3 + seed % 4), random.Random(seed)) for seed in range(50))
    assert attack(cases, lambda proof, _, rng: window_mutant(proof, rng), 20) > 100


def pair_certificates(seeds: range) -> Iterator[tuple[Problem, Any, random.Random]]:
    """Budgets that pairs of values show to be too small."""
    for seed in seeds:
        graph = little_graph(seed, 6)
        need = pair_need(graph)
        if need.least_bytes > working_set(graph).least_bytes:
            problem = Problem(graph, need.least_bytes - 1)
            answer = solve(problem, method="staged", time_limit_s=5)
            if isinstance(answer.proof, PairProof):
                yield problem, answer.proof, random.Random(seed)


def pair_mutant(proof: PairProof, _: object, rng: random.Random) -> PairProof:
    """One pair less, more or other, or another op."""
    pairs = list(proof.pairs)
    what = rng.choice(("op", "less", "more"))
    if what == "op" or not pairs:
        return replace(proof, op=rng.randrange(proof.op + 1))
    if what == "less":
        del pairs[rng.randrange(len(pairs))]
    else:
        one, other = rng.choice(pairs)
        pairs.append((one, max(0, other - rng.randint(0, 2))))
    return replace(proof, pairs=tuple(pairs))


def test_it_checks_certificates_by_pairs_as_the_project_does() -> None:
    cases = list(pair_certificates(range(60)))
    assert len(cases) > 5
    attack(iter(cases), pair_mutant, 20)


SOLVED = (("resnet-4-whole", 0.4), ("gpt-2-whole", 0.5), ("random-20", 0.6))


@pytest.fixture(scope="module", params=SOLVED, ids=lambda case: case[0])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph and an answer that the solver gave."""
    name, fraction = request.param
    graph = instance(name)
    low, high = working_set(graph).least_bytes, plain_peak(graph)
    problem = Problem(graph, int(low + fraction * (high - low)))
    answer = solve(problem, method="auto", time_limit_s=5, max_gap=0.002)
    assert answer.plan is not None
    document = {"graph": name, "graph_digest": check.digest(read(graph)), "budget_bytes": problem.budget_bytes}
    document |= {"cost_ns": answer.cost_ns, "peak_bytes": answer.peak_bytes, "plan": answer.plan.to_json()}
    document |= {"bound_ns": answer.bound_ns, "proof": answer.proof.to_json() if answer.proof else None}
    folder = tmp_path_factory.mktemp("release")
    for part, data in (("graphs", graph.to_json()), ("answers", document)):
        (folder / part).mkdir()
        with lzma.open(folder / part / f"{name}.json.xz", "wt") as file:
            json.dump(data, file)
    return folder


def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    """The file as a program, without site packages: a Python that has nothing of this project."""
    return subprocess.run([sys.executable, "-I", "-S", FILE, *arguments], capture_output=True, text=True, timeout=300)


def test_a_release_is_checked_by_one_command(release: Path) -> None:
    done = run(release)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 confirmed, 0 refused" in done.stdout


@pytest.mark.parametrize(
    "wrong", ["plan", "cost_ns", "bound_ns", "budget_bytes", "graph_digest", "proof", "peak_bytes"]
)
def test_a_release_with_one_thing_changed_is_refused(release: Path, wrong: str, tmp_path: Path) -> None:
    (path,) = (release / "answers").iterdir()
    answer = check.load(path)
    if wrong == "plan":
        del answer["plan"]["steps"][0]
    elif wrong == "proof":
        answer |= {"proof": None, "bound_ns": answer["cost_ns"]}
    elif wrong == "graph_digest":
        answer["graph_digest"] = "0" * 64
    else:
        answer[wrong] = answer["cost_ns"] + 1 if wrong == "bound_ns" else answer[wrong] - 1
    changed_path = tmp_path / "answer.json"
    changed_path.write_text(json.dumps(answer))
    (graph,) = (release / "graphs").iterdir()
    done = run(graph, changed_path)
    assert done.returncode == 1
    assert "REFUSED" in done.stdout


def test_what_is_malformed_or_damaged_is_refused_and_the_rest_is_checked(tmp_path: Path) -> None:
    """Words that are arrays, a latency that is null, files that are cut off: a line each, and no traceback."""
    graph = graph_of([1, 2], [4, 8], [[], [0]])
    good = {"budget_bytes": 12, "plan": plain_plan(graph).to_json(), "bound_ns": 3}
    proof = {"format": "remat-proof/1", "by": ["pairs"], "problem": "0" * 64, "op": 0, "pairs": []}
    wrong: list[Any] = [
        good | {"proof": proof},
        good | {"plan": {"format": "remat-plan/1", "steps": [[["compute"], 0]]}},
        good | {"plan": {"format": "remat-plan/1", "steps": [[{}, 0]]}},
    ]
    folder = tmp_path / "release"
    for part in ("graphs", "answers"):
        (folder / part).mkdir(parents=True)
    link = {"to_host_bytes_per_s": 1, "to_device_bytes_per_s": 1, "latency_ns": None}
    moves = {"format": "remat-plan/1", "steps": [["compute", 0], ["offload", 0]]}
    for name, data in (("small", graph.to_json()), ("linked", graph.to_json() | {"link": link})):
        (folder / "graphs" / f"{name}.json").write_text(json.dumps(data))
    answers = [*({"graph": "small"} | each for each in (*wrong, good)), {"graph": ["small"]} | good]
    answers.append({"graph": "linked", "budget_bytes": 12, "plan": moves})
    for number, answer in enumerate(answers):
        (folder / "answers" / f"{number}.json").write_text(json.dumps(answer))
    whole = lzma.compress(json.dumps({"graph": "small"} | good).encode())
    (folder / "answers" / "cut.json.xz").write_bytes(whole[: len(whole) // 2])
    (folder / "answers" / "spoilt.json.xz").write_bytes(b"no archive")
    packed = gzip.compress(json.dumps({"graph": "small"} | good).encode())
    (folder / "answers" / "spoilt.json.gz").write_bytes(packed[:12] + bytes(8) + packed[20:])
    done = run(folder)
    assert done.returncode == 1
    assert not done.stderr
    assert "1 confirmed, 8 refused" in done.stdout
