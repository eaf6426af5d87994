"""Modules applied to several inputs are captured as branches that meet, and join plans are plans of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat.training.step import training_step
from remat_ir import Problem, plain_peak, verify
from remat_ir.branches import branches_of
from remat_solver.join import Homogenized, homogenized_plan


class Siamese(nn.Module):
    """One tower for every input; the head compares the first with the others."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The loss."""
        first, *others = (self.tower(x) for x in inputs)
        return torch.stack([(first - other).pow(2).sum(1) for other in others]).relu().mean()


class CrossModal(nn.Module):
    """Two towers of different depth, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = perceptron(4), perceptron(9), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.head(torch.cat([self.left(x), self.right(y)], 1)).sum()  # type: ignore[no-any-return]


def perceptron(depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 8, 16, 16):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16**2, 32))


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers, nn.Flatten())


CASES = {
    "perceptron": (lambda: Siamese(perceptron(8)), 2, (64, 32), (8, 8)),
    "triplet": (lambda: Siamese(perceptron(6)), 3, (64, 32), (6, 6, 6)),
    "convolutions with BatchNorm": (lambda: Siamese(convolutions()), 2, (4, 3, 16, 16), (8, 8)),
    "transformer": (lambda: Siamese(encoder()), 2, (2, 16, 32), (6, 6)),
    "cross-modal": (CrossModal, 2, (64, 32), (4, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_that_is_applied_twice_is_a_join(name: str) -> None:
    """Parameters are shared, running statistics pass from one application to the next: the branches are seen."""
    make, count, shape, least = CASES[name]
    graph = training_step(make(), tuple(torch.randn(shape) for _ in range(count)), {}).graph
    found = branches_of(graph)
    assert found is not None
    assert len(found.lengths) == count
    assert all(length >= wanted for length, wanted in zip(sorted(found.lengths), sorted(least), strict=True))
    every = [op for side in (found.forward, found.backward) for branch in side for ops in branch for op in ops]
    assert sorted((*every, *found.head)) == list(range(graph.ops)), "each op is in one place"
    taken = Homogenized.apply(graph)
    assert taken is not None
    problem = Problem(graph, plain_peak(graph))
    plan = homogenized_plan(taken, problem)
    assert plan is not None
    assert verify(problem, plan).cost_ns < 2 * graph.total_cost_ns


def test_what_is_one_branch_is_no_join() -> None:
    graph = training_step(perceptron(6), (torch.randn(64, 32),), {}).graph
    assert branches_of(graph) is None
