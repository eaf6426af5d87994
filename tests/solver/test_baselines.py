"""The baselines: as published on linear graphs, valid on all graphs, and optimal in R for their S."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, layered, linear_graphs, problems
from remat_ir import Graph, InvalidData, Problem, Status, graph_of, plain_peak, plan_of, recomputed, verify
from remat_ir.graph import pinned_ops
from remat_solver import solve
from remat_solver.baselines.heuristics import BASELINES, articulation_points, linear
from remat_solver.baselines.recompute import computed, merged, plan_as_given
from remat_solver.baselines.retained import advances, by_size, every_root, revolve_retained, snapshots
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from solver.stops import After

SETTINGS = settings(max_examples=examples(80), deadline=None, derandomize=True)
ROOMY = 2**40
ON_LINEAR = ("griewank", "chen-sqrt", "chen-greedy")
ON_ALL = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")


def unit(layers: int) -> Graph:
    """A linear training graph where all costs and sizes are 1; a backward op reads its layer's input and output."""
    return graph_of([1] * 2 * layers, [1] * 2 * layers, layered(layers), backward_from=layers)


# --- the optimal R for a given S


def any_retained(graph: Graph, data: st.DataObject) -> list[list[tuple[int, int]]]:
    """Any S: up to two runs of stages for each value, after its op."""
    stages = [st.integers(op + 1, graph.ops) for op in graph.value_op]
    return [merged(data.draw(st.lists(st.tuples(stage, stage), max_size=2))) for stage in stages]


@SETTINGS
@given(graph=graphs(most_ops=6), data=st.data())
def test_r_is_optimal_for_s(graph: Graph, data: st.DataObject) -> None:
    """Row by row, no smaller set of ops makes what op t reads and what S adds: by trying all sets."""
    retained = any_retained(graph, data)
    verify(Problem(graph, ROOMY), plan_of(graph, computed(graph, retained)))
    graph = replace(graph, consumes=())  # which may leave a row less than S demands
    pinned, order = pinned_ops(graph), computed(graph, retained)
    verify(Problem(graph, ROOMY), plan_of(graph, order))
    ends = [i for i in range(len(order)) if order[i] not in order[:i]]
    rows = [order[(ends[t - 1] + 1 if t else 0) : ends[t] + 1] for t in range(graph.ops)]

    def held(stage: int) -> set[int]:
        return {
            v
            for v, op in enumerate(graph.value_op)
            if op < stage and (op in pinned or any(a <= stage <= b and a < graph.ops for a, b in retained[v]))
        }

    for stage, row in enumerate(rows):
        assert row[-1] == stage
        assert sum(graph.op_cost_ns[op] for op in row) == cheapest_row(graph, stage, held(stage), held(stage + 1))


def cheapest_row(graph: Graph, stage: int, start: set[int], end: set[int]) -> int:
    best = None
    for count in range(stage + 1):
        for extra in combinations(range(stage), count):
            have, fits = set(start), True
            for op in (*extra, stage):
                fits &= set(graph.op_inputs[op]) <= have
                have |= set(graph.op_values[op])
            cost = sum(graph.op_cost_ns[op] for op in (*extra, stage))
            if fits and end <= have and (best is None or cost < best):
                best = cost
    assert best is not None
    return best


def test_r_refuses_what_cannot_be_retained() -> None:
    with pytest.raises(ValueError, match="value 1 is retained at stage 1, before op 1"):
        computed(unit(2), [[], [(1, 2)], [], []])


@SETTINGS
@given(graph=graphs(most_ops=7), data=st.data())
def test_freeing_as_the_paper_counts_needs_no_less(graph: Graph, data: st.DataObject) -> None:
    """Any S: the plan is valid, runs the same ops, and holds at least what freeing after the last use holds."""
    retained = any_retained(graph, data)
    order = computed(graph, retained)
    plan = plan_as_given(graph, retained)
    assert list(plan.computes) == order
    held = verify(Problem(graph, ROOMY), plan)
    sooner = verify(Problem(graph, ROOMY), plan_of(graph, order))
    assert held.cost_ns == sooner.cost_ns
    assert held.peak_bytes >= sooner.peak_bytes


@SETTINGS
@given(graph=graphs(most_ops=7, whole=False), data=st.data())
def test_the_papers_memory_is_equations_2_to_5(graph: Graph, data: st.DataObject) -> None:
    """On graphs as the paper's, with R and S as matrices and U by its recurrences."""
    n = graph.ops
    retained = [
        merged(data.draw(st.lists(st.tuples(st.integers(op + 1, n - 1), st.integers(op + 1, n - 1)), max_size=2)))
        if op < n - 1
        else []
        for op in range(n)
    ]
    s = [[any(a <= t <= b for a, b in retained[i]) for i in range(n)] for t in range(n)] + [[False] * n]
    r = [[False] * n for _ in range(n)]
    stage = 0
    for op in computed(graph, retained):
        r[stage][op] = True
        stage += op == stage
    used = []
    for t in range(n):
        u = graph.fixed_bytes + sum(graph.value_bytes[i] for i in range(n) if s[t][i])  # (2)
        for k in range(t + 1):
            u += graph.value_bytes[k] * r[t][k]  # (3)
            used.append(u + graph.op_workspace_bytes[k] * r[t][k])
            for i in sorted({*graph.op_inputs[k], k}):  # (4), (5)
                later = any(r[t][j] for j in range(k + 1, t + 1) if i in graph.op_inputs[j])
                u -= graph.value_bytes[i] * (r[t][k] and not later and not s[t + 1][i])
    assert verify(Problem(graph, ROOMY), plan_as_given(graph, retained)).peak_bytes == max(used)


@pytest.mark.parametrize("method", ["ap-sqrt", "chen-sqrt", "linearized-sqrt"])
def test_freeing_is_an_option_of_the_baselines(method: str) -> None:
    """Checkpoints that are held to the end cost memory where the last op is large, and no time."""
    graph = replace(unit(16), value_bytes=(1,) * 31 + (20,))
    sooner = solve(Problem(graph, ROOMY), method=method, max_gap=0)
    held = solve(Problem(graph, ROOMY), method=method, max_gap=0, options={"freeing": "paper"})
    assert sooner.cost_ns == held.cost_ns
    assert held.peak_bytes > sooner.peak_bytes
    with pytest.raises(InvalidData, match="freeing must be one of last-use, paper, not 'late'"):
        solve(Problem(graph, ROOMY), method=method, options={"freeing": "late"})


def test_merged_runs() -> None:
    assert merged([(5, 6), (1, 2), (3, 3), (9, 8), (6, 8)]) == [(1, 3), (5, 8)]


# --- as published


@pytest.mark.parametrize("root", range(1, 8))
def test_chen_sqrt_on_unit_chains(root: int) -> None:
    """n = k² layers: checkpoints at every k-th, the last segment still there: (k − 1)² recomputations."""
    graph = unit(root * root)
    plan = solve(Problem(graph, ROOMY), method="chen-sqrt").plan
    again = recomputed(plan, graph.ops)
    marks = set(range(root - 1, root * root - 1, root))
    expected = [int(i < root * (root - 1) and i not in marks) for i in range(root * root)]
    assert again == expected + [0] * root * root
    # k − 1 checkpoints, a segment of at most k values, a gradient and the one that it becomes
    assert verify(Problem(graph, ROOMY), plan).peak_bytes <= 2 * root + 1


def test_chen_roots() -> None:
    assert every_root(range(16)) == (3, 7, 11)
    assert every_root(range(10)) == (3, 7)
    assert every_root(range(1)) == ()
    assert every_root([]) == ()


def test_chen_greedy_closes_segments_by_size() -> None:
    """Algorithm 3 by hand: sizes 4 4 1 1 5 5, b = 6: closes at the op that goes above b."""
    graph = graph_of([1] * 6, [4, 4, 1, 1, 5, 5], [[i - 1] if i else [] for i in range(6)], backward_from=5)
    assert by_size(graph, 6, range(6), 6) == (1, 4)
    assert by_size(graph, 6, range(6), 7) == (1, 5)
    assert by_size(graph, 6, range(6), 8) == (2, 5)
    assert by_size(graph, 6, [0, 3], 6) == (3,)


@pytest.mark.parametrize("slots", range(1, 8))
def test_revolve_reaches_its_formula(slots: int) -> None:
    """The schedule runs t(l, c) advances next to l turns, and the formula is the optimum of the recursion."""
    for length in range(1, 25):
        assert advances(length, slots) == fewest_advances(length, slots)
        graph = unit(length)
        order = computed(graph, revolve_retained(graph, length, slots))
        forward = [op for op in order if op < length]
        assert len(forward) == length + advances(length, slots)
        assert [op for op in order if op >= length] == list(range(length, 2 * length))


@cache
def fewest_advances(length: int, slots: int) -> int:
    """By the recursion: advance m steps, snapshot there, reverse the rest with one slot less, then the first m."""
    if length <= 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(m + fewest_advances(length - m, slots - 1) + fewest_advances(m, slots) for m in range(1, length))


@pytest.mark.parametrize("slots", range(1, 6))
def test_revolve_holds_no_more_than_its_slots(slots: int) -> None:
    """Memory on unit chains: c − 1 snapshots besides the input, the step's input and output, two gradients."""
    graph = unit(20)
    plan = plan_of(graph, computed(graph, revolve_retained(graph, 20, slots)))
    assert verify(Problem(graph, ROOMY), plan).peak_bytes <= slots - 1 + 4


def test_revolve_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slot"):
        list(snapshots(4, 0))


def test_griewank_uses_few_slots_on_long_chains() -> None:
    """Logarithmic memory: 100 layers at the memory of 12, which no √n scheme reaches."""
    graph = unit(100)
    answer = solve(Problem(graph, 12), method="griewank")
    assert answer.status is Status.FEASIBLE
    assert answer.cost_ns <= 100 * 6
    assert solve(Problem(graph, 12), method="chen-greedy").status is Status.NOTHING_FOUND


# --- shape


@SETTINGS
@given(graph=linear_graphs())
def test_linear_graphs_are_linear_and_cut_everywhere(graph: Graph) -> None:
    layers = graph.ops // 2
    assert linear(graph, layers)
    assert articulation_points(graph, layers) == list(range(layers))


def test_articulation_points_of_residual_blocks() -> None:
    """0 → (1 → 2), + at 3 → 4: the inside of the block is no candidate; 5 hangs from 4 and cuts nothing off."""
    inputs = [[], [0], [1], [0, 2], [3], [4], [4], []]
    graph = graph_of([1] * 8, [1] * 8, inputs, backward_from=7)
    assert articulation_points(graph, 7) == [0, 3, 4, 6]
    assert not linear(graph, 7)


@SETTINGS
@given(graph=linear_graphs(most_layers=8), part=st.integers(6, 20))
def test_generalizations_reproduce_the_originals(graph: Graph, part: int) -> None:
    """On linear graphs AP and linearized plans are Chen's, plan by plan."""
    problem = Problem(graph, plain_peak(graph) * part // 20)
    for kind in ("sqrt", "greedy"):
        plans = [solve(problem, method=f"{name}-{kind}", max_gap=0).plan for name in ("chen", "ap", "linearized")]
        assert plans[0] == plans[1] == plans[2]


# --- in the whole model


@SETTINGS
@given(problem=problems(graphs(most_ops=9)))
@pytest.mark.parametrize("method", ON_LINEAR + ON_ALL)
def test_whole_model(method: str, problem: Problem) -> None:
    """Any plan passes the verifier inside `solve`; where there is none, a sentence says why."""
    answer = solve(problem, method=method, max_gap=0)
    if answer.plan is None:
        assert answer.status in (Status.INFEASIBLE, Status.NOTHING_FOUND)
        assert answer.message.endswith(".")
        assert "does not apply" in answer.message or re.search(r"\d (B|[KMGT]iB)\b", answer.message)
    else:
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)


@pytest.mark.parametrize("method", ON_ALL)
def test_with_room_greedy_is_checkpoint_all(method: str) -> None:
    graph = unit(9)
    answer = solve(Problem(graph, ROOMY), method=method, max_gap=0)
    assert (answer.status is Status.OPTIMAL) == method.endswith("greedy")


@pytest.mark.parametrize("method", ON_LINEAR)
def test_what_needs_a_linear_graph_says_so(method: str) -> None:
    graph = graph_of([1] * 6, [1] * 6, [[], [0], [0, 1], [2], [1, 3], [0, 4]], backward_from=3)
    answer = solve(Problem(graph, 4), method=method)
    assert answer.status is Status.NOTHING_FOUND
    assert answer.message == f"{method} does not apply: the forward pass is not linear."


@pytest.mark.parametrize("method", ON_LINEAR + ON_ALL)
def test_without_a_backward_pass(method: str) -> None:
    answer = solve(Problem(graph_of([1, 1], [1, 1], [[], [0]]), 5), method=method)
    assert answer.message == f"{method} does not apply: the graph marks no backward pass after a forward one."


def test_least_peak_is_told() -> None:
    graph = unit(16)
    answer = solve(Problem(graph, 4), method="chen-sqrt")
    assert answer.status is Status.NOTHING_FOUND
    told = int(answer.message.split("least peak is ")[1].split()[0])
    assert solve(Problem(graph, told), method="chen-sqrt").status is Status.FEASIBLE
    assert solve(Problem(graph, told - 1), method="chen-sqrt").status is Status.NOTHING_FOUND


def test_several_values_an_op() -> None:
    """A layer that makes an activation and an optional tape: the tape of a checkpointed layer is made again."""
    graph = Graph(
        op_cost_ns=(3, 3, 3, 3, 1, 1, 1, 1),
        op_inputs=((), (0,), (2,), (4,), (6, 7), (5, 8), (3, 9), (1, 10)),
        value_op=(0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7),
        value_bytes=(1, 8, 1, 8, 1, 8, 1, 8, 1, 1, 1, 1),
        optional=(1, 3, 5, 7),
        backward_from=4,
    )
    plan = solve(Problem(graph, ROOMY), method="linearized-sqrt").plan
    assert recomputed(plan, graph.ops)[:4] == [1, 1, 0, 0]
    assert verify(Problem(graph, ROOMY), plan).peak_bytes < plain_peak(graph)


def test_a_baseline_offers_nothing_once_it_is_cancelled() -> None:
    """It looks before it makes a plan, whose replay takes longest, of what it found."""
    graph = graph_of([10] * 40, [100] * 40, layered(20, read_inputs=False), backward_from=20)
    for polls in (0, 1):
        cancelled = After(polls)
        incumbent = Incumbent(Problem(graph, plain_peak(graph)), Deadline(None), cancelled=cancelled)
        BASELINES["linearized-sqrt"](incumbent)
        assert (incumbent.plan is None) == (polls == 0)
        assert cancelled.polls <= polls + 1
