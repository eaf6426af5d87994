"""Whether a model trains on a device that is not here, alone or on ranks of a pipeline, and what other ways make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from client.small_models import FeedForward, module_of
from client.test_ranks import ran
from drawn import examples
from remat.batch.largest import between
from remat.cli import app
from remat.cli.show import MARKERS, _colors, curve_chart, curve_picture, ways_picture
from remat.errors import ServiceError
from remat.pipelines.choice import Passed, buffers_bytes, places_by_actions
from remat.pipelines.schedule import Held, Moment, Run, actions_of, in_halves, named
from remat.planning.checkpoints import per_block, selective
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.planner import FallbackPlanner, OnProgress
from remat.target.fit import predict
from remat.target.pipeline import PipelineFit
from remat.target.step import Parallel, target_step
from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    Problem,
    graph_of,
    overhead_of,
    plain_peak,
    plain_plan,
    recomputed,
    verify,
)

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

TABLE = """
name = "a small one"
memory = "MEMORY"
context = "0MiB"
bandwidth = 1e11
peak = {float32 = 1e13}
"""


class Merging(nn.Module):
    """Cheap kernels that are merged at a small batch, whose merged need is below that of a parameter's kernel, and not
    all of them at twice that batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.linear = nn.Parameter(torch.rand(1250, 1000)), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2 + 1).neg() + 3
        return self.linear(y).sum() + (self.wide * 2).sin().sum()


def merging(batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
    return Merging(), torch.zeros(batch * 1000, 96)


@pytest.mark.thorough
def test_a_larger_batch_is_grouped_as_the_first_one() -> None:
    """By itself each batch has other ops; the largest batch is found all the same."""
    ops = {batch: target_step(merging, "h100", batch=batch).graph.ops for batch in (4, 8)}
    assert ops[4] != ops[8]
    like = target_step(merging, "h100", batch=4)
    assert target_step(merging, "h100", batch=8, like=like).graph.ops == ops[4]
    found = predict(merging, "rtx4090", planner="greedy", time_limit_s=2.0)
    assert found.largest_plain > 100
    assert not found.unknown


def other_at_one(batch: int = 1) -> tuple[nn.Module, torch.Tensor]:
    """A step whose batch of one has other kernels, and whose batches of two and four have other ops by themselves."""
    return (Merging() if batch > 1 else nn.Sequential(Merging(), nn.Tanh())), torch.zeros(batch * 2000, 96)


@pytest.mark.thorough
def test_a_batch_of_one_with_other_kernels_hides_no_larger_one() -> None:
    assert target_step(other_at_one, "h100", batch=2).graph.ops != target_step(other_at_one, "h100", batch=4).graph.ops
    found = predict(other_at_one, "rtx4090", planner="greedy", time_limit_s=2.0)
    assert found.largest_plain > 50
    assert not found.unknown


def branching(batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
    """A step that is another program at another batch."""
    return (Net() if batch < 8 else nn.Sequential(Net(), nn.Tanh())), torch.ones(batch, 32)


@pytest.mark.thorough
def test_what_is_known_is_said_where_no_largest_batch_can_be_found() -> None:
    found = predict(branching, "h100", planner="greedy", time_limit_s=2.0)
    assert found.largest_plain is None
    assert found.answer.plan is not None
    assert "largest batch" in str(found)
    (why,) = found.unknown.values()
    assert why in str(found)
    assert why.startswith("the step is another program at a batch of 8 than at one of 4; give batch=")


@pytest.mark.thorough
def test_dtype_and_autocast_are_options() -> None:
    """In bf16 parameters and activations are half as large; under autocast the parameters stay as they are."""

    def made(batch: int = 4096) -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))), torch.ones(batch, 64)

    how: dict[str, Any] = {"planner": "greedy", "time_limit_s": 1.0, "batch": 4096}
    plain, half, cast = (predict(made, "h100", **how, **each) for each in ({}, {"dtype": "bf16"}, {"autocast": "bf16"}))
    assert half.plain_bytes == pytest.approx(plain.plain_bytes / 2, rel=0.01)
    assert cast.step.step.fixed["parameters"] == plain.step.step.fixed["parameters"]
    assert plain.plain_bytes > 1.5 * cast.plain_bytes > half.plain_bytes
    assert not torch.is_autocast_enabled("cuda")
    for word in ("dtype", "autocast"):
        with pytest.raises(InvalidData, match="a step computes in one of"):
            predict(made, "h100", **{word: "int3"})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ending", "why"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("no such batch"), "no such batch")]
)
def test_what_is_finished_is_said_where_a_later_part_fails(ending: BaseException, why: str) -> None:
    """An interrupt, or a batch that the function does not make, ends the search for the largest batch alone."""

    def made(batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
        if batch == 4:
            return Net(), torch.ones(batch, 32)
        raise ending

    found = predict(made, "h100", planner="greedy", time_limit_s=1.0)
    assert found.answer.plan is not None
    assert why in found.unknown["largest batch"]
    assert "largest batch" in str(found)


class Refusing:
    """A planner that ends every question alike."""

    def __init__(self, ending: BaseException) -> None:
        self.ending, self.asked = ending, 0

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        self.asked += 1
        raise self.ending


@pytest.mark.thorough
def test_what_no_plan_is_needed_for_is_said_where_planning_fails(table: Path) -> None:
    """The peak, the least budget and the largest batch without a plan; each row that lacks its plan says why."""
    refusing = FallbackPlanner([Refusing(ServiceError("no answer today"))], strict=True)
    found = predict(make_model, str(table), batch=4096, planner=refusing)
    assert found.least_bytes < found.plain_bytes
    assert found.largest_plain > 0
    assert not found.fits
    wanting = {row[0]: row[2] for row in found.rows if row[1] == "not known"}
    assert wanting == dict.fromkeys(("on this device", "other budgets", "largest batch by a plan"), "no answer today")
    assert found.figures["unknown"] == wanting


@pytest.mark.thorough
def test_an_interrupt_ends_what_would_come_after_it(table: Path) -> None:
    sizes: list[int] = []

    def made(batch: int = 4096) -> tuple[nn.Module, torch.Tensor]:
        sizes.append(batch)
        return make_model(batch)

    planner = Refusing(KeyboardInterrupt())
    found = predict(made, str(table), planner=planner, optimizer="adamw", release_gradients=True)
    assert (sizes, planner.asked) == ([4096], 1)
    assert found.released is None
    assert set(found.unknown) == {"on this device", "other budgets", "largest batch", "gradients released"}
    assert set(found.unknown.values()) == {"interrupted"}
    assert "plain training needs" in str(found)


@pytest.mark.thorough
def test_progress_says_what_is_known_so_far() -> None:
    said: list[str] = []
    found = predict(lambda batch=4: (Net(), torch.ones(batch, 32)), "h100", planner="greedy", phase=said.append)
    assert any(line.startswith("looking for the largest batch; plain training needs ") for line in said)
    assert f"; {found.largest_plain} without a plan" in said[-4]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TABLE.replace("MEMORY", "2MiB"))
    return path


class Net(nn.Module):
    """Blocks in a list."""

    def __init__(self, width: int = 32, inner: int = 32) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(6))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def make_model(batch: int = 64) -> tuple[nn.Module, torch.Tensor]:
    return Net(), torch.ones(batch, 32)


@pytest.mark.thorough
def test_the_largest_batches_fit_and_the_next_ones_do_not(table: Path) -> None:
    found = predict(make_model, str(table), optimizer="adamw", planner="greedy", time_limit_s=2)
    assert found.memory_bytes == 2 * 2**20
    assert found.least_bound_bytes <= found.least_bytes <= found.plain_bytes
    plain, planned = found.largest_plain, found.largest_planned
    assert planned.size > plain
    assert 0 <= planned.overhead <= found.max_overhead
    assert "the optimizer's step" in str(found)
    assert found.step.update_peak_bytes >= 4 * found.step.step.fixed["parameters"] - 512 * 100

    def graph(size: int) -> Graph:
        return target_step(make_model, str(table), batch=size, optimizer="adamw").graph

    assert plain_peak(graph(plain)) <= found.memory_bytes
    assert plain_peak(graph(plain + max(1, plain // 64) + 1)) > found.memory_bytes
    fitted = between((64, graph(64)), (128, graph(128)), 300)
    assert abs(plain_peak(fitted) / plain_peak(graph(300)) - 1) < 0.02


@pytest.mark.thorough
def test_a_curve_falls_from_the_least_budget_to_plain_training(table: Path) -> None:
    found = predict(make_model, str(table), batch=512, planner="greedy", time_limit_s=2)
    budgets = [answer.budget_bytes for answer in found.curve]
    assert budgets[0] == found.least_bytes
    assert budgets[-1] == found.plain_bytes
    assert found.curve[-1].overhead == 0
    text = str(found)
    assert text.startswith("Net on a small one, batch 512")
    assert "a roofline of a small one" in text


@pytest.mark.thorough
def test_gradients_that_are_released_need_less(table: Path) -> None:
    options: dict[str, Any] = {"release_gradients": True, "planner": "greedy", "time_limit_s": 1}
    found = predict(make_model, str(table), optimizer="adamw", batch=4, **options)  # gradients are the peak
    released = found.released
    assert released.plain_bytes < found.plain_bytes
    assert released.least_bytes < found.least_bytes
    assert released.step.update_peak_bytes < found.step.update_peak_bytes
    assert released.largest_plain >= found.largest_plain
    assert all(row[1] in str(found) for row in released.rows)
    assert "with gradients released as they are made" in str(found)
    with pytest.raises(InvalidData, match="needs optimizer="):
        predict(make_model, str(table), **options)


def test_what_cannot_fit_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    table = {"name": "tiny", "memory": "64KiB", "context": "1B", "bandwidth": 1e9, "peak": {"float32": 1e9}}
    path.write_text(json.dumps(table))
    found = predict(make_model, str(path), planner="greedy", time_limit_s=1)
    assert found.answer.plan is None
    assert (found.largest_plain, found.largest_planned and found.largest_planned.size) == (0, 0)
    assert "does not fit" in str(found)
    assert "none can" in str(found)
    steps = predict(lambda: (Net(), torch.ones(1, 32)), str(path), optimizer="adamw", planner="greedy", time_limit_s=1)
    assert "no plan of activations helps there" in str(steps)
    with pytest.raises(InvalidData, match="max_overhead"):
        predict(make_model, str(path), max_overhead=-1)


def test_no_optimizer_by_its_name_is_none(table: Path) -> None:
    """No row is of its step, and the line that trains by a plan gives none."""
    options: dict[str, Any] = {"optimizer": "None", "planner": "greedy", "time_limit_s": 1}
    found = predict(lambda: (Net(), torch.ones(1024, 32)), str(table), **options)
    assert found.fits
    assert "to train by a plan" in str(found)
    assert "optimizer" not in str(found)
    with pytest.raises(InvalidData, match="needs optimizer="):
        predict(make_model, str(table), release_gradients=True, **options)


def test_where_the_optimizers_step_does_not_fit_nothing_does(tmp_path: Path) -> None:
    """As the line says; the exit code of the command goes by it."""

    def wide() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(256, 256), nn.Tanh()), torch.ones(1, 256)

    path = tmp_path / "device.toml"
    path.write_text(TABLE.replace("MEMORY", "1GiB"))
    large = predict(wide, str(path), optimizer="adamw", planner="greedy", time_limit_s=1)
    assert large.fits
    between = (large.plain_bytes + large.step.update_peak_bytes) // 2
    assert large.plain_bytes < between < large.step.update_peak_bytes
    path.write_text(TABLE.replace("MEMORY", str(between)))
    small = predict(wide, str(path), optimizer="adamw", planner="greedy", time_limit_s=1)
    assert small.answer.plan is not None
    assert "does not fit" in str(small)
    assert not small.fits


@pytest.mark.thorough
def test_a_function_without_a_batch_has_no_largest_one(table: Path) -> None:
    found = predict(lambda: make_model(), str(table), planner="greedy", time_limit_s=1)
    assert found.largest_plain is found.largest_planned is None
    assert "largest" not in str(found)


@pytest.mark.thorough
def test_checkpoints_run_each_block_again_and_keep_what_they_say(table: Path) -> None:
    graph = target_step(make_model, str(table), batch=512).graph
    whole = Problem(graph, 2**50)
    plain, block, some = (verify(whole, make(graph)) for make in (plain_plan, per_block, selective))
    assert plain.cost_ns < some.cost_ns < block.cost_ns
    assert block.peak_bytes < plain.peak_bytes
    assert block.cost_ns <= 2 * plain.cost_ns
    again = [name for name, times in zip(graph.op_names, recomputed(selective(graph), graph.ops), strict=True) if times]
    assert again
    assert not any("mm" in name for name in again)
    with pytest.raises(InvalidData, match="names of modules"):
        per_block(graph_of([1], [1], [[]]))


@pytest.mark.thorough
def test_fit_and_compare_on_the_command_line(table: Path, tmp_path: Path) -> None:
    script = tmp_path / "fit_script.py"
    script.write_text("from client.test_fit import make_model\n")
    run, cli = CliRunner(), ["--device", str(table), "--local", "-q", "--json"]
    found = run.invoke(app, ["fit", str(script), *cli, "-t", "2", "--optimizer", "adamw"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["largest_planned_batch"] > data["largest_plain_batch"] > 0
    picture = tmp_path / "ways.png"
    arguments = ["compare", str(script), *cli, "-t", "2", "-b", "70%", "--methods", "auto,greedy,chen-sqrt"]
    found = run.invoke(app, [*arguments, "--png", str(picture), "--batch", "512"])
    assert found.exit_code == 0, found.output
    rows = {row["way"]: row for row in json.loads(found.stdout)["ways"]}
    assert list(rows) == ["plain", "checkpoint each block", "selective checkpoints", "auto", "greedy", "chen-sqrt"]
    assert rows["plain"]["ending"] == "over the budget"
    low, high = rows["auto"]["overhead_range"]
    assert low <= rows["auto"]["overhead"] <= high
    assert rows["auto"]["overhead"] <= rows["greedy"]["overhead"]
    assert picture.stat().st_size > 1000


def test_compare_reads_a_graph_file(tmp_path: Path) -> None:
    graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph.to_json()))
    found = CliRunner().invoke(app, ["compare", str(path), "--local", "-b", "100%", "--methods", "greedy", "--json"])
    rows = {row["way"]: row for row in json.loads(found.stdout)["ways"]}
    assert rows["checkpoint each block"]["overhead"] is None
    assert "names of modules" in rows["checkpoint each block"]["ending"]
    assert rows["greedy"]["overhead"] == overhead_of(6, 6) == 0


def whole(batch: int = 64, tp: int = 1) -> tuple[nn.Module, torch.Tensor]:
    """Of blocks of which each rank of several may hold a part, as Megatron splits them."""
    return Net(64, 256 // tp), torch.ones(batch, 64)


@pytest.mark.thorough
def test_what_one_rank_of_many_needs(table: Path) -> None:
    """State and gradients are shared; a block and the next one are gathered; buckets hold all gradients."""
    options: dict[str, Any] = {"batch": 4, "optimizer": "adamw", "planner": "greedy", "time_limit_s": 0.5}
    alone, shared, replica, part = (
        predict(whole, str(table), parallel=parallel, **options) for parallel in (None, "fsdp=8", "dp=8", "tp=4")
    )
    size = sum(4 * p.numel() for p in whole(tp=1)[0].parameters())
    block = size // 6
    one, other = alone.step.step.fixed, shared.step.step.fixed
    assert not any(isinstance(found, PipelineFit) for found in (alone, shared, replica, part))
    assert size <= one["parameters"] <= other["parameters"] * 8 < 1.01 * size, "the allocator rounds"
    assert other["optimizer state"] == -(-one["optimizer state"] // 8)
    assert other["parameters that are gathered"] == other["gradients that are reduced"] == 2 * block
    grown = shared.plain_bytes - sum(other.values()) - (alone.plain_bytes - sum(one.values()))
    assert -1.01 * size <= grown < -0.7 * size, "gradients of the whole model were there at the end, and now an eighth"
    assert replica.plain_bytes == alone.plain_bytes + size
    own = sum(4 * p.numel() for p in whole(tp=4)[0].parameters())
    assert part.step.step.fixed["parameters"] == pytest.approx(own, rel=0.03) != pytest.approx(size, rel=0.03)
    assert "one of 8 ranks (fsdp=8)" in str(shared)
    assert shared.largest_planned.size > alone.largest_planned.size


def test_what_is_outside_of_blocks_is_gathered_too() -> None:
    """An embedding and a head are a unit of their own, which is whole from the first block to the last."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    block, outside = 4 * (64 * 64 + 64), 4 * (1000 * 64 + 64 * 1000 + 1000)
    gathered, reduced = Parallel.of("fsdp=8").fixed(Headed()).values()
    assert (gathered, reduced) == (outside + 2 * block, 2 * outside)


def test_a_model_whose_only_list_is_empty_is_one_unit() -> None:
    """As a shortcut that does nothing is written."""
    model = nn.Module()
    model.linear, model.shortcut = nn.Linear(64, 64), nn.Sequential()
    whole = 4 * (64 * 64 + 64)
    assert list(Parallel.of("fsdp=8").fixed(model).values()) == [whole, 2 * whole]


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ("sp=2", "'sp=2' is not a way to spread a job"),
        ("fsdp=0", "'fsdp=0' is not a way"),
        ("tp=2,tp=4", "'tp=4' is not a way"),
        ("dp=2,fsdp=4", "write one of them"),
        ("pp=2,fsdp=2", "no pp with dp, fsdp"),
        ("pp=2,dp=2", "no pp with dp, fsdp"),
        ("micros=8", "write pp=4 too"),
        ("schedule=1F1B", "write pp=4 too"),
        ("tp=2", "take the argument tp"),
        ("cp=2,ep=2", "take the argument cp and ep"),
    ],
)
def test_ranks_that_are_not_known_are_refused(table: Path, parallel: str, said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        predict(make_model, str(table), parallel=parallel)


@pytest.mark.parametrize("parallel", ["dp=2", "fsdp=2", "cp=2", "ep=2"])
def test_released_gradients_are_those_of_one_rank(table: Path, parallel: str) -> None:
    with pytest.raises(InvalidData, match="release_gradients does not go with dp, fsdp, cp or ep"):
        predict(make_model, str(table), parallel=parallel, optimizer="adamw", release_gradients=True)


def test_ways_that_are_compared_have_looks_of_their_own(tmp_path: Path) -> None:
    looks = {(MARKERS[at % len(MARKERS)], tuple(color)) for at, color in enumerate(_colors(14))}
    assert len(looks) == 14
    assert len({color for _, color in looks}) == 14
    ways_picture(tmp_path / "ways.png", [(f"way {n}", 2**20 * n, n / 10) for n in range(1, 15)], 2**22)
    assert (tmp_path / "ways.png").stat().st_size > 10_000


def test_a_bar_beyond_twice_the_time_ends_in_an_arrow(tmp_path: Path) -> None:
    graph = target_step(make_model, "h100").graph
    slow = Answer.of_plan(Problem(graph, plain_peak(graph)), plain_plan(graph), method="greedy")
    answers = [replace(slow, overhead=9.0), replace(slow, overhead=0.1)]
    lines = curve_chart(answers, plain_peak(graph), width=44).split("\n")
    assert "▶ 900 %" in lines[0]
    assert lines[0].count("█") == 10 * lines[1].count("█") == 20
    curve_picture(tmp_path / "curve.png", answers, plain_peak(graph))


class WithTarget(nn.Module):
    """The last part, with the loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - target).square().mean()


def parts(stage: int, stages: int, batch: int = 256, width: int = 64, tp: int = 1) -> Any:
    inner = 256 // tp
    layers = [nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(2)]
    body, x = nn.Sequential(*layers), torch.ones(batch, width)
    return (body, x) if stage < stages - 1 else (WithTarget(body), x, {"target": x})


def one_size(stage: int, stages: int, tp: int = 1) -> Any:
    """The parts without the argument `batch`: no largest one is looked for."""
    return parts(stage, stages, tp=tp)


def wider(stage: int, stages: int, batch: int = 256) -> Any:
    """Parts that do not follow each other."""
    return parts(stage, stages, batch, 64 + stage)


Fitted: TypeAlias = Callable[..., PipelineFit]


@pytest.fixture
def fitted(tmp_path: Path) -> Fitted:
    def made(make: Callable[..., Any], memory: str, parallel: str, **options: Any) -> PipelineFit:
        table = tmp_path / "device.toml"
        table.write_text(TABLE.replace("MEMORY", memory))
        found = predict(make, str(table), parallel=parallel, **{"planner": "greedy", "time_limit_s": 0.5, **options})
        assert isinstance(found, PipelineFit)
        return found

    return made


@pytest.mark.thorough
def test_each_rank_of_a_pipeline_has_its_figures(fitted: Fitted) -> None:
    """Earlier stages hold more; plans for a device between the least and the plain peak take time, and fit."""
    large = fitted(one_size, "1GiB", "pp=2,micros=4", optimizer="adamw")
    first, last = large.ranks
    assert large.ending == "fits without a plan"
    assert first.plain_bytes > last.plain_bytes
    assert [rank.stages for rank in large.ranks] == [(0,), (1,)]
    assert first.fixed["optimizer state"] >= 2 * first.fixed["parameters"] * 0.99
    between = (max(rank.least_bytes for rank in large.ranks) + first.plain_bytes) // 2
    small = fitted(one_size, f"{between}", "pp=2,micros=4", optimizer="adamw")
    assert small.overhead > 0
    for rank, plain in zip(small.ranks, large.ranks, strict=True):
        assert rank.plain_bytes == plain.plain_bytes
        assert rank.least_bytes <= (rank.planned_bytes or 0) <= between
    ranks = tuple(replace(rank, update_peak_bytes=between + 1) for rank in small.ranks)
    assert not replace(small, ranks=ranks).fits
    overheads = [answer.overhead for answer in small.curve]
    assert overheads[-1] == pytest.approx(0, abs=1e-9)
    assert all(a is not None for a in overheads)
    assert "by a plan" in str(small)
    none = fitted(one_size, f"{first.fixed_bytes}", "pp=2,micros=4")
    assert none.overhead is None
    assert "does not fit" in none.ending
    assert "none fits" in str(none)


@pytest.mark.thorough
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(fitted: Fitted) -> None:
    """Captured there: what is fitted between and beyond two batches is what a capture says."""
    found = fitted(parts, "24MiB", "pp=2,micros=4", max_overhead=0.2)
    plain, planned = found.largest_plain, found.largest_planned
    assert 256 < plain < planned.size
    assert 0 < planned.overhead <= 0.2
    for size in (plain, planned.size):
        assert f" {size} " in str(found)

    def at(size: int) -> PipelineFit:
        return fitted(parts, "24MiB", "pp=2,micros=4", batch=size, max_overhead=0.2)

    (one, next_one), most = map(at, (plain, plain + plain // 32 + 1)), at(planned.size)
    assert one.ending == "fits without a plan"
    assert next_one.ending != "fits without a plan"
    assert most.overhead == pytest.approx(planned.overhead, abs=0.02)
    unknown = fitted(one_size, "24MiB", "pp=2,micros=4")
    assert unknown.largest_plain is unknown.largest_planned is None
    assert "largest" not in str(unknown)


def test_layers_of_a_pipeline_may_be_split(fitted: Fitted) -> None:
    whole, part = (fitted(one_size, "1GiB", f"pp=2,schedule=ZBVZeroBubble,tp={tp}") for tp in (1, 2))
    assert part.ranks[0].fixed["parameters"] < 0.6 * whole.ranks[0].fixed["parameters"]
    assert part.ranks[0].stages == (0, 3)
    assert "4 micro-batches by ZBVZeroBubble, tp=2" in str(part)


def attending(stage: int, stages: int, cp: int = 1) -> Any:
    """Parts with an attention each, of as many tokens on each rank, however many ranks share a sequence."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.scaled_dot_product_attention(*[self.linear(x)[:, None]] * 3)[:, 0]
        return seen if stage < stages - 1 else seen.sum()

    return module_of(forward, linear=nn.Linear(64, 64)), torch.ones(4, 128, 64)


def test_ranks_of_a_stage_may_share_each_sequence(fitted: Fitted) -> None:
    """Attention runs once with the keys and values of each of them, of which two shares are there."""
    alone, shared = (fitted(attending, "1GiB", f"pp=2,micros=2,cp={cp}") for cp in (1, 2))
    assert shared.plain_makespan_ns > alone.plain_makespan_ns
    assert all(two.plain_bytes > one.plain_bytes for one, two in zip(alone.ranks, shared.ranks, strict=True))


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ("pp=4,micros=2", "must be greater than or equal to the number of stages"),
        ("pp=2,schedule=Zigzag", "Unknown schedule name 'Zigzag'"),
        ("pp=2,schedule=PipelineScheduleSingle", "abstract"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(fitted: Fitted, parallel: str, said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        fitted(parts, "1GiB", parallel)


def test_parts_must_follow_each_other(fitted: Fitted) -> None:
    with pytest.raises(InvalidData, match=r"stage 0 returns tensors of shapes \[\(256, 64\)\], and stage 1 takes"):
        fitted(wider, "1GiB", "pp=2")
    with pytest.raises(InvalidData, match="gradients add up over the micro-batches"):
        fitted(wider, "1GiB", "pp=2", release_gradients=True)


@pytest.mark.thorough
def test_the_command_says_each_ranks(tmp_path: Path) -> None:
    script, table, png = (tmp_path / name for name in ("pipeline_script.py", "small.toml", "ranks.png"))
    script.write_text("from client.test_fit import parts\n")
    table.write_text(TABLE.replace("MEMORY", "1GiB"))
    command = ["fit", f"{script}:parts", "--device", str(table), "--parallel", "pp=2", "--local", "--quiet"]
    done = CliRunner().invoke(app, [*command, "--json", "--png", str(png), "--time-limit", "0.5"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [rank["stages"] for rank in told["ranks"]] == [[0], [1]]
    assert told["parallel"]["schedule"] == "1F1B"
    assert len(told["curve"]) > 2
    assert told["largest_planned_batch"] >= told["largest_plain_batch"] > 256
    assert png.read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, [*command, "--time-limit", "0.5"])
    assert "by a plan" in done.stdout
    assert "fits without a plan" in done.stdout


class Storages:
    """A rank's step with every storage by name and who holds it, as torch's stages and their runtime do."""

    def __init__(self, stages: Mapping[int, Passed], halved: Iterable[int], last: int, micros: int) -> None:
        self.stages, self.halved, self.last = stages, set(halved), last
        self.size: dict[tuple[str, int, int], int] = {}
        self.holders: dict[tuple[str, int, int], set[str]] = {}
        for stage, micro in ((s, m) for s in stages for m in range(micros)):
            self.take(("input", stage, micro), stages[stage].inputs, "buffer")
            if stage < last:
                self.take(("tangents", stage, micro), stages[stage].tangents, "buffer")
        self.fixed = self.now

    def take(self, name: tuple[str, int, int], size: int, holder: str) -> None:
        self.size[name] = size
        self.holders.setdefault(name, set()).add(holder)

    def drop(self, name: tuple[str, int, int], holder: str) -> None:
        self.holders.get(name, set()).discard(holder)

    @property
    def now(self) -> int:
        return sum(size for name, size in self.size.items() if self.holders[name])

    def begin(self, run: Run) -> None:
        """What a pass makes, besides what its plan keeps for itself."""
        stage, micro, own = run.stage, run.micro, self.stages[run.stage]
        if run.kind == "forward":
            self.take(("output", stage, micro), own.outputs, "cache")
        if run.kind == "backward":
            self.take(("input gradient", stage, micro), own.input_gradients, "pass")
        if run.kind == "weight" or (run.kind == "backward" and stage not in self.halved):
            self.take(("gradients", stage, micro), own.gradients, "pass")

    def end(self, run: Run) -> None:
        """Who holds that afterwards: a buffer of a stage on this rank, a message, or the parameters."""
        stage, micro = run.stage, run.micro
        if run.kind == "forward" and stage + 1 in self.stages:
            self.drop(("input", stage + 1, micro), "buffer")
            self.holders["output", stage, micro].add("buffer")
        elif run.kind == "forward" and stage < self.last:
            self.holders["output", stage, micro].add("message")
        if run.kind == "backward":
            self.drop(("output", stage, micro), "cache")
            name = ("input gradient", stage, micro)
            if stage - 1 in self.stages:
                self.drop(("tangents", stage - 1, micro), "buffer")
                self.holders[name].add("buffer")
            elif stage:
                self.holders[name].add("message")
            self.drop(name, "pass")
        name = ("gradients", stage, micro)
        if name in self.holders:
            first = not any("parameters" in h for (what, s, _), h in self.holders.items() if (what, s) == name[:2])
            self.holders[name] |= {"parameters"} if first else set()
            self.drop(name, "pass")


def counted(moment: Moment, stages: Mapping[int, Passed], halved: Iterable[int]) -> int:
    """What the plans of a rank's stages count of what is passed on, at a moment."""
    found = 0
    for own, forward, halfway in zip(stages.values(), *moment.held, strict=True):
        found += forward * own.outputs + halfway * (own.outputs + own.late)
    if moment.kind is not None:
        number = list(stages)[moment.stage]
        own = stages[number]
        whole = number not in halved
        found += own.outputs
        found += own.tangents + own.input_gradients + whole * own.gradients if moment.kind == "backward" else 0
        found += own.late + own.gradients if moment.kind == "weight" else 0
    return found


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(SCHEDULES[1:]), st.integers(2, 3), st.integers(0, 2), st.randoms(use_true_random=False))
def test_the_ledger_is_what_its_storages_come_to(name: str, ranks: int, more: int, random: Any) -> None:
    micros = ranks * (1 + more)
    schedule = named(name, ranks, micros)
    halved, runs = in_halves(schedule), actions_of(schedule)
    last = max(run.stage for own in runs for run in own)
    between = [random.randint(1, 50) for _ in range(last + 1)]  # what stage k gives to stage k + 1
    for own in runs:
        numbers = sorted({run.stage for run in own})
        stages = {}
        for n in numbers:
            tangents = between[n] if n < last else 0
            late = random.choice([0, tangents])
            arrived = between[n - 1] if n else 0
            stages[n] = Passed(between[n - 1], arrived, between[n], tangents, late, random.randint(1, 90))
        kept = [run for run in own if run.kind != "weight" or run.stage in halved]
        assert peaks_by_storages(kept, stages, halved, last, micros) == {
            Moment(*place[:3]): place.rest_bytes + counted(Moment(*place[:3]), stages, halved)
            for place in places_by_actions(kept, stages, last, waits_at_end=True)
        }


def peaks_by_storages(
    runs: Sequence[Run], stages: Mapping[int, Passed], halved: Iterable[int], last: int, micros: int
) -> dict[Moment, int]:
    """The most above what is there throughout, in each distinct moment of a step."""
    book = Storages(stages, halved, last, micros)
    assert book.fixed == buffers_bytes(stages, micros, last)
    numbers, held = list(stages), {stage: [0, 0] for stage in stages}
    found: dict[Moment, int] = {}

    def see(kind: Any, stage: int) -> None:
        moment = Moment(kind, stage, Held(*map(tuple, zip(*held.values(), strict=True))))
        found[moment] = max(book.now - book.fixed, found.get(moment, book.now - book.fixed))

    see(None, -1)
    for run in runs:
        own = held[run.stage]
        own[0] -= run.kind == "backward"
        own[1] -= run.kind == "weight"
        book.begin(run)
        see(run.kind, numbers.index(run.stage))
        book.end(run)
        own[0] += run.kind == "forward"
        own[1] += run.kind == "backward" and run.stage in halved
        see(None, -1)
    return found


def part(stage: int, stages: int, batch: int = 512, width: int = 64) -> Any:
    """As the ranks train it, with the loss in the last part, which keeps its output as a schedule's loss does."""

    class Last(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor, *, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.body(x)
            return (y - target).square().mean(), y.detach()

    body, x = nn.Sequential(*(FeedForward(width, 256) for _ in range(2))), torch.ones(batch, width)
    return (body, (x,)) if stage < stages - 1 else (Last(body), (x,), {"target": x.clone()})


def of_one_size(stage: int, stages: int) -> Any:
    """Of which no largest micro-batch is looked for."""
    return part(stage, stages)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_schedules_need_what_is_said_without_them(tmp_path: Path) -> None:
    """To a thousandth, by the allocator's own events: an accelerator's rounding, of which the CPU knows nothing."""
    real = ran(tmp_path, *(f"fitted {name}" for name in SCHEDULES), seconds=380)
    for name in SCHEDULES:
        parallel = f"pp=2,micros=4,schedule={name}"
        found = predict(of_one_size, "h100", parallel=parallel, optimizer="adamw", planner="greedy")
        assert isinstance(found, PipelineFit)
        for rank, said in zip(real, found.ranks, strict=True):
            measured = rank[f"fitted {name}"]
            assert said.plain_bytes == pytest.approx(measured["plain"], rel=2e-3), name
            assert said.fixed_bytes == pytest.approx(measured["fixed"], rel=5e-3)
            assert said.update_peak_bytes == pytest.approx(measured["update"], rel=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_real_schedules_train_the_largest_micro_batch(name: str, tmp_path: Path) -> None:
    """Without plans as far as is said, and a sixteenth more is over the memory; by plans inside it, and far more."""
    found = [rank[f"largest {name}"] for rank in ran(tmp_path, f"largest {name}", seconds=580)]
    for rank in found:
        for key in ("plain", "planned"):
            assert rank["needs"][key] <= 1.002 * rank["memory"]
    assert any(rank["needs"]["over"] > rank["memory"] for rank in found)
    assert any(rank["needs"]["plain"] > 0.95 * rank["memory"] for rank in found)
    assert found[0]["rows"]["planned"] > 1.2 * found[0]["rows"]["plain"]
