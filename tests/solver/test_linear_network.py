"""Linear networks as they are captured: recognised, and planned by the best persistent schedule of their stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples, linear_graphs, sequences
from remat_ir import Answer, Chain, Graph, Problem, Status, budget_at, graph_of, plain_peak, plan_of, replay, verify
from remat_ir.plan import without_unread
from remat_solver import solve, sweep
from remat_solver.bounds import pair_need
from remat_solver.chain.network import linear_network
from remat_solver.chain.persistent import LeastOfStages, Persistent, Stages
from remat_solver.deadline import TimeUp
from remat_solver.methods.structured import SOON
from solver.chain_brute import best_cost
from solver.little import Written
from solver.stops import After
from tiers import first

SETTINGS = settings(max_examples=examples(40), deadline=None, derandomize=True)


def captured(seed: int, *, head: bool = False) -> Graph:
    """A linear network as capture gives it: several ops a layer, statistics, kept gradients, tapes read in part.

    With a `head`, ops without a backward part follow, of which the first backward op reads what is small: a loss.
    """
    draw, on = random.Random(seed), Written()
    keep: list[int] = []
    layers: list[tuple[list[int], list[list[int]]]] = []
    now: list[int] = []
    for _ in range(draw.randint(2, 4)):
        made: list[list[int]] = []
        before = now
        for _ in range(draw.randint(1, 2)):
            made.append(on.op(draw.randint(1, 5), now, draw.randint(1, 6), *([2] if draw.random() < 0.4 else [])))
            now = made[-1][:1]
        layers.append((before, made))
    loss: list[int] = []
    if head:
        # next to these, all that the head makes is small enough to be passed to the backward pass
        on.sizes = [100 * size for size in on.sizes]
        for _ in range(draw.randint(1, 3)):
            now = on.op(draw.randint(1, 5), now, 1)
            loss += now if draw.random() < 0.7 else []
        loss += [v for _, made in layers for values in made for v in values[1:] if draw.random() < 0.2]
    split = len(on.costs)
    gradient = on.op(0, loss + now if draw.random() < 0.5 else loss, draw.randint(1, 4))[0]
    for before, made in reversed(layers):
        for values in reversed(made):
            reads = [gradient, *(v for v in values if draw.random() < 0.7), *(before if draw.random() < 0.5 else [])]
            own = on.op(draw.randint(1, 5), reads, draw.randint(1, 4), *([3] if draw.random() < 0.5 else []))
            gradient = own[0]
            keep += own[1:]
    return on.graph(keep=tuple(keep), backward_from=split)


def counted(stages: Stages, s: int, t: int, joined: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """All persistent schedules of stages s … t, by the recursion's words and without its memory, each with the peak
    that it counts beyond what leads into s.
    """
    if stages.nothing_after(s, t):
        yield (), 0
        return
    run, back = stages.run_with_tape(s, t, joined).ops, stages[s].backward.ops
    need = stages.needed_with_tape(s, t, joined)
    if s == t:
        yield run + back, need
    else:
        for rest, peak in counted(stages, s + 1, t, joined):
            yield run + rest + back, max(need, stages[s].tape_bytes + peak)
    first = t == stages.count
    base = 0 if first else stages[t].held_bytes + (stages[t].leads_bytes if joined else 0)
    for k in range(s + 1, t + 1):
        before = tuple(
            op for stage in range(s, k) for op in (stages[stage].forward if first else stages[stage].again).ops
        )
        way = int(stages.highest[first][s, k - 1]) + base
        for after, beyond in counted(stages, k, t, joined):
            for there in (False, True) if stages[k - 1].retaped is not None else (False,):
                for own, within in counted(stages, s, k - 1, there):
                    yield before + after + own, max(way, stages[k - 1].leads_bytes + beyond, within)


@pytest.mark.parametrize("head", [False, True])
def test_no_schedule_needs_more_than_is_counted_for_it(head: bool) -> None:
    """Also where the first backward op reads what stages without a backward part have made."""
    passed = 0
    for seed in range(60):
        network = linear_network(graph := captured(seed, head=head))
        if network is None:
            continue
        stages, passed = Stages(network), passed + bool(network.passed)
        for sequence, peak in itertools.islice(counted(stages, 1, stages.count, False), 20):
            plan = plan_of(graph, without_unread(graph, sequence))
            assert max(moment.peak_bytes for moment in replay(graph, plan)) <= graph.fixed_bytes + peak, seed
    assert passed or not head


@pytest.mark.parametrize(
    ("name", "factor"), first(1, [("gpt-24", 1.01), *((n, f) for n in ("gpt-36", "gpt-24") for f in (1.0, 1.03))])
)
def test_budgets_near_the_least_of_a_deep_transformer(name: str, factor: float) -> None:
    """The logits are read by the first backward op: what is promised to suffice counts them, and a plan fits it."""
    graph = instance(name)
    problem = Problem(graph, int(factor * pair_need(graph).least_bytes))
    for method in ("rotor", "revolve"):
        answer = solve(problem, method=method)
        assert answer.plan is not None or answer.status is Status.NOTHING_FOUND
        assert answer.dropped_methods == ()
        assert answer.least_budget_bytes is not None
    network = linear_network(graph)
    least = LeastOfStages(Stages(network))
    assert verify(Problem(graph, least.budget_bytes), network.invert(least.sequence())).cost_ns


def test_a_sweep_goes_through_the_budgets_near_the_least() -> None:
    graph = instance("gpt-24")
    least = pair_need(graph).least_bytes
    answers = sweep(graph, [least, int(1.01 * least), 2 * least], method="rotor")
    assert [answer.dropped_methods for answer in answers] == [()] * 3
    assert answers[-1].plan is not None


def all_plans(graph: Graph, stages: Stages) -> list[tuple[int, int]]:
    """Cost and peak of every persistent schedule's plan, by replay."""
    found = []
    for sequence in {sequence for sequence, _ in counted(stages, 1, stages.count, False)}:
        moments = list(replay(graph, plan_of(graph, without_unread(graph, sequence))))
        found.append((moments[-1].cost_ns, max(moment.peak_bytes for moment in moments)))
    return found


@SETTINGS
@given(graph=linear_graphs(least_layers=2, most_layers=5))
def test_exact_against_all_schedules_of_a_linear_graph(graph: Graph) -> None:
    network = linear_network(graph)
    stages = Stages(network)
    plans = all_plans(graph, stages)
    least = min(peak for _, peak in plans)
    assert LeastOfStages(stages).budget_bytes == least
    for budget in range(least, plain_peak(graph) + 1):
        best = min(cost for cost, peak in plans if peak <= budget)
        assert Persistent(stages, budget, slots=10_000).added_ns == best - graph.total_cost_ns
        answer = solve(Problem(graph, budget), method="rotor", max_gap=0, options={"slots": 10_000})
        assert answer.cost_ns == best
        assert answer.status is Status.OPTIMAL


@pytest.mark.parametrize("seed", first(8, range(60)))
def test_between_the_bound_and_all_schedules_of_a_captured_network(seed: int) -> None:
    """Stages count what leads in, and their tapes, to their ends; a replay may free some sooner."""
    graph = captured(seed)
    network = linear_network(graph)
    if network is None:  # a tape that the next stage reads made all of it one stage
        return
    stages = Stages(network)
    plans = all_plans(graph, stages)
    least = LeastOfStages(stages)
    assert least.budget_bytes >= min(peak for _, peak in plans)
    for budget in range(least.budget_bytes, plain_peak(graph) + 1):
        problem = Problem(graph, budget)
        answer = solve(problem, method="rotor", max_gap=0, options={"slots": 10_000})
        cost = verify(problem, answer.plan).cost_ns
        assert cost >= min(c for c, peak in plans if peak <= budget)
        assert answer.bound_ns <= cost


@SETTINGS
@given(chains(most_stages=6), st.data())
def test_a_lift_costs_what_its_chain_does(chain: Chain, data: st.DataObject) -> None:
    if chain.stages == 1:
        return
    graph = chain.to_graph()
    network = linear_network(graph)
    assert network.stages == chain.stages
    budget = data.draw(st.integers(LeastOfStages(Stages(network)).budget_bytes, 2 * plain_peak(chain) + 1))
    plan = solve(Problem(graph, budget), method="rotor", max_gap=0, options={"slots": 20_000})
    assert plan.cost_ns is not None
    best = best_cost(chain, budget)
    assert best is None or plan.cost_ns <= best


@SETTINGS
@given(graph=linear_graphs(most_layers=8), data=st.data())
def test_sequences_of_ops_are_plans_of_a_linear_network(graph: Graph, data: st.DataObject) -> None:
    network = linear_network(graph)
    if network is not None:
        sequence = data.draw(sequences(graph))
        verdict = verify(Problem(graph, 2**50), network.invert(sequence))
        assert graph.total_cost_ns <= verdict.cost_ns <= sum(graph.op_cost_ns[op] for op in sequence)


@pytest.mark.parametrize(
    ("name", "share"), first(2, [("gpt-6", 0.8), ("vgg-13", 0.95), ("gpt-6", 0.5), ("resnet-16", 0.5)])
)
def test_networks_of_blocks_are_linear_and_auto_names_their_persistent_optimum(name: str, share: float) -> None:
    graph = instance(name)
    network = linear_network(graph)
    assert network is not None
    problem = Problem(graph, budget_at(graph, share))
    chain = solve(problem, method="rotor")
    assert chain.plan is not None
    found: list[str] = []
    answer = solve(problem, time_limit_s=2, on_progress=lambda news: found.append(news.source))
    assert found[0] == "rotor"
    assert "persistent chain schedule" in answer.message
    assert answer.chain_cost_ns == chain.cost_ns
    assert answer.chain_overhead == pytest.approx(chain.overhead)
    assert Answer.from_json(answer.to_json()).chain_cost_ns == answer.chain_cost_ns
    (swept,) = sweep(graph, [problem.budget_bytes], time_limit_s=2)
    assert swept.chain_cost_ns == answer.chain_cost_ns
    assert answer.cost_ns <= chain.cost_ns


@pytest.mark.thorough
def test_a_deep_linear_network_does_not_wait_for_its_program() -> None:
    """129 stages: the first plan comes from elsewhere, no baseline is named, and the method is still there by name."""
    graph = instance("vgg-120")
    network = linear_network(graph)
    assert network.stages > SOON
    problem = Problem(graph, budget_at(graph, 0.5))
    found: list[str] = []
    answer = solve(problem, time_limit_s=1, on_progress=lambda news: found.append(news.source))
    assert answer.cost_ns is not None
    assert answer.chain_cost_ns is None
    assert "rotor" not in found
    chain = solve(problem, method="rotor", time_limit_s=60)
    assert verify(problem, chain.plan).cost_ns == chain.cost_ns


def test_long_skips_make_a_network_not_linear() -> None:
    assert linear_network(instance("unet-4")) is None


def test_a_small_value_that_lives_throughout_stays() -> None:
    """A mask that every layer reads: the layers are stages nevertheless, and the mask is never made again."""
    layers = 12
    inputs: list[list[int]] = [[], [0]] + [[0, i] for i in range(1, layers)]
    last = len(inputs) - 1
    inputs += [[last]]
    inputs += [[0, i, len(inputs) - 1 + (last - i)] for i in range(last, 0, -1)]
    graph = graph_of([3] * len(inputs), [1] + [40] * (len(inputs) - 1), inputs, backward_from=last + 1)
    network = linear_network(graph)
    assert network.stays == {0}
    answer = solve(Problem(graph, budget_at(graph, 0.7)), method="rotor")
    assert answer.plan.computes.count(0) == 1


def test_the_stages_of_a_network_stop_where_they_are_told_to() -> None:
    """They look once a stage, and the search for the schedule that fits once a try; without a try there is none."""
    network = linear_network(instance("gpt-4-whole"))
    for most in range(network.stages):
        stop = After(most)
        with pytest.raises(TimeUp):
            Stages(network, stop)
        assert stop.polls == most + 1
    stages = Stages(network, After(network.stages))
    table = Persistent(stages, plain_peak(network.graph), slots=50, stop=After(network.stages))
    assert table.cheapest(network.invert) is None
