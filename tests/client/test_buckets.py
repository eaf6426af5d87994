"""Many lengths: few sizes with the least padding, losses as they were, few graphs and plans, and exact gradients."""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
from client.comparing import equal, gradients
from client.small_models import module_of, numbers
from remat import _compat
from remat.batch.buckets import Buckets
from remat.training.enable import plans_of
from remat.training.step import Planned
from remat_ir import InvalidData


def padded(lengths: list[int], buckets: Buckets) -> int:
    return sum(buckets.size(n) for n in lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([1, 4]))
def test_no_other_sizes_pad_less(lengths: list[int], most: int, multiple_of: int) -> None:
    """Against all choices of sizes."""
    found = Buckets.of(lengths, most, multiple_of)
    assert len(found.sizes) <= most
    assert all(size % multiple_of == 0 for size in found.sizes)
    sizes = sorted({-(-n // multiple_of) * multiple_of for n in lengths})
    every = (Buckets(tuple(c)) for k in range(1, most + 1) for c in combinations(sizes, k) if c[-1] == sizes[-1])
    assert padded(lengths, found) == min(padded(lengths, other) for other in every)


def test_a_batch_is_padded_to_its_bucket() -> None:
    """Each named tensor with its own value; the others are left alone, and so is what a batch that fills one holds."""
    buckets = Buckets((4, 8))
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5), "weight": torch.ones(2)}
    longer = buckets.pad(batch, {"input_ids": 0, "labels": -100})
    assert longer["input_ids"].tolist() == [[1] * 5 + [0] * 3] * 2
    assert longer["labels"].tolist() == [[1.0] * 5 + [-100.0] * 3] * 2
    assert longer["weight"] is batch["weight"]
    full = {"input_ids": torch.ones(2, 8)}
    assert buckets.pad(full, {"input_ids": 0, "labels": -100})["input_ids"].tolist() == full["input_ids"].tolist()
    with pytest.raises(InvalidData, match="over the largest bucket, 8"):
        buckets.pad({"input_ids": torch.ones(2, 9)}, {"input_ids": 0})
    with pytest.raises(InvalidData, match="one length"):
        buckets.pad({"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4)}, {"input_ids": 0, "labels": 0})


@pytest.mark.thorough
def test_training_compiles_nothing_once_every_bucket_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches and padded ones, labels that are the tokens, slices of longer tensors: one kind for each bucket."""
    buckets, values = Buckets((4, 8)), {"tokens": 0.0, "labels": -100.0}

    def forward(self: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a linear model of tokens, whose labels may be the tokens themselves."""
        return nn.functional.cross_entropy(self.out(self.table(tokens)).flatten(0, 1), labels.flatten())

    def batch(length: int, sliced: bool = False) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 20, (2, length + 3))[:, :length] if sliced else torch.randint(0, 20, (2, length))
        return buckets.pad({"tokens": tokens, "labels": tokens}, values)

    work: list[str] = []
    for name in ("export_joint", "compile_joint"):

        def counted(real: Callable[..., Any], what: str, *args: Any, **named: Any) -> Any:
            work.append(what)
            return real(*args, **named)

        monkeypatch.setattr(_compat, name, partial(counted, getattr(_compat, name), name))
    model = module_of(forward, table=nn.Embedding(20, 8), out=nn.Linear(8, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    asking: dict[str, Any] = {"budget": remat.Fraction(0.9), "planner": "greedy", "optimizer": optimizer}
    # no better plan is looked for: one that takes over is compiled once
    trained = remat.optimize(model, (), batch(8), **asking, wait=False, max_gap=0.999)
    remat.plans_of(trained).plan_for((), batch(4))
    remat.plans_of(trained).plan_for((), batch(8))  # in the graph in which Dynamo leaves the length open
    ahead = list(work)
    # the first size by its numbers, all others by one trace with symbols and what is compiled of it
    assert ahead.count("export_joint") == ahead.count("compile_joint") == 2
    for length in (8, 3, 4, 7, 8, 1):
        for sliced in (False, True):
            trained(**batch(length, sliced)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert work == ahead
    assert len(remat.plans_of(trained).plans) == len(buckets.sizes) + 1


def test_sizes_and_lengths_that_cannot_be_meant() -> None:
    for sizes in ((), (0, 1), (2, 2), (3, 1)):
        with pytest.raises(InvalidData, match="ascending"):
            Buckets(sizes)
    for lengths, options in (([], {}), ([0], {}), ([1], {"most": 0}), ([1], {"multiple_of": 0})):
        with pytest.raises(InvalidData):
            Buckets.of(lengths, **options)


@pytest.mark.thorough
def test_the_loss_of_a_padded_batch_is_that_of_the_batch() -> None:
    """A real model by a plan: masked and ignored where it is padded; two lengths of a bucket share its plan."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=16)
    config.bos_token_id = config.eos_token_id = 1
    config.use_cache, config.attn_pdrop, config.embd_pdrop, config.resid_pdrop = False, 0, 0, 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    buckets = Buckets((8, 16))
    trained = remat.enable(model, budget=remat.Fraction(1), planner="greedy")
    for length in (5, 7):
        tokens = torch.randint(0, 20, (2, length))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        padded = buckets.pad(batch, {"input_ids": 0, "attention_mask": 0, "labels": -100})
        loss = trained(**padded).loss
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss, model(**batch).loss)
        model.train()
    assert len(plans_of(model).plans) == 1


MOST_PLANS = 8
SHORTEST = 100
WIDTH = 16


@pytest.mark.thorough
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_lengths_in_random_order(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo's limit of recompilations would end planning silently, and plans that no one drops fill the memory."""
    torch.manual_seed(0)
    before = alive()
    layers = (part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    stock = nn.Sequential(*layers)
    model = remat.enable(copy.deepcopy(stock), budget="90%", planner="greedy", mode="graph", most_plans=MOST_PLANS)
    lengths = random.Random(0).sample(range(SHORTEST, SHORTEST + count), count)
    sampled = set(random.Random(1).sample(lengths, 4))
    compiled = torch.compile(stock, backend="aot_eager", dynamic=False)
    with caplog.at_level(logging.WARNING):
        for length in lengths:
            x = numbers(length, WIDTH)
            model.zero_grad()
            model(x).square().mean().backward()
            if length in sampled:
                stock.zero_grad()
                compiled(x).square().mean().backward()
                assert equal(gradients(model), gradients(stock)), length
    plans = remat.plans_of(model)
    assert plans.calls == (count, 0)
    graphs = 2  # of the first length, and of any
    assert MOST_PLANS < len(plans.plans) <= graphs * MOST_PLANS
    assert "recompile_limit" not in caplog.text
    assert "without a plan" not in caplog.text
    assert caplog.text.count("remat.batch.buckets.Buckets") == 1, "once, whatever comes"
    assert len(alive() - before) == len(plans.plans), "what is dropped is freed"


def alive() -> set[Planned]:
    """All plans of training steps in this process."""
    gc.collect()
    return {each for each in gc.get_objects() if type(each) is Planned}
