"""What the cases train: small models that meet the kernels in question, in the sizes of a GPU or of a stand-in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Size(NamedTuple):
    """How large the models are."""

    width: int
    depth: int
    length: int
    batch: int
    image: int


GPU = Size(width=1024, depth=8, length=1024, batch=8, image=64)
SMALL = Size(width=64, depth=3, length=64, batch=4, image=16)


class Block(nn.Module):
    """Attention with dropout, then a perceptron with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True, dropout_p=0.1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.hidden(self.second(x))


class Attention(nn.Module):
    """Blocks, with the loss inside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Convolutions(nn.Module):
    """Convolutions with batch normalization and dropout, with the loss inside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width // 8
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1))
                for _ in range(size.depth)
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers, with the loss inside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size.width // 4, size.width // 4, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].square().mean()


class Normalized(nn.Module):
    """Layer normalization over many rows, whose backward pass Inductor gives a workspace."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


Subject = tuple[nn.Module, tuple[torch.Tensor, ...]]


def subject(kind: str, size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> Subject:
    """A model with its arguments, the same each time."""
    torch.manual_seed(1)
    made: dict[str, tuple[Any, tuple[int, ...]]] = {
        "attention": (Attention, (size.batch, size.length, size.width)),
        "convolutions": (Convolutions, (size.batch, 3, size.image, size.image)),
        "recurrent": (Recurrent, (size.batch, size.length // 4, size.width // 4)),
        "normalized": (lambda _: Normalized(), (128 * size.width // 4, 256)),
    }
    model, shape = made[kind]
    return model(size).to(device, dtype), (torch.randn(shape).to(device, dtype),)
