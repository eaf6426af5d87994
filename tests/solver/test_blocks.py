"""Segments, repeated blocks, and the plans of the program over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.graphs.instances import instance
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import examples, posed
from remat_ir import Graph, Problem, Status, graph_of, plain_peak, verify
from remat_ir.graph import working_set
from remat_solver import solve
from remat_solver.array_view import trace, view_of
from remat_solver.blocks.plans import menus_of, plans_by_blocks, sequence_of
from remat_solver.blocks.segments import Run, block_of, joined, runs_of, segments_of
from remat_solver.blocks.table import NEVER, BlockTable
from remat_solver.deadline import Deadline, TimeUp
from remat_solver.incumbent import Incumbent
from remat_solver.kernels import loading
from solver.little import little_graph
from solver.stops import After
from tiers import first

NETWORKS = ("gpt-3", "gpt-3-whole", "resnet-4", "resnet-4-whole", "densenet-8-whole", "vgg-8-whole", "unet-2", "tape-8")


def kinds_of(graph: Graph) -> list[int]:
    """[segments] a number for each kind of block, in order of appearance."""
    segments = segments_of(graph)
    known: dict[Graph, int] = {}
    return [known.setdefault(block_of(segments, i).graph, len(known)) for i in range(segments.count)]


@given(st.lists(st.integers(0, 2), max_size=40))
def test_runs_are_periodic_and_do_not_overlap(kinds: list[int]) -> None:
    end = 0
    for start, period, times in runs_of(kinds):
        assert start >= end
        assert times >= 2
        end = start + period * times
        assert end <= len(kinds)
        assert all(kinds[i] == kinds[i + period] for i in range(start, end - period))


def test_the_longest_run_is_taken_with_its_shortest_period() -> None:
    assert runs_of("xABABABy") == [Run(1, 2, 3)]
    assert runs_of("AAAA") == [Run(0, 1, 4)]
    assert runs_of("AABAAB") == [Run(0, 3, 2)]
    assert runs_of("ABC") == []


def test_the_layers_of_a_network_are_found_to_be_equal() -> None:
    short, long = kinds_of(instance("gpt-6")), kinds_of(instance("gpt-24"))
    assert max(short) == max(long)
    assert [(run.period, run.times) for run in runs_of(long)] == [(2, 24)]


def test_a_block_that_differs_in_anything_is_no_repeat() -> None:
    graph = instance("gpt-6")
    segments = segments_of(graph)
    op = segments.forward(7).start
    value = graph.op_values[op][0]
    costs, sizes = list(graph.op_cost_ns), list(graph.value_bytes)
    costs[op] += 1
    sizes[value] += 1
    before = kinds_of(graph)
    for changed in (replace(graph, op_cost_ns=tuple(costs)), replace(graph, value_bytes=tuple(sizes))):
        after = kinds_of(changed)
        assert after[7] != after[5]
        assert before[7] == before[5]
        assert max(after) > max(before)


def check_partition(graph: Graph) -> None:
    segments = segments_of(graph)
    if segments is None:
        return
    forward = [op for i in range(segments.count) for op in segments.forward(i)]
    backward = [op for i in reversed(range(segments.count)) for op in segments.backward(i)]
    assert forward + backward == list(range(graph.ops))
    for i in range(segments.count):
        block = block_of(segments, i)
        assert sum(block.graph.op_cost_ns) == sum(
            graph.op_cost_ns[op] for op in (*segments.forward(i), *segments.backward(i))
        )


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(4, 24), st.booleans())
def test_segments_share_out_all_ops(seed: int, ops: int, rich: bool) -> None:
    check_partition(little_graph(seed, ops, rich=rich))


@pytest.mark.parametrize("name", first(3, NETWORKS))
def test_joining_keeps_repeats(name: str) -> None:
    graph = instance(name)
    check_partition(graph)
    segments = segments_of(graph)
    fewer, blocks = joined(segments, 6)
    assert fewer.count == len(blocks) <= max(6, segments.count // 2)
    assert fewer.ends[-1] == segments.ends[-1]
    long, of_long = joined(segments_of(instance("gpt-64")) or segments, 40)
    assert long.count <= 40
    assert len({block.graph for block in of_long}) <= 6


@pytest.mark.parametrize("name", first(3, NETWORKS))
def test_a_plan_costs_what_the_program_says(name: str) -> None:
    graph = instance(name)
    segments = segments_of(graph)
    segments, blocks = joined(segments, 40)
    menus = menus_of(blocks)
    # a hundredth more than the plain peak, for what is rounded
    program = BlockTable(segments, menus, plain_peak(graph) * 101 // 100, 512)
    costs = program.costs()
    assert np.all(np.diff(costs) <= 0)
    assert costs[-1] * program.unit_ns <= graph.total_cost_ns < (costs[-1] + graph.ops) * program.unit_ns
    view = view_of(Problem(graph, plain_peak(graph)))
    for slots in sorted({int(np.flatnonzero(costs < NEVER)[0]), 200, 300, 400, 511}):
        if costs[slots] < NEVER:
            order = sequence_of(segments, menus, program.items(slots))
            cost = sum(graph.op_cost_ns[op] for op in order)
            # each item was rounded down to whole units; what nothing reads is left out
            assert cost <= (int(costs[slots]) + len(order)) * program.unit_ns
            assert trace(view, order).memory.min() >= 0


def test_the_table_stops_where_it_is_told_to() -> None:
    graph = instance(NETWORKS[0])
    segments = segments_of(graph)
    segments, blocks = joined(segments, 40)
    menus = menus_of(blocks)
    for most in (0, segments.count // 2, segments.count - 1):
        stop = After(most)
        with pytest.raises(TimeUp):
            BlockTable(segments, menus, plain_peak(graph), 64, stop)
        assert stop.polls == most + 1
    BlockTable(segments, menus, plain_peak(graph), 64, After(segments.count))


@pytest.mark.parametrize("name", first(2, NETWORKS))
@pytest.mark.parametrize("fraction", [0.7, 0.4])
def test_plans_of_the_method_are_valid_and_near_those_of_the_search(name: str, fraction: float) -> None:
    graph = instance(name)
    least = working_set(graph).least_bytes
    problem = Problem(graph, least + int(fraction * (plain_peak(graph) - least)))
    answer = solve(problem, method="blocks", time_limit_s=30)
    searched = solve(problem, method="search", time_limit_s=30, options={"iterations": 30_000})
    assert searched.cost_ns is None or answer.cost_ns <= 1.1 * searched.cost_ns


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(10, 26), st.booleans(), st.floats(0.05, 0.95))
def test_plans_of_any_graph_are_valid(seed: int, ops: int, rich: bool, share: float) -> None:
    graph = little_graph(seed, ops, rich=rich)
    assume(segments_of(graph) is not None)
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    problem = Problem(graph, least + int(share * (plain - least)))
    assume(problem.budget_bytes < plain)
    incumbent = Incumbent(problem, Deadline(20))
    assert loading().wait(60)
    plans_by_blocks(incumbent)  # the verifier sees every plan, and raises where one is wrong
    if incumbent.plan is not None:
        assert incumbent.known.verdict == verify(problem, incumbent.plan)


def test_a_deep_network_has_a_plan_near_the_least_budget() -> None:
    graph = instance("gpt-64")
    least = working_set(graph).least_bytes
    answer = solve(Problem(graph, least + least // 20), method="blocks", time_limit_s=60)
    assert answer.plan is not None


@pytest.mark.thorough
def test_the_same_plan_every_time() -> None:
    problem = posed(instance("resnet-8-whole"), 0.5)
    assert len({solve(problem, method="blocks", time_limit_s=60).plan for _ in range(2)}) == 1


def test_graphs_without_narrow_places_are_told() -> None:
    graph = graph_of([1] * 6, [1] * 6, [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
    answer = solve(Problem(graph, 6), method="blocks", time_limit_s=10)
    assert answer.status is Status.NOTHING_FOUND
    assert "no narrow places" in answer.message
