"""Two ranks over gloo: one plan for both, the losses and parameters of plain training, refusals by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def ran(folder: Path, *names: str, seconds: float = 200, ranks: int = 2) -> list[dict[str, Any]]:
    """What some ranks find, by rank."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ranks_cases.py"), str(folder), str(ranks), *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        start_new_session=True,
    )
    try:
        process.wait(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too, if it did not end
        process.wait()
    errors = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("errors-*")))
    assert process.returncode == 0, errors
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(ranks)]


def exact(*ranks: dict[str, Any]) -> None:
    """Each trained as without a plan, bit for bit, by one that recomputes."""
    for rank in ranks:
        assert rank["plain"] == rank["planned"]
        assert rank["overhead"] > 0


def same(found: list[dict[str, Any]], name: str) -> None:
    """Both ranks trained as plain data parallel training does, by one plan."""
    one, other = (rank[name] for rank in found)
    exact(one, other)
    assert one["digest"] == other["digest"]
    assert one["plain"][:3] != other["plain"][:3], "each rank has data of its own"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = ("ddp", "chain_in_ddp", "join_in_ddp", "join_refused", "refused", "later", "while_tracing")
    names += ("on_accelerators_only", "broken", "buckets", "unreduced", "implicitly_replicated")
    return ran(tmp_path_factory.mktemp("ranks"), *names)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp", "chain_in_ddp", "join_in_ddp"])
def test_ranks_train_as_plain_ones_do(found: list[dict[str, Any]], name: str) -> None:
    """A planned module and planned stages in DDP, every other step under `no_sync`; branches that meet in a head."""
    same(found, name)


@pytest.mark.thorough
def test_ranks_share_one_budget_over_the_graphs_of_a_broken_forward(found: list[dict[str, Any]]) -> None:
    """By the same division on each, whichever of them had more there in the step that was watched."""
    same(found, "broken")


@pytest.mark.thorough
def test_ranks_speak_on_the_host_where_their_backend_does_not(found: list[dict[str, Any]]) -> None:
    """Else each step would wait for all that was issued on the device, until the plan is there."""
    for rank in found:
        assert rank["on_accelerators_only"] == {"heard": {"rank": 0}, "least": [0, 4], "sent": [], "same": True}


@pytest.mark.thorough
def test_gradients_and_buckets_between_ranks_are_counted(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["unreduced"]["counted"] == [[size] for size in rank["unreduced"]["whole"]]
        size, views = rank["buckets"]["size"], rank["buckets"]["True"]
        assert [plan["DDP's buckets"] for plan in rank["buckets"]["False"]] == [size] * 2
        assert [plan["DDP's buckets and gradients"] for plan in views] == [size]
        assert [plan["gradients"] for plan in rank["buckets"]["False"]] == [0, size]
        assert [plan["gradients"] for plan in views] == [0]


@pytest.mark.thorough
def test_ranks_agree_on_the_costs_of_a_join(found: list[dict[str, Any]]) -> None:
    """Each has measured its own; the first rank's count."""
    one, other = (rank["join_in_ddp"] for rank in found)
    assert one["costs"] == other["costs"]
    assert one["plan"] == other["plan"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "name", "said"),
    [
        *(("join_refused", name, "RanksDiffer: ") for name in ("stages", "sizes", "budgets", "budgets, auto")),
        ("refused", "unused", "CaptureError: DistributedDataParallel(find_unused_parameters=True) is not supported"),
        ("refused", "double", "RuntimeError: a second derivative is asked for through a step that runs by a plan"),
        ("refused", "double chain", "RuntimeError: a plan's gradients have no graph: create_graph and double backward"),
        *(("refused", name, "RanksDiffer: ") for name in ("shapes", "budgets", "chains")),
    ],
)
def test_what_is_not_supported_is_said(found: list[dict[str, Any]], case: str, name: str, said: str) -> None:
    """One sentence, on every rank, and no rank waits for another."""
    for rank in found:
        assert rank[case][name].startswith(said), rank[case][name]
        assert rank["refused"]["still"] == 1.0


@pytest.mark.thorough
def test_ranks_take_up_a_better_plan_at_the_same_step(found: list[dict[str, Any]]) -> None:
    """Once all have made it; where one cannot, none does."""
    one, other = (rank["later"] for rank in found)
    assert one["made"] == other["made"]
    assert one["made"][0] >= 20, "the second rank was not ready before"
    assert one["made"][1] == "made of 7 in MainThread"
    for name in ("one fails", "nobody"):
        assert one[name] == other[name]
        assert one[name][0] < 4000
        assert one[name][1] is None
    assert one["shared"] == "RematError: nobody is there"
    assert other["shared"] == "RematError: the first rank failed: nobody is there"


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["enable", "backend"])
def test_a_better_plan_takes_over_under_implicit_replication(found: list[dict[str, Any]], way: str) -> None:
    """DTensor's state of a thread, without which the step does not run."""
    for rank in found:
        steps = rank["implicitly_replicated"][way]
        assert "mixed torch.Tensor and DTensor" in steps["outside"]
        assert steps["over"]
        assert steps["before"] == steps["after"] == steps["plain"]


@pytest.mark.thorough
def test_ranks_speak_while_torch_traces(found: list[dict[str, Any]]) -> None:
    """Else a collective that holds the interpreter's lock waits for gloo's workers, and they for that lock."""
    for rank in found:
        assert rank["while_tracing"]["heard"] == sum(range(500))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Ranks that measure at other times than one another, and run other stages."""
    names = (
        "cold_rank",
        "slow_rank",
        "priced",
        "other_collectives",
        "stages_with_collectives",
        "hidden_collective",
        "pipeline",
    )
    return ran(tmp_path_factory.mktemp("ranks"), *names)


@pytest.mark.thorough
def test_a_rank_that_measures_launches_no_collective(apart: list[dict[str, Any]]) -> None:
    """While another one trains: what both learn is right, and what a collective costs is the same everywhere."""
    for time in ("first", "second"):
        one, other = (rank["cold_rank"][time] for rank in apart)
        exact(one, other)
        for rank in (one, other):
            assert rank["once"] == [True] * len(rank["costs"]), "plans of their own must pair their collectives"
            assert rank["kernels"] == [1] * len(rank["costs"]), "a region is timed whole, under Inductor"
        assert one["costs"] == other["costs"]
        assert len(one["costs"]) > 3


@pytest.mark.thorough
def test_ranks_of_one_plan_may_measure_each_at_its_own_pace(apart: list[dict[str, Any]]) -> None:
    """And a collective may run again, since it does so on all of them."""
    same(apart, "slow_rank")
    for rank in apart:
        assert rank["slow_rank"]["once"] == [False] * len(rank["slow_rank"]["costs"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["slow_rank", "cold_rank"])
def test_a_step_with_collectives_peaks_as_predicted(apart: list[dict[str, Any]], name: str) -> None:
    """By the lifetimes of its storages, with collectives that run again and without: threads of the backend free what
    collectives have used, of which the allocator tells no other. What they hold for longer is in the fixed bytes."""
    for rank in apart:
        found = rank[name]["second"] if name == "cold_rank" else rank[name]
        assert found["held"] == 2 * 64 * 32 * 4, "two sums of the rows of a batch"
        for predicted, measured in found["peaks"]:
            assert 0.95 * predicted <= measured <= predicted + found["held"]


@pytest.mark.thorough
def test_collectives_have_the_price_of_their_link(apart: list[dict[str, Any]]) -> None:
    """It is the first rank's on all of them; each runs once where that is more than a kernel of its size costs."""
    same(apart, "priced")
    one, other = (rank["priced"] for rank in apart)
    assert one["costs"] == other["costs"]
    assert one["known"] == other["known"]
    small, large = one["known"]
    assert 0 < small < large
    assert min(one["costs"]) >= small - 1
    assert max(one["costs"]) < large, "they are smaller than 4 MiB"
    for slow in (one["slow"], other["slow"]):
        assert slow["plain"] == slow["planned"]
        assert min(slow["costs"]) >= 10**9
        assert slow["once"] == [True] * len(slow["costs"])


@pytest.mark.thorough
def test_ranks_that_run_other_collectives_are_told_so(apart: list[dict[str, Any]]) -> None:
    for rank in apart:
        assert rank["other_collectives"]["said"].startswith("RanksDiffer: "), rank["other_collectives"]["said"]
        assert "runs other collectives" in rank["other_collectives"]["said"]


@pytest.mark.thorough
def test_stages_with_collectives_are_refused_before_one_is_launched(apart: list[dict[str, Any]]) -> None:
    for rank in apart:
        said = rank["stages_with_collectives"]["said"]
        assert said.startswith("CaptureError: stage 1 (Parallel) calls the collective _c10d_functional.all_reduce"), (
            said
        )


@pytest.mark.thorough
def test_a_collective_that_an_operator_hides_is_not_launched_to_be_measured(apart: list[dict[str, Any]]) -> None:
    """It runs once in a step; where it would be run to be measured, the collective is refused before it is launched."""
    for rank in apart:
        found = rank["hidden_collective"]
        exact(found)
        assert found["chain"].startswith("CaptureError: stage 1 (Hiding) calls the collective c10d.allreduce_"), found
        assert found["functional"].startswith("CaptureError: hidden (remat_ranks.hidden.default) calls the collective")


@pytest.mark.thorough
def test_a_planner_of_all_ranks_does_not_block_a_pipeline(apart: list[dict[str, Any]]) -> None:
    """Its ranks run other stages, and come to them at other times."""
    one, other = (rank["pipeline"] for rank in apart)
    exact(one, other)
    assert one["digest"] != other["digest"]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = ("tensor_parallel", "tensor_parallel_enabled", "sequence_parallel", "two_dimensions")
    return ran(tmp_path_factory.mktemp("ranks"), *names)


def equal(found: list[dict[str, Any]], name: str) -> None:
    """Ranks trained by one plan, made for what is on each."""
    for rank in (rank[name] for rank in found):
        exact(rank)
        assert rank["digest"] == found[0][name]["digest"]
        assert rank.get("parameters") == rank.get("local")
        assert rank.get("collectives", 1) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["tensor_parallel", "tensor_parallel_enabled", "sequence_parallel", "two_dimensions"])
def test_split_parameters_train_as_plain_ones_do(split: list[dict[str, Any]], name: str) -> None:
    """Tensor and sequence parallelism, under `torch.compile` and in planned modules, and inside fully_shard."""
    equal(split, name)


@pytest.mark.slow
def test_four_ranks_in_two_dimensions(tmp_path: Path) -> None:
    """Two of fully_shard's by two of tensor parallelism."""
    found = ran(tmp_path, "two_dimensions", ranks=4)
    for rank in found:  # a rank's own parameters are shards again after the step
        assert rank["two_dimensions"].pop("local") * 2 == rank["two_dimensions"].pop("parameters")
    equal(found, "two_dimensions")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = (
        "static_graph",
        "unused_parameters",
        "at_once",
        "sharded_units",
        "sharded_budget",
        "sharded_stages",
        "sharded_refused",
        "overlap",
        "own_plans",
        "sizes",
        "largest_batch",
        "long_solve",
    )
    return ran(tmp_path_factory.mktemp("ranks"), *names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static_graph", "unused_parameters", "at_once", "sharded_units", "sharded_stages"])
def test_more_ways_of_training_in_parallel(more: list[dict[str, Any]], name: str) -> None:
    """A static graph, unused parameters around a planned module, and FSDP2 around planned units and stages."""
    same(more, name)


@pytest.mark.slow
def test_ranks_agree_on_costs_that_were_not_measured(more: list[dict[str, Any]]) -> None:
    """A size between two others is planned from theirs, and all ranks pose the same problem."""
    same(more, "sizes")
    for rank in more:
        large, small, between = rank["sizes"]["fitted"]
        assert large == small == 0 < between


@pytest.mark.slow
def test_ranks_try_the_same_batches(more: list[dict[str, Any]]) -> None:
    """What one of them needs beyond the plan counts for all."""
    one, other = (rank["largest_batch"] for rank in more)
    assert one == other
    assert [one["batch"], True] in [tried[:2] for tried in one["tries"]]


@pytest.mark.slow
def test_a_solve_may_take_longer_than_a_message(more: list[dict[str, Any]]) -> None:
    """The first rank says that it is still at work, and the others wait on."""
    assert [rank["long_solve"]["cost"] for rank in more] == [7, 7]


@pytest.mark.slow
def test_sharded_units_share_one_budget(more: list[dict[str, Any]]) -> None:
    """Divided over sharded blocks: the same plans on both ranks, plain losses, and a real step within the whole."""
    same(more, "sharded_budget")
    one, other = (rank["sharded_budget"] for rank in more)
    for rank in (one, other):
        assert rank["over"] <= 0
        assert rank["share"] < 0.8
        assert rank["calls"] == 4
    assert one["overhead"] == other["overhead"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nested", "FSDP shards 0 of this Sequential as a unit of its own"),
        ("outside", "is sharded over ranks (DTensor) when this FSDPSequential is captured"),
        ("older", "FullyShardedDataParallel has flattened the parameters"),
        ("older, original parameters", "FullyShardedDataParallel has flattened the parameters"),
    ],
)
def test_shards_that_are_not_units_are_refused(more: list[dict[str, Any]], name: str, said: str) -> None:
    """FSDP around a whole planned module."""
    for rank in more:
        assert rank["sharded_refused"][name].startswith("CaptureError: ")
        assert said in rank["sharded_refused"][name]


@pytest.mark.slow
def test_plans_of_parts_let_communication_overlap_the_backward_pass(more: list[dict[str, Any]]) -> None:
    """With a plan a block, or a chain, gradients are reduced before the backward pass of the first block begins."""
    for rank in more:
        early = {name: events[: events.index("block 0")].count("reduce") for name, events in rank["overlap"].items()}
        assert early["blocks"] == early["plain"] > 0
        assert early["chain"] > 0
        assert early["whole"] == 0, "one plan of the whole gives all its gradients at its end"


@pytest.mark.slow
def test_ranks_may_have_plans_of_their_own(more: list[dict[str, Any]]) -> None:
    """DDP around modules that each rank plans for batches of its own size."""
    one, other = (rank["own_plans"] for rank in more)
    assert one["digest"] != other["digest"]
    exact(one, other)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ran(tmp_path_factory.mktemp("ranks"), "compiled_refused", "compiled", "sharded_compiled", seconds=400)


@pytest.mark.slow
@pytest.mark.timeout(450)  # each rank compiles with g++
@pytest.mark.parametrize("name", ["compiled", "sharded_compiled"])
def test_ranks_under_inductor_train_as_plain_ones_do(compiled: list[dict[str, Any]], name: str) -> None:
    """`torch.compile` of DDP as one graph, and of blocks in FSDP2, each rank by the first one's plan."""
    same(compiled, name)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("buckets, eager", "CaptureError: DistributedDataParallel under torch.compile cuts the step at its buckets"),
        ("buckets, inductor", "CaptureError: DistributedDataParallel under torch.compile cuts the step at its buckets"),
        ("shapes", "RanksDiffer: "),
    ],
)
def test_what_ranks_under_inductor_cannot_do_is_said(compiled: list[dict[str, Any]], name: str, said: str) -> None:
    """A step in buckets has no plan, and ranks that differ are told so; no rank waits for another."""
    for rank in compiled:
        assert said in rank["compiled_refused"][name]
