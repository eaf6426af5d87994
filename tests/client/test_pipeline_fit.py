"""What the ranks of a pipeline need on a device that is not here: by the actions alone, next to a real schedule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from client.small_models import FeedForward
from client.test_ranks import ran
from drawn import examples
from remat.cli import app
from remat.pipelines.choice import Passed, buffers_bytes, places_by_actions
from remat.pipelines.schedule import Held, Moment, Run, actions_of, in_halves, named
from remat.target.fit import predict
from remat.target.pipeline import PipelineFit
from remat_ir import InvalidData

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

TABLE = """
name = "a small one"
memory = "MEMORY"
context = "0MiB"
bandwidth = 1e11
peak = {float32 = 1e13}
"""

SCRIPT = """
import torch
from torch import nn

class Last(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, *, target):
        return (self.body(x) - target).square().mean()

def make_model(stage, stages, batch=256, width=64, tp=1):
    inner = 256 // tp
    layers = [nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(2)]
    body, x = nn.Sequential(*layers), torch.ones(batch, width)
    return (body, x) if stage < stages - 1 else (Last(body), x, {"target": x})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def one_size(script: Path) -> Path:
    """The script without the argument `batch`: no largest one is looked for."""
    script.write_text(SCRIPT.replace("batch=256, ", "").replace("torch.ones(batch", "torch.ones(256"))
    return script


def fitted(script: Path, memory: str, parallel: str, **options: Any) -> PipelineFit:
    table, names = script.with_suffix(".toml"), dict[str, Any]()
    table.write_text(TABLE.replace("MEMORY", memory))
    exec(script.read_text(), names)
    options = {"planner": "greedy", "time_limit_s": 0.5, **options}
    found = predict(names["make_model"], str(table), parallel=parallel, **options)
    assert isinstance(found, PipelineFit)
    return found


@pytest.mark.thorough
def test_each_rank_of_a_pipeline_has_its_figures(one_size: Path) -> None:
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
    overheads = [answer.overhead for answer in small.curve]
    assert overheads[-1] == pytest.approx(0, abs=1e-9)
    assert all(a is not None for a in overheads)
    assert "by a plan" in str(small)
    none = fitted(one_size, f"{first.fixed_bytes}", "pp=2,micros=4")
    assert none.overhead is None
    assert "does not fit" in none.ending
    assert "none fits" in str(none)


@pytest.mark.thorough
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(script: Path) -> None:
    """Captured there: what is fitted between and beyond two batches is what a capture says."""
    found = fitted(script, "24MiB", "pp=2,micros=4", max_overhead=0.2)
    plain, planned = found.largest_plain, found.largest_planned
    assert 256 < plain < planned.size
    assert 0 < planned.overhead <= 0.2
    for size in (plain, planned.size):
        assert f" {size} " in str(found)

    def at(size: int) -> PipelineFit:
        return fitted(script, "24MiB", "pp=2,micros=4", batch=size, max_overhead=0.2)

    (one, next_one), most = map(at, (plain, plain + plain // 32 + 1)), at(planned.size)
    assert one.ending == "fits without a plan"
    assert next_one.ending != "fits without a plan"
    assert most.overhead == pytest.approx(planned.overhead, abs=0.02)
    script.write_text(SCRIPT.replace(", batch=256", "").replace("batch", "256"))
    unknown = fitted(script, "24MiB", "pp=2,micros=4")
    assert unknown.largest_plain is unknown.largest_planned is None
    assert "largest" not in str(unknown)


def test_layers_of_a_pipeline_may_be_split(one_size: Path) -> None:
    whole, part = (fitted(one_size, "1GiB", f"pp=2,schedule=ZBVZeroBubble,tp={tp}") for tp in (1, 2))
    assert part.ranks[0].fixed["parameters"] < 0.6 * whole.ranks[0].fixed["parameters"]
    assert part.ranks[0].stages == (0, 3)
    assert "4 micro-batches by ZBVZeroBubble, tp=2" in str(part)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ("pp=4,micros=2", "must be greater than or equal to the number of stages"),
        ("pp=2,schedule=Zigzag", "Unknown schedule name 'Zigzag'"),
        ("pp=2,schedule=PipelineScheduleSingle", "abstract"),
        ("pp=2,dp=2", "no pp with dp, fsdp"),
        ("schedule=1F1B", "write pp=4 too"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(script: Path, parallel: str, said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        fitted(script, "1GiB", parallel)


def test_parts_must_follow_each_other(script: Path) -> None:
    script.write_text(
        SCRIPT.replace("width=64", "width=None").replace("    inner", "    width = 64 + stage\n    inner")
    )
    with pytest.raises(InvalidData, match=r"stage 0 returns tensors of shapes \[\(256, 64\)\], and stage 1 takes"):
        fitted(script, "1GiB", "pp=2")
    with pytest.raises(InvalidData, match="gradients add up over the micro-batches"):
        fitted(script, "1GiB", "pp=2", release_gradients=True)


@pytest.mark.thorough
def test_the_command_says_each_ranks(script: Path, tmp_path: Path) -> None:
    table, png = tmp_path / "small.toml", tmp_path / "ranks.png"
    table.write_text(TABLE.replace("MEMORY", "1GiB"))
    command = ["fit", f"{script}:make_model", "--device", str(table), "--parallel", "pp=2", "--local", "--quiet"]
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
    for own, forward, between in zip(stages.values(), *moment.held, strict=True):
        found += forward * own.outputs + between * (own.outputs + own.late)
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
