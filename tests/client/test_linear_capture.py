"""Linear models as they are captured are seen as chains of stages, and the chain program plans them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat.training.step import training_step
from remat_ir import Problem, budget_at, verify
from remat_ir.graph import working_set
from remat_solver import solve
from remat_solver.chain.network import linear_network


def vgg(*, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((8, 2), (16, 2), (32, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def encoder(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


MODELS = {
    "perceptron": (nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.ReLU()))), (64, 32), 8),
    "ten bare Tanh": (nn.Sequential(*(nn.Tanh() for _ in range(10))), (64, 32), 10),
    "VGG": (vgg(norm=False), (2, 3, 32, 32), 8),
    "VGG with BatchNorm": (vgg(norm=True), (2, 3, 32, 32), 8),
    "transformer": (encoder(4), (2, 16, 32), 4),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_linear_model_is_recognised_as_it_is_captured(name: str) -> None:
    model, shape, layers = MODELS[name]
    x = torch.randn(shape, requires_grad=True)
    graph = training_step(model, (x,), {}).graph
    network = linear_network(graph)
    assert network.stages >= layers
    least = working_set(graph).least_bytes
    for share in (0.9, 0.7):
        problem = Problem(graph, max(budget_at(graph, share), least + least // 8))
        chain = solve(problem, method="rotor")
        assert chain.plan is not None, chain.message
        assert verify(problem, chain.plan).cost_ns == chain.cost_ns
        best = solve(problem, time_limit_s=3)
        assert best.cost_ns <= chain.cost_ns
