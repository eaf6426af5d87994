"""What a model to train is: its module, one batch, its blocks; and the wrappers that give it a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A model to train on one batch.

    Attributes:
        title: for tables.
        model: in train mode; its output is the loss, or holds it as `loss`.
        inputs: the batch, by the names of the arguments of its forward.
        blocks: the names of the classes that people checkpoint, one call each.
    """

    title: str
    model: nn.Module
    inputs: Mapping[str, torch.Tensor]
    blocks: tuple[str, ...] = ()

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy of the model, outermost first, none inside another."""
        found: list[nn.Module] = []
        inside: set[int] = set()
        for part in model.modules():
            if type(part).__name__ in self.blocks and id(part) not in inside:
                found.append(part)
                inside.update(id(child) for child in part.modules())
        return found

    def only_loss(self) -> Subject:
        """The same model with nothing but the loss as its output."""
        return replace(self, model=OnlyLoss(self.model))

    def with_checkpoints(self) -> Subject:
        """A copy whose blocks are checkpointed by the model's own switch, not reentrant."""
        model = copy.deepcopy(self.model)
        for part in model.modules():
            if hasattr(part, "gradient_checkpointing_enable"):
                part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                break
        else:
            for part in model.modules():
                if hasattr(part, "checkpointed"):
                    part.checkpointed = True
        return replace(self, model=model)


Make = Callable[[str], Subject]
ARCHITECTURES: dict[str, tuple[Make, tuple[str, ...]]] = {}
"""By name: what makes one, and the sizes that there are of it."""


def architecture(*sizes: str) -> Callable[[Make], Make]:
    """Enter an architecture under its function's name, in the sizes given."""

    def enter(make: Make) -> Make:
        ARCHITECTURES[make.__name__] = make, sizes
        return make

    return enter


class Around(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class OnlyLoss(Around):
    """A model whose other outputs are dropped."""

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The loss alone."""
        found = self.inner(**batch)
        loss: torch.Tensor = getattr(found, "loss", found)
        return loss


class Classified(Around):
    """A classifier with its loss."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        found = self.inner(pixels)
        return F.cross_entropy(getattr(found, "logits", found), labels)


class Denoised(Around):
    """A noise predictor with its loss."""

    def forward(self, noisy: torch.Tensor, when: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        return F.mse_loss(self.inner(noisy, when).sample, noise)


def numbers(*shape: int) -> torch.Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    """Random tokens, the same each time."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(3))


def classified(title: str, inner: nn.Module, batch: int, side: int, blocks: tuple[str, ...] = ()) -> Subject:
    """A classifier of square images."""
    inputs = {"pixels": numbers(batch, 3, side, side), "labels": torch.arange(batch) % CLASSES}
    return Subject(title, Classified(inner), inputs, blocks)


def transformer(kind: str, config: str, **sizes: Any) -> nn.Module:
    """A model of transformers from its configuration, with random weights."""
    import transformers

    made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    return made
