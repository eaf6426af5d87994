"""Pipelines: what ranks hold by their schedule's actions, the exact choice, halves of backward passes, real ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

import remat
from client.small_models import FeedForward
from client.test_ranks import ran
from drawn import examples
from remat.capture.operations import Kind
from remat.compile.plans import point_of, unit_problem
from remat.pipelines.choice import Place, choose, combinations, least_budget, peak_of, places_of, times_of
from remat.pipelines.schedule import Held, Run, Timeline, Times, actions_of, in_halves, residency
from remat.pipelines.stage import Stage, Trace
from remat.planning.division import Option
from remat.planning.options import SolveOptions
from remat.planning.planner import planner_for
from remat.training.backward import Halves
from remat_ir import InvalidData, plain_plan, verify
from remat_ir.greedy import checkpointed

NAMES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
ALL = (*NAMES, "ScheduleZBVZeroBubble")


@pytest.fixture(scope="module")
def fake_ranks() -> Iterator[None]:
    """A group of two ranks of which the other is nobody: enough to make schedules."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def schedule(name: str, micros: int = 4) -> Any:
    """One of torch's for two ranks, made on the first."""
    count = 2 if name in NAMES[:2] else 4
    mine = {2: [0], 4: [0, 3] if "ZBV" in name else [0, 2]}[count]
    stages = [pipelining.PipelineStage(nn.Linear(2, 2), i, count, torch.device("cpu")) for i in mine]
    made = getattr(pipelining, name)
    return made(stages[0] if count == 2 else stages, micros, loss_fn=lambda y, t: (y - t).sum())


@pytest.mark.parametrize("micros", [2, 4, 8])
@pytest.mark.parametrize("name", ALL)
def test_what_is_held_is_what_a_naive_run_of_the_actions_holds(fake_ranks: None, name: str, micros: int) -> None:
    """Micro-batches as sets, filled and emptied one action after the other."""
    ranks, halved = actions_of(schedule(name, micros)), in_halves(schedule(name, micros))
    assert sorted(run for runs in ranks for run in runs) == sorted(
        Run(kind, stage, micro)
        for kind in ("forward", "backward", "weight")
        for stage in range(2 if name in NAMES[:2] else 4)
        for micro in range(micros)
    )
    assert halved == (frozenset(range(4)) if "Zero" in name else frozenset())
    for runs in ranks:
        stages = sorted({run.stage for run in runs})
        runs = [run for run in runs if run.kind != "weight" or run.stage in halved]
        waiting: dict[int, set[int]] = {stage: set() for stage in stages}
        between: dict[int, set[int]] = {stage: set() for stage in stages}

        def held() -> Held:
            return Held(tuple(len(waiting[s]) for s in stages), tuple(len(between[s]) for s in stages))  # noqa: B023

        moments = iter(residency(runs, stages))
        assert next(moments) == (None, -1, held())
        for kind, stage, micro in runs:
            if kind == "backward":
                waiting[stage].remove(micro)
            if kind == "weight":
                between[stage].remove(micro)
            assert next(moments) == (kind, stages.index(stage), held())
            if kind == "forward":
                waiting[stage].add(micro)
            if kind == "backward" and stage in halved:
                between[stage].add(micro)
            assert next(moments) == (None, -1, held())
        assert next(moments, None) is None
        assert not any(waiting.values())
        assert not any(between.values())


def test_earlier_ranks_of_1f1b_hold_more(fake_ranks: None) -> None:
    first, last = actions_of(schedule("Schedule1F1B"))
    most = [max(m.held.forward[0] for m in residency(runs, [s])) for s, runs in ((0, first), (1, last))]
    assert most == [2, 2 - 1]
    every = enumerate(actions_of(schedule("ScheduleGPipe")))
    assert [max(m.held.forward[0] for m in residency(runs, [s])) for s, runs in every] == [4, 4]


def test_a_schedule_that_cannot_be_followed_is_refused() -> None:
    def action(code: str, stage: int, micro: int) -> Any:
        return SimpleNamespace(computation_type=SimpleNamespace(value=code), stage_index=stage, microbatch_index=micro)

    def of(*ranks: str) -> Any:
        listed = [[action(word[1], int(word[0]), int(word[2])) for word in rank.split()] for rank in ranks]
        return SimpleNamespace(pipeline_order=dict(enumerate(listed)))

    with pytest.raises(InvalidData, match="does not list its actions"):
        actions_of(SimpleNamespace())
    with pytest.raises(InvalidData, match="backward pass of micro-batch 0 through stage 0 0 times"):
        actions_of(of("0F0"))
    with pytest.raises(InvalidData, match="forward pass of micro-batch 0 through stage 0 2 times"):
        actions_of(of("0F0 0F0 0B0"))
    with pytest.raises(InvalidData, match="wait for each other"):
        Timeline(actions_of(of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")))
    overlapped = SimpleNamespace(computation_type=SimpleNamespace(value="OVERLAP_F_B"))
    overlapped.sub_actions = (action("F", 0, 1), action("B", 0, 0))
    runs = actions_of(SimpleNamespace(pipeline_order={0: [action("F", 0, 0), None, overlapped, action("B", 0, 1)]}))
    assert [run.kind for run in runs[0]] == ["forward", "forward", "backward", "weight", "backward", "weight"]


def naive_makespan(ranks: list[list[Run]], times: list[Times]) -> int:
    """One nanosecond after the other: every rank begins its next run once what that waits for has ended."""
    stages = len(times)
    ends: dict[Run, int] = {}
    free, position, now = [0] * len(ranks), [0] * len(ranks), 0
    while any(at < len(runs) for at, runs in zip(position, ranks, strict=True)):
        for rank, runs in enumerate(ranks):
            while position[rank] < len(runs) and free[rank] <= now:
                kind, stage, micro = runs[position[rank]]
                needed = {
                    "forward": [Run("forward", stage - 1, micro)] if stage else [],
                    "backward": [Run("forward", stage, micro)]
                    + ([Run("backward", stage + 1, micro)] if stage < stages - 1 else []),
                    "weight": [Run("backward", stage, micro)],
                }[kind]
                if any(ends.get(other, now + 1) > now for other in needed):
                    break
                length = times[stage][("forward", "backward", "weight").index(kind)]
                ends[runs[position[rank]]] = free[rank] = now + length
                position[rank] += 1
        now += 1
    return max(ends.values())


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
@pytest.mark.parametrize("name", ALL)
def test_the_makespan_is_that_of_a_naive_simulation(fake_ranks: None, name: str, data: st.DataObject) -> None:
    ranks = actions_of(schedule(name))
    few = st.integers(1, 5)
    times = data.draw(st.lists(st.builds(Times, few, few, few), min_size=4, max_size=4))
    timeline = Timeline(ranks)
    assert timeline.makespan_ns(times[: timeline.stages]) == naive_makespan(ranks, times[: timeline.stages])


few = st.integers(0, 6)
options = st.builds(
    lambda held, forward, backward, f, b, w, between, weight: Option(
        held, forward, backward, f + b + w, f, w, between, weight
    ),
    *([few] * 8),
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(options, min_size=1, max_size=3), min_size=4, max_size=4), st.integers(10, 60))
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_no_other_choice_is_quicker(fake_ranks: None, name: str, ways: list[list[Option]], budget: int) -> None:
    """Against all choices of plans for all stages; plans that fit the ranks are those that the places say."""
    ranks = actions_of(schedule(name, 3))
    timeline = Timeline(ranks)
    numbers = [sorted({run.stage for run in runs}) for runs in ranks]
    places = [
        [Place(*moment, rest % 3) for rest, moment in enumerate(dict.fromkeys(residency(runs, own)))]
        for runs, own in zip(ranks, numbers, strict=True)
    ]

    def fits(chosen: tuple[Option, ...]) -> bool:
        return all(peak_of(p, [chosen[s] for s in own]) <= budget for p, own in zip(places, numbers, strict=True))

    fitting = [chosen for chosen in product(*ways) if fits(chosen)]
    found = [combinations(p, [ways[s] for s in own], budget) for p, own in zip(places, numbers, strict=True)]
    assert all(found) == bool(fitting)
    least = [least_budget(p, [ways[s] for s in own]) for p, own in zip(places, numbers, strict=True)]
    assert all(one <= budget + 1 for one in least) or not fitting
    if fitting:
        values = [(timeline.makespan_ns(t := list(map(times_of, c))), sum(map(sum, t))) for c in fitting]
        choice = choose(timeline, numbers, found)
        taken = [found[rank][index] for rank, index in enumerate(choice.taken)]
        total = sum(one.total_ns for one in taken)
        assert (choice.makespan_ns, total) == min(values)
        assert choice.bound_ns == choice.makespan_ns
        cut = choose(timeline, numbers, found, most=1)
        assert cut.bound_ns <= choice.makespan_ns <= cut.makespan_ns
        for p, own, one in zip(places, numbers, taken, strict=True):
            assert peak_of(p, [ways[s][i] for s, i in zip(own, one.chosen, strict=True)]) <= budget


@pytest.mark.thorough
def test_what_is_besides_the_plans_is_what_a_step_showed(fake_ranks: None) -> None:
    """Plans taken off and put back give the peaks that were seen, and others differ by what they hold."""
    runs = [run for run in actions_of(schedule("Schedule1F1B"))[0] if run.kind != "weight"]
    moments = residency(runs, [0])
    one, other = Option(3, 5, 7, 1), Option(10, 12, 14, 1)
    peaks = [100 + Place(*moment, 0).bytes([one]) for moment in moments]
    places = places_of(moments, peaks, [one])
    assert {place.rest_bytes for place in places} == {100}
    assert peak_of(places, [one]) == max(peaks) == 100 + 3 + 7
    assert peak_of(places, [other]) == 100 + 10 + 14


def tied() -> nn.Module:
    """A normalization, whose gradients come with those of its input, a tied weight, and dropout."""
    model = FeedForward(16, 16, dropout=0.2)
    model.down.weight = model.up.weight
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("differentiable", [True, False])
def test_halves_are_the_whole(differentiable: bool) -> None:
    """Bit for bit, by a plan that recomputes and by the plain one, with the memory that their phases say."""
    torch.manual_seed(0)
    plain = nn.Sequential(tied(), tied())
    planned, halves = copy.deepcopy(plain), Halves()
    unit = Stage("stage", planned, planner_for("greedy"), SolveOptions(), halves)
    x, seed = torch.randn(64, 16, requires_grad=differentiable), torch.randn(64, 16)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        return [p.grad.clone() for p in (*model.parameters(), x) if p.grad is not None]

    def step(model: nn.Module, second: Any = lambda: None) -> None:
        torch.manual_seed(1)
        model(x).backward(seed)
        second()

    x.grad = None
    for _ in range(2):
        step(plain)
    expected = gradients(plain)
    for make in (checkpointed, plain_plan):
        x.grad = None
        planned.zero_grad()
        if unit.step is not None:
            unit.run_by(unit.carried_out(point_of(unit.step, make(unit.step.graph)).size, make(unit.step.graph)))
        step(planned)
        assert all(p.grad is None for p in planned.parameters()), "those of parameters come in the second half"
        assert (x.grad is not None) == differentiable
        halves.builder()()
        step(planned, lambda: halves.builder()())
        assert all(map(torch.equal, expected, gradients(planned)))
        assert halves.builder()() is None, "there is nothing left"
    made = unit.step
    ops = made.operations
    assert ops.ops[ops.halfway].kind is Kind.HALFWAY
    assert len(ops.ops) > ops.halfway + 1
    for plan in (plain_plan(made.graph), checkpointed(made.graph)):
        point = point_of(made, plan)
        verify(unit_problem(made.graph, point.size), plan)
        planned.zero_grad()
        x.grad = None
        trace = Trace(torch.device("cpu"))
        unit.run_by(trace.marked(unit.carried_out(point.size, plan), 0))
        halves.around = trace.around_second_half(0)
        seen = {part.label: part.peak_bytes for part in trace.watch(lambda: step(planned, lambda: halves.builder()()))}
        halves.around = None
        assert seen["forward 0"] == point.option.forward_bytes
        outside = 2 * 4 * seed.numel()  # what arrives was there before, and the gradient of the input stays
        assert abs(seen["backward 0"] - point.option.backward_bytes) <= outside
        assert abs(seen["weight 0"] - point.option.weight_bytes) <= outside


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ran(tmp_path_factory.mktemp("ranks"), "1f1b", "pipelines_refused", seconds=280)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ran(
        tmp_path_factory.mktemp("ranks"), "gpipe", "interleaved", "zero_bubble", "zbv", "pipelines_earlier", seconds=280
    )


def holds(found: list[dict[str, Any]], name: str) -> None:
    """Bit for bit the schedule without plans, within the budget, and the prediction to 0.1 %, by one choice."""
    one, other = (rank[name] for rank in found)
    for rank in (one, other):
        assert rank["plain"] == rank["planned"]
        assert rank["untouched"]
        assert rank["peak"] <= 1
        assert abs(rank["of_predicted"] - 1) <= 0.001
        assert rank["of_plain"] < 0.95
        assert rank["makespans"][1] == rank["makespans"][2] > rank["makespans"][0]
        assert "the pipeline's makespan is" in rank["text"]
    assert one["makespans"] == other["makespans"]
    assert not set(one["stages"]) & set(other["stages"])


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_ranks_of_a_pipeline_keep_their_budgets(piped: list[dict[str, Any]]) -> None:
    holds(piped, "1f1b")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zero_bubble", "zbv"])
def test_ranks_of_other_schedules_keep_their_budgets(more: list[dict[str, Any]], name: str) -> None:
    holds(more, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_earlier_stage_computes_more_again(more: list[dict[str, Any]]) -> None:
    """In 1F1B it holds more micro-batches; what is enough for the last stage without a plan is not for it."""
    first, last = (rank["pipelines_earlier"] for rank in more)
    assert first["needs"][0] > 1.2 * first["needs"][1]
    assert first["overhead"] > 0.02 >= last["overhead"]
    assert first["makespan"] == last["makespan"] > 0


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("small", "BudgetTooSmall: no choice of plans fits the budget of rank 1; "),
        ("away", "nobody answers there"),
        ("planner", "InvalidData: each rank of a pipeline runs stages of its own, and plans them by itself: "),
        ("rank_planner", "InvalidData: each rank of a pipeline runs stages of its own, and plans them by itself: "),
        ("budget", "InvalidData: the budget of a rank is bytes or a share"),
        ("stages", "InvalidData: stages are torch.distributed.pipelining.PipelineStage, not Sequential"),
        ("others", "InvalidData: this rank runs the stages "),
        ("dw_builder", "has a dw_builder of its own"),
        ("one_optimizer", "optimizer must be a torch.optim.Optimizer or None"),
        ("one_builder", "has a dw_builder of its own"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said_on_every_rank(piped: list[dict[str, Any]], name: str, said: str) -> None:
    """And leaves the stages as they were."""
    for rank in piped:
        assert said in rank["pipelines_refused"][name], rank["pipelines_refused"][name]
        assert rank["pipelines_refused"]["left"] == [True] * 4


def test_a_link_is_refused_before_anything_is_captured() -> None:
    with pytest.raises(InvalidData, match="move nothing to the host: leave link= out"):
        remat.optimize_pipeline([], None, budget="1GiB", link="pcie4")


@pytest.mark.thorough
def test_what_one_rank_refuses_is_told_on_every_rank(piped: list[dict[str, Any]]) -> None:
    """Here a stage of the second one, in the middle of a schedule that the first one ends; its optimizer; a builder."""
    for name, said in (
        ("captured", "CaptureError: "),
        ("one_optimizer", "InvalidData: "),
        ("one_builder", "InvalidData: "),
    ):
        one, other = (rank["pipelines_refused"][name] for rank in piped)
        assert one.startswith("RematError: rank 1 failed: ")
        assert other.startswith(said)
