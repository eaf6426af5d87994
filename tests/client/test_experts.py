"""Mixtures of experts of transformers: routing runs once, experts may run again, on the same tokens."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import remat
from client.comparing import equal
from remat.training.enable import plans_of

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def mixtral(how: str) -> nn.Module:
    """With the loss that balances the load of its experts."""
    torch.manual_seed(0)
    own = {"num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **own, experts_implementation=how))  # type: ignore[call-arg]


def qwen_config(how: str) -> Qwen3MoeConfig:
    own = {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16}
    return Qwen3MoeConfig(**SMALL, **own, experts_implementation=how)  # type: ignore[call-arg]


def qwen(how: str) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(qwen_config(how))


def learned(model: nn.Module) -> list[torch.Tensor]:
    """Losses and parameters after two steps."""
    ids = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "how"), [(mixtral, "grouped_mm"), (qwen, "grouped_mm"), (qwen, "batched_mm")])
def test_experts_train_as_without_a_plan(make: Any, how: str) -> None:
    plain, planned = make(how), make(how)
    remat.enable(planned, budget=remat.Fraction(0.6), planner="greedy")
    assert equal(learned(plain), learned(planned))
    (plan,) = (p for p in plans_of(planned).plans if p)
    graph = plan.step.graph
    times = Counter(int(op) for op in plan.answer.plan.computes)
    routing = [op for op in range(graph.ops) if graph.op_names[op].rpartition(":")[2] == "topk"]
    assert len(routing) >= 2
    assert all(times[op] == 1 and op in graph.once for op in routing)
    assert (plan.answer.overhead or 0) > 0


class Layer(nn.Module):
    """A residual layer of experts that run in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(64), Qwen3MoeSparseMoeBlock(qwen_config("eager"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mixture(self.norm(x))
        return x + (y[0] if isinstance(y, tuple) else y)


@pytest.mark.thorough
def test_experts_in_a_loop_train_as_a_chain(caplog: pytest.LogCaptureFixture) -> None:
    """Sizes depend on the data there; stages are measured by running them, and the log says why."""
    caplog.set_level(logging.INFO, "remat")
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(3)))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        if planned:
            remat.enable(model, budget=remat.Fraction(0.7), planner="greedy")
        x = torch.randn(4, 24, 64)
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(plans_of(model).chains) == 1
    assert "the stages run as a chain: " in caplog.text
    assert equal(*found)
