"""Plans behind the knobs of others: torch's selective checkpoints, and the recompute flags of other stacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from client.comparing import equal, gradients
from client.small_models import module_of
from remat.planning.checkpoints import STACKS, best_flags, evaluated, every_setting, numbered_blocks
from remat.profiling.measure import peak_memory
from remat_ir import Graph, InvalidData, Problem, graph_of, plain_peak, plain_plan, verify
from tiers import first


def block(dropout: float = 0.0) -> nn.Module:
    """Products and cheap operators between them: there is something to save on."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


X = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)


def stepped(run: Any, module: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor | None]:
    """The gradients of one step."""
    module.zero_grad()
    torch.manual_seed(1)
    run(x).square().mean().backward()
    return gradients(module)


def checkpointed(module: nn.Module, contexts: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: checkpoint(module, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("held", ["40%", "80%"])
def test_selective_checkpoints_by_a_plan(held: str, dropout: float) -> None:
    """Gradients are bit for bit those of the plain step."""
    module = block(dropout)
    plain = stepped(module, module)
    contexts = remat.checkpoint_contexts(module, X.clone().requires_grad_(), held=held, planner="greedy")
    for _ in range(2):  # each call has contexts of its own
        assert equal(plain, stepped(checkpointed(module, contexts), module))
    assert contexts.overhead > 0
    assert any(save for rows in contexts.saved.values() for save, _ in rows)


@pytest.mark.thorough
def test_more_is_saved_where_more_may_be_held() -> None:
    module = block()
    x = X.clone().requires_grad_()
    less, more = (remat.checkpoint_contexts(module, x, held=h, planner="greedy") for h in ("40%", "80%"))
    assert less.held_bytes < more.held_bytes
    assert less.overhead > more.overhead


@pytest.mark.thorough
def test_what_updates_buffers_is_refused() -> None:
    """A checkpoint runs it twice."""
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64))
    with pytest.raises(remat.CaptureError, match="updates buffers"):
        remat.checkpoint_contexts(module, X.clone().requires_grad_(), held="70%", planner="greedy")


@pytest.mark.thorough
@pytest.mark.parametrize("held", ["60%", "100%"])
def test_in_place_operators_are_computed_again_or_refused(held: str) -> None:
    """Never are gradients wrong; backward passes do not need the values that are written to here."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).add_(1.0).mul_(2.0).tanh())

    module = module_of(forward, one=nn.Linear(64, 64), two=nn.Linear(64, 64))
    plain = stepped(module, module)
    contexts = remat.checkpoint_contexts(module, X.clone().requires_grad_(), held=held, planner="greedy")
    with contextlib.suppress(remat.CaptureError):
        found = stepped(checkpointed(module, contexts), module)
        assert equal(plain, found)


@pytest.mark.thorough
def test_another_size_is_computed_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module = block()
    contexts = remat.checkpoint_contexts(module, X.clone().requires_grad_(), held="50%", planner="greedy")
    plain = stepped(module, module, X[:8])
    assert equal(plain, stepped(checkpointed(module, contexts), module, X[:8]))
    assert caplog.text.count("other sizes than when the checkpoint was planned") == 1


class Model(nn.Module):
    """Numbered blocks between an embedding and a loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(dropout))
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("share", "dropout"), first(0, [("60%", 0.2), ("60%", 0.0), ("85%", 0.2), ("85%", 0.0)], 1))
def test_a_whole_model_is_checkpointed_block_by_block_within_one_budget(share: str, dropout: float) -> None:
    """Gradients are bit for bit those of the plain step; the measured peak is within the budget and the promise."""
    model = Model(dropout)
    plain = stepped(model, model)
    model.zero_grad(set_to_none=True)
    plain_bytes = peak_memory(lambda: model(X).backward()).peak_bytes
    policy = remat.checkpoint_policy(model, X, budget=share, planner="local", time_limit_s=3)
    assert policy.contexts
    assert equal(plain, stepped(model, model))
    model.zero_grad(set_to_none=True)
    measured = peak_memory(lambda: model(X).backward()).peak_bytes
    assert measured == policy.measured_bytes - policy.fixed_bytes
    assert measured < plain_bytes
    assert measured <= 1.1 * (policy.peak_bytes - policy.fixed_bytes)
    assert "over the plan by tags" in str(policy)
    assert policy.lost >= -0.001
    policy.remove()
    assert all("forward" not in layer.__dict__ for layer in model.layers)


@pytest.mark.thorough
def test_more_blocks_are_checkpointed_where_less_fits_and_what_does_not_fit_is_refused() -> None:
    model = Model(0.0)
    peaks = []
    for share in ("90%", "60%"):
        policy = remat.checkpoint_policy(model, X, budget=share, planner="greedy")
        peaks.append((policy.peak_bytes, policy.cost_ns))
        policy.remove()
    assert peaks[0][0] > peaks[1][0]
    assert peaks[0][1] < peaks[1][1]
    with pytest.raises(remat.NothingFound, match="is enough"):
        remat.checkpoint_policy(model, X, budget="5%", planner="greedy")
    with pytest.raises(remat.RematError, match="is no part of"):
        remat.checkpoint_policy(model, X, budget="60%", blocks=[nn.Linear(2, 2)], planner="greedy")


def test_a_real_step_that_fails_leaves_no_checkpoints() -> None:
    """As one does for want of memory, or by an interrupt: the model trains as it did before."""
    model = Model(0.0)

    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("no room for this gradient")

    hook = model.into.weight.register_hook(fails)
    with pytest.raises(RuntimeError, match="no room for this gradient"):
        remat.checkpoint_policy(model, X, budget="60%", planner="greedy")
    hook.remove()
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_removed_checkpoints_leave_a_forward_that_a_block_had_of_its_own() -> None:
    model = Model(0.0)
    calls = []

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return nn.Sequential.forward(model.layers[0], x)

    model.layers[0].forward = own
    policy = remat.checkpoint_policy(model, X, budget="60%", planner="greedy")
    assert "layers.0" in policy.contexts
    policy.remove()
    policy.remove()
    assert model.layers[0].forward is own
    assert all("forward" not in vars(layer) for layer in model.layers[1:])
    calls.clear()
    model(X)
    assert calls == [1]


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
