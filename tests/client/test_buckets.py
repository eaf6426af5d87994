"""A few sizes for many lengths: the least padding, losses as they were, and no more plans than buckets."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.training.buckets import Buckets
from remat.training.inplace import plans_of
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
    """Each named tensor with its own value; the others, and batches that fill a bucket, are left alone."""
    buckets = Buckets((4, 8))
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5), "weight": torch.ones(2)}
    longer = buckets.pad(batch, {"input_ids": 0, "labels": -100})
    assert longer["input_ids"].tolist() == [[1] * 5 + [0] * 3] * 2
    assert longer["labels"].tolist() == [[1.0] * 5 + [-100.0] * 3] * 2
    assert longer["weight"] is batch["weight"]
    full = {"input_ids": torch.ones(2, 8)}
    assert buckets.pad(full, {"input_ids": 0, "labels": -100})["input_ids"] is full["input_ids"]
    with pytest.raises(InvalidData, match="over the largest bucket, 8"):
        buckets.pad({"input_ids": torch.ones(2, 9)}, {"input_ids": 0})
    with pytest.raises(InvalidData, match="one length"):
        buckets.pad({"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4)}, {"input_ids": 0, "labels": 0})


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 2), (3, 1)])
def test_sizes_that_cannot_be_meant(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidData, match="ascending"):
        Buckets(sizes)


def test_lengths_that_cannot_be_meant() -> None:
    for lengths, options in (([], {}), ([0], {}), ([1], {"most": 0}), ([1], {"multiple_of": 0})):
        with pytest.raises(InvalidData):
            Buckets.of(lengths, **options)


def test_the_loss_of_a_padded_batch_is_that_of_the_batch() -> None:
    """A real model by a plan: masked and ignored where it is padded; two lengths of a bucket share its plan."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=16)
    config.bos_token_id = config.eos_token_id = 1
    config.use_cache, config.attn_pdrop, config.embd_pdrop, config.resid_pdrop = False, 0, 0, 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    buckets = remat.Buckets((8, 16))
    trained = remat.enable(model, budget=remat.Fraction(1), planner="greedy")
    for length in (5, 7):
        tokens = torch.randint(0, 20, (2, length))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        padded = buckets.pad(batch, {"input_ids": 0, "attention_mask": 0, "labels": -100})
        loss = trained(**padded).loss
        model.eval()
        torch.testing.assert_close(loss, model(**batch).loss)
        model.train()
    assert len(plans_of(model).plans) == 1
