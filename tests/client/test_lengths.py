"""A job whose batches have many lengths, in random order: few graphs of Dynamo's, few plans, exact gradients."""

from __future__ import annotations

import copy
import gc
import logging
import random

import pytest
import torch
from torch import nn

import remat
from client.comparing import equal, gradients
from client.small_models import numbers
from remat.training.step import Planned

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
