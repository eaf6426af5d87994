"""Blocks that repeat in transformers, and in stacks that are more than a chain: copied, or traced whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.models.subject import transformer
from torch import nn

from client.small_models import Case, mean_square, numbers
from client.test_exact import callable_of, outcome
from client.test_repeats import BLOCKS, Block, Both, Stack, example
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import training_step
from remat_ir import plain_plan


class Normed(nn.Module):
    """A block that updates buffers of its own."""

    def __init__(self, _number: int) -> None:
        super().__init__()
        self.linear, self.norm, self.more = nn.Linear(16, 16), nn.BatchNorm1d(6), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        return x + self.more(torch.sin(self.norm(torch.tanh(self.linear(x)) * 2) + 1).square())


class OwnStatistics(Normed):
    """A block that updates buffers of its own in an operator that says nothing of it to Dynamo."""

    def forward(self, x: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        y = F.batch_norm(torch.tanh(self.linear(x)) * 2, mean, variance, training=True)
        return x + self.more(torch.sin(y + 1).square())


class InPlace(Normed):
    """A block that overwrites what the one before it gave."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.linear(x + mask.sum()).relu_()
        x += self.more(y).tanh_()
        x *= 0.5
        return x.cos().mul_(2).add_(y)


class Repeated(nn.Module):
    """A stack whose blocks share a tensor that is trained, and perhaps their weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList([blocks[0]] * BLOCKS if tied else blocks)
        self.bias = nn.Parameter(torch.zeros(6, 6))
        self.tied = tied
        if not tied:
            for block in blocks[1:]:
                block.out.weight = blocks[0].out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.bias * 2
        for block in self.blocks:
            x = block(x, shared)
        return x


class Collecting(Stack):
    """A stack that returns what each block gives."""

    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for block in self.blocks:
            x = block(x, torch.zeros(()))
            found.append(x)
        return tuple(found)


class Counting(Stack):
    """A stack whose blocks add to one counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.count)
            self.count.add_(1)
        return x


class Cast(Stack):
    """A stack under autocast, without gradients for half of each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.autocast("cpu", torch.bfloat16):
                x = block(x, torch.zeros(()))
            with torch.no_grad():
                y = x.sin().cos()
            x = x + y
        return x


def two_runs() -> nn.Module:
    narrow = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(30)]
    wide = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16)) for _ in range(20)]
    return nn.Sequential(*narrow, nn.Linear(16, 16), *wide)


ODD: dict[str, Callable[[], nn.Module]] = {
    "batch normalization": lambda: Stack(Normed, 14),
    "statistics": lambda: Stack(OwnStatistics, 14),
    "in place": lambda: Stack(InPlace, 14),
    "tied weights": lambda: Repeated(tied=False),
    "one block again and again": lambda: Repeated(tied=True),
    "all hidden states": Collecting,
    "one counter": Counting,
    "autocast": Cast,
    "more runs": two_runs,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ODD)
def test_stacks_that_are_more_than_a_chain(name: str, said: Callable[[], str]) -> None:
    assert Both(ODD[name](), example()).same
    refused = {"statistics": "changes no plan: NotAlike", "all hidden states": "", "batch normalization": ""}
    assert refused.get(name, "were traced, the others are copies") in said()
    assert bool(said()) == bool(refused.get(name, True))


@pytest.mark.thorough
def test_an_input_that_needs_a_gradient_and_blocks_of_a_frozen_stack() -> None:
    module = Stack().requires_grad_(False)
    assert Both(module, (numbers(2, 6, 16, requires_grad=True),)).same
    module.blocks[5:].requires_grad_(True)
    assert Both(module, example()).same


FEW = {"num_hidden_layers": 7, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
T5 = {"decoder_start_token_id": 0, "num_layers": 7, "d_model": 32, "num_heads": 2, "d_ff": 48, "d_kv": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 7, "n_embd": 32, "n_head": 2, "n_positions": 12}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**FEW, "num_key_value_heads": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", FEW),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**FEW, "embedding_size": 16, "hidden_dropout_prob": 0.1}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str, said: Callable[[], str]) -> None:
    kind, config, sizes = MODELS[name]
    model: Any = transformer(kind, config, vocab_size=60, use_cache=False, **sizes)
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    assert Both(model.train(), input_ids=tokens, labels=tokens).same
    assert "were traced, the others are copies" in said()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["in place", "tied weights", "one counter"])
def test_copied_blocks_train_exactly(name: str, profiles: DiskProfiles) -> None:
    """As torch's own aot_eager does, with dropout, twice."""
    case = Case(ODD[name](), example(), {}, mean_square)
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    stock = torch.compile(case.module, backend="aot_eager")
    assert (
        measure.differences(outcome(case, stock), outcome(case, callable_of(case, step, plain_plan(step.graph)))) == []
    )
