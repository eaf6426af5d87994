"""The recompute flags of other stacks: what a setting makes a step do, and the best of all settings in a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.planning.checkpoints import STACKS, best_flags, evaluated, every_setting, numbered_blocks
from remat_ir import Graph, InvalidData, Problem, graph_of, plain_peak, plain_plan, verify


def _network(blocks: int) -> Graph:
    """Blocks of two ops, attention and mlp, each read by its backward op; the second one's result leads on."""
    forward = 2 * blocks
    inputs: list[list[int]] = [[] if op == 0 else [op - 1] for op in range(forward)]
    for op in range(forward):
        mirror = forward - 1 - op
        inputs.append(
            sorted({forward + op - 1, mirror, *([mirror - 1] if mirror else [])} if op else {mirror, mirror - 1})
        )
    names = [f"layers.{op // 2}.{'mlp' if op % 2 else 'attn'}:mm" for op in range(forward)]
    names += [f"layers.{(2 * forward - 1 - op) // 2}:mm" for op in range(forward, 2 * forward)]
    made = graph_of([3] * (2 * forward), [8] * forward + [1] * forward, inputs, backward_from=forward)
    return replace(made, op_names=tuple(names))


def test_blocks_are_found_by_the_numbers_in_their_paths() -> None:
    assert numbered_blocks(_network(3)) == {"layers.0": [0, 1], "layers.1": [2, 3], "layers.2": [4, 5]}


def test_a_checkpointed_block_runs_again_at_once_up_to_what_is_needed() -> None:
    """Its result leads on, so it is saved; what is inside runs again when the backward pass comes to it."""
    graph = _network(2)
    plan = evaluated(graph, "two blocks", [[0, 1], [2, 3]]).plan
    assert plan.computes == (0, 1, 2, 3, 2, 3, 4, 5, 0, 6, 7)
    assert evaluated(graph, "none", ()).plan == plain_plan(graph)


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_every_setting_is_a_plan_and_the_best_is_the_cheapest_that_fits(stack: str) -> None:
    graph = _network(4)
    settings = every_setting(graph, stack)
    assert len(settings) >= 2
    for setting in settings:
        assert verify(Problem(graph, 2**40), setting.plan) == (setting.cost_ns, setting.peak_bytes)
    for budget in sorted({setting.peak_bytes for setting in settings}):
        best = best_flags(graph, stack, budget)
        assert best.cost_ns == min(s.cost_ns for s in settings if s.peak_bytes <= budget)
    assert best_flags(graph, stack, plain_peak(graph)).cost_ns == graph.total_cost_ns


def test_megatron_has_blocks_uniform_chunks_and_modules() -> None:
    flags = {setting.flags for setting in every_setting(_network(4), "megatron")}
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 3" in flags
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2" in flags
    assert "--recompute-granularity selective --recompute-modules core_attn mlp" in flags
    nemo = {setting.flags for setting in every_setting(_network(4), "nemo")}
    assert "recompute_granularity=full recompute_method=block recompute_num_layers=3" in nemo


def test_torchtitans_selective_checkpoints_save_products_but_every_second_one() -> None:
    graph = _network(4)
    found = {setting.flags: setting for setting in every_setting(graph, "torchtitan")}
    none, full = found["activation-checkpoint:none"], found["activation-checkpoint:full"]
    selective = found["activation-checkpoint:selective"]
    # of each block the first product is saved; the second one gives the block's result, but for the last one's
    assert none.cost_ns < selective.cost_ns < full.cost_ns
    assert selective.cost_ns == graph.total_cost_ns + graph.op_cost_ns[0]
    assert selective.peak_bytes >= full.peak_bytes


def test_what_cannot_be_asked_is_refused() -> None:
    graph = _network(2)
    with pytest.raises(InvalidData, match="takes deepspeed, hf"):
        best_flags(graph, "jax", 10)
    with pytest.raises(InvalidData, match="the least is"):
        best_flags(graph, "hf", 1)
    with pytest.raises(InvalidData, match="has no names"):
        best_flags(replace(graph, op_names=None), "hf", 10)
    with pytest.raises(InvalidData, match="no numbered blocks"):
        best_flags(replace(graph, op_names=("a:mm",) * graph.ops), "hf", 10)
