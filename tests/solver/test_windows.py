"""Bounds by windows against brute force: of the rule that joins them, of certificates, of mutants of both."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, posed
from remat_ir import Graph, InvalidData, Problem, plain_peak, problem_digest
from remat_ir.graph import working_set
from remat_ir.proof import InvalidProof, Leaf, StageProof, WindowProof, carried, prove, read_proof
from remat_ir.proof.windows import Windows
from remat_solver import solve
from remat_solver.bounds import pair_need
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.staged.windows import prove_by_windows
from solver.brute import optimum
from solver.little import little_graph
from solver.proof_rows import every_row, proof_of, relaxation

NEVER = 10**9
"""What a window costs that has no plan."""


def any_windows(seed: int, ops: int, kind: type[Windows] = Windows) -> tuple[Problem, Windows, list[tuple[int, ...]]]:
    """A small problem, segments of it around any op, and some of its windows."""
    rng = random.Random(seed)
    graph = little_graph(seed, ops)
    low, high = working_set(graph).least_bytes, plain_peak(graph)
    problem = Problem(graph, rng.randint(low, max(low, high - 1)))
    turn = rng.randrange(1, graph.ops - 1)
    firsts = sorted(rng.sample(range(turn + 1), rng.randint(2, min(4, turn + 1))))
    laters = sorted((rng.randint(turn + 1, graph.ops) for _ in firsts), reverse=True)
    small = rng.choice((0, 0, 1, 3))
    capacity = problem.budget_bytes - graph.fixed_bytes
    on = kind(graph, capacity, turn, firsts, laters, small)
    windows: list[tuple[int, ...]] = []
    for start in range(on.segments):
        windows += [(start, end, 0) for end in range(start + 1, on.segments + 1) if rng.random() < 0.8]
        windows += [(start, start + 1, rng.randint(1, capacity)) for _ in range(2) if capacity > 0]
    return problem, on, windows


def joined_ns(problem: Problem, on: Windows, windows: list[tuple[int, ...]]) -> int:
    """The bound that follows from what brute force says of windows."""
    costs = []
    for start, end, spare in windows:
        graph = on.window(start, end, spare)
        least = optimum(Problem(graph, on.capacity)).cost_ns
        costs.append((start, end, spare, NEVER if least is None else least - graph.total_cost_ns))
    return problem.graph.total_cost_ns + on.least(costs).extra_ns


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 7))
def test_windows_that_are_optimal_never_prove_too_much(seed: int, ops: int) -> None:
    problem, on, windows = any_windows(seed, ops)
    least = optimum(problem).cost_ns
    assert least is None or joined_ns(problem, on, windows) <= least


@pytest.mark.thorough
def test_windows_prove_something() -> None:
    """So that the test above can fail: of problems that cost something some are proved to their end, more in part."""
    reached = raised = 0
    for seed in range(600):
        problem, on, windows = any_windows(seed, 4 + seed % 3)
        least, total = optimum(problem).cost_ns, problem.graph.total_cost_ns
        if least is not None and least > total:
            bound = joined_ns(problem, on, windows)
            raised += bound > total
            reached += bound == least
    assert raised > 4
    assert reached > 0


class NothingFree(Windows):
    """Forgets that what the turn reads, and what certainly stays, is there at it."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self._free = set()


class LittleRoom(Windows):
    """Believes that less can be held than there is room for."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.room = self.room // 2


class LargestHeld(Windows):
    """Takes the largest value of a segment for the least that can be held."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        largest = max(self.graph.value_bytes)
        self._least = [None if size is None else max(size, largest) for size in self._least]


class NoSpare(Windows):
    """Writes the window of a segment with values held as if none were."""

    def window(self, start: int, end: int, spare_bytes: int) -> Graph:
        return super().window(start, end, 0)


class Twice(Windows):
    """Counts windows that overlap."""

    def _packed(self, start: int, ending: dict[int, list[tuple[int, int]]]) -> list[int]:
        best = [0]
        for end in range(start + 1, self.segments + 1):
            best.append(best[-1] + sum(extra for a, extra in ending.get(end, ()) if a >= start and extra < NEVER))
        return best


@pytest.mark.parametrize("wrong", [NothingFree, LittleRoom, LargestHeld, NoSpare, Twice])
def test_a_rule_with_a_mistake_is_caught(wrong: type[Windows]) -> None:
    for seed in range(3000):
        problem, on, windows = any_windows(seed, 3 + seed % 5, wrong)
        least = optimum(problem).cost_ns
        if least is not None and joined_ns(problem, on, windows) > least:
            return
    raise AssertionError("no problem shows the mistake")


def certificate(seed: int, ops: int) -> tuple[Problem, WindowProof]:
    """A problem and a certificate by windows, its parts from linear programs over all rows."""
    problem, on, windows = any_windows(seed, ops)
    digest, rng = problem_digest(problem), random.Random(seed)
    parts: list[StageProof] = []
    entries = []
    for start, end, spare in windows:
        graph = on.window(start, end, spare)
        turn = on.firsts[end] - on.firsts[start]
        cuts = tuple(sorted({turn, graph.ops - 1, rng.randrange(graph.ops)}))
        within = relaxation(Problem(graph, on.capacity), cuts, ())
        part = proof_of(Problem(graph, on.capacity), within, every_row(within, []), rng.randint(0, 2))
        try:
            prove(Problem(graph, on.capacity), part)
        except InvalidProof:
            continue  # rounding may lose a leaf without points
        entries.append((start, end, spare, len(parts)))
        parts.append(replace(part, digest=digest))
    turn, small = on.turn, on.small_bytes
    return problem, WindowProof(digest, turn, tuple(on.firsts), tuple(on.laters), small, tuple(parts), tuple(entries))


@pytest.mark.thorough
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 6), st.integers(-3, 3))
def test_no_certificate_is_above_the_optimum(seed: int, ops: int, more: int) -> None:
    problem, proof = certificate(seed, ops)
    assert read_proof(proof.to_json()) == proof
    other = Problem(problem.graph, max(0, problem.budget_bytes + more))
    costs = tuple((cost * (3 + op % 3) + seed % 2) // 3 for op, cost in enumerate(problem.graph.op_cost_ns))
    noisy = Problem(replace(problem.graph, op_cost_ns=costs), problem.budget_bytes)
    carried_over = [(each, carried_or_none(each, proof)) for each in (other, noisy)]
    for each, given_proof in ((problem, proof), *carried_over):
        least = optimum(each).cost_ns
        if given_proof is None:
            continue
        try:
            bound = prove(each, given_proof).bound_ns
        except InvalidProof:
            continue
        assert bound is not None
        assert least is None or bound <= least


def carried_or_none(problem: Problem, proof: WindowProof) -> WindowProof | None:
    try:
        found = carried(proof, problem)
    except InvalidProof:
        return None
    assert isinstance(found, WindowProof)
    return found


def mutant(proof: WindowProof, rng: random.Random) -> WindowProof:
    """A certificate with one number changed."""

    def near(number: int) -> int:
        return rng.choice((number - 1, number + 1, 0, -number, 2 * number, rng.randrange(12)))

    def one_of(numbers: tuple[int, ...]) -> tuple[int, ...]:
        at = rng.randrange(len(numbers))
        return (*numbers[:at], near(numbers[at]), *numbers[at + 1 :])

    what = rng.choice(("turn", "firsts", "laters", "small_bytes", "windows", "windows", "parts"))
    value = getattr(proof, what)
    if what in ("turn", "small_bytes"):
        return replace(proof, **{what: near(value)})
    if what in ("firsts", "laters"):
        return replace(proof, **{what: one_of(value)})
    if not value:
        return proof
    at = rng.randrange(len(value))
    if what == "windows":
        return replace(proof, windows=(*value[:at], one_of(value[at]), *value[at + 1 :]))
    part: StageProof = replace(value[at], denominator=max(1, near(value[at].denominator)))
    return replace(proof, parts=(*value[:at], part, *value[at + 1 :]))


def attack(seeds: range, mutants: int) -> tuple[int, int]:
    made = accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        problem, proof = certificate(seed, 3 + seed % 4)
        least = optimum(problem).cost_ns
        for _ in range(mutants):
            made += 1
            try:
                bound = prove(problem, mutant(proof, rng)).bound_ns
            except (InvalidProof, InvalidData):
                continue
            accepted += 1
            assert bound is not None
            assert least is None or bound <= least, seed
    return made, accepted


MANY = (pytest.mark.slow, pytest.mark.timeout(3000))


@pytest.mark.parametrize(("seeds", "mutants"), [(range(40), 30), pytest.param(range(1000, 2000), 50, marks=MANY)])
def test_no_mutant_proves_too_much(seeds: range, mutants: int) -> None:
    made, accepted = attack(seeds, mutants)
    assert made == len(seeds) * mutants
    assert accepted > 100


def test_the_parts_of_a_certificate_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each by itself: what one of them may have is not for each of a thousand."""
    proof = next(p for p in (certificate(seed, 6)[1] for seed in range(100)) if len({*p.parts}) > 1)
    numbers = [sum(map(len, part.rows)) for part in proof.parts]
    assert read_proof(proof.to_json()) == proof
    monkeypatch.setattr("remat_ir.proof.certificate.MOST_NUMBERS", sum(numbers) - 1)
    with pytest.raises(InvalidData, match="numbers"):
        read_proof(proof.to_json())


def test_a_malformed_part_is_named() -> None:
    part = StageProof("0" * 64, (1,), (), (), 1, (Leaf(()),))
    data = WindowProof("0" * 64, 0, (0, 1), (2, 1), 0, (part, part), ()).to_json()
    assert read_proof(data)
    data["parts"][1]["rows"] = [["memory", "1"]]
    with pytest.raises(InvalidData, match=r"^parts\[1\]: rows\[0\]") as caught:
        read_proof(data)
    assert caught.value.pointer == "/parts/1/rows/0"


@pytest.mark.thorough
def test_equal_layers_are_proved_once() -> None:
    """Of 36 layers near their least budget: each window that is proved stands for all that equal it."""
    graph = instance("gpt-36")
    problem = Problem(graph, int(1.05 * pair_need(graph).least_bytes))
    asked = 0

    def prover(window: Problem, until: Deadline) -> tuple[int, StageProof] | None:
        nonlocal asked
        asked += 1
        answer = solve(window, method="staged", time_limit_s=max(0.1, min(4.0, until.remaining())), max_gap=0.02)
        if not isinstance(answer.proof, StageProof) or answer.bound_ns is None:
            return None
        return answer.bound_ns, answer.proof

    incumbent = Incumbent(problem, Deadline(120), certify=True, cancelled=lambda: asked >= 9)
    prove_by_windows(incumbent, prover)
    proof = incumbent.known.proof
    assert len(proof.windows) > 20 * len(proof.parts)
    assert 1.2 * graph.total_cost_ns < incumbent.bound_ns == prove(problem, proof).bound_ns
    cheap = solve(problem, method="blocks", time_limit_s=20)
    assert cheap.cost_ns is None or cheap.cost_ns >= incumbent.bound_ns


@pytest.mark.thorough
def test_windows_are_for_deep_networks_near_the_least_budget() -> None:
    def prover(window: Problem, until: Deadline) -> None:
        raise AssertionError("there is nothing to prove here")

    for name, fraction in (("gpt-36", 0.5), ("dag-100", 0.75), ("vgg-8", 0.5)):
        prove_by_windows(Incumbent(posed(instance(name), fraction), Deadline(60), certify=True), prover)
