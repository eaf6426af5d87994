"""Small training steps with the things that go wrong in them, for tests of the torch client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Case(NamedTuple):
    """A module, one call of it, and how its output becomes a loss."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def numbers(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator).requires_grad_(requires_grad)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module with these parts and this forward, of a class of its own."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


class Mlp(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return x


class FeedForward(nn.Module):
    """A residual around a normalization, two layers, and dropout if a share is given."""

    def __init__(self, width: int, inner: int | None = None, dropout: float | None = None, affine: bool = True) -> None:
        super().__init__()
        inner = inner or 4 * width
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.up, self.down = nn.Linear(width, inner, bias=affine), nn.Linear(inner, width, bias=affine)
        self.drop = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Joined(nn.Module):
    """Branches, each with an input of its own, whose ends meet in a head; without a plan."""

    def __init__(self, branches: Iterable[Iterable[nn.Module]], head: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in branches)
        self.head = head

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(*(branch(x) for branch, x in zip(self.branches, xs, strict=True)))
        return found


@case
def mlp_with_dropout() -> Case:
    return Case(Mlp(dropout=0.2), (numbers(16, 32),), {}, mean_square)


@case
def batch_norm_and_dropout() -> Case:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4),
    )
    return Case(module, (numbers(4, 3, 12, 12),), {}, mean_square)


@case
def batch_norm_used_twice() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(F.relu(self.norm(self.linear(x)))))

    module = module_of(forward, linear=nn.Linear(16, 16), norm=nn.BatchNorm1d(16))
    return Case(module, (numbers(8, 16),), {}, lambda o: o.pow(4).mean())


@case
def in_place_ops() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.mul_(2.0)
        y[:, :4].add_(1.0)
        return self.b(y).relu_() * 2

    return Case(module_of(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16)), (numbers(8, 16),), {}, mean_square)


@case
def outputs_that_alias() -> Case:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y.view(4, 32), y.t()

    def loss(o: Any) -> torch.Tensor:
        return o[0].square().mean() + o[1].sin().sum() + o[2].cos().mean()

    return Case(module_of(forward, linear=nn.Linear(16, 16)), (numbers(8, 16),), {}, loss)


@case
def input_that_requires_gradients_and_is_returned() -> Case:
    module = module_of(lambda self, x: (self.linear(x), x), linear=nn.Linear(16, 16))
    return Case(module, (numbers(8, 16, requires_grad=True),), {}, lambda o: o[0].square().mean() + o[1].sum())


@case
def attention() -> Case:
    return _attention(0.0)


@case
def attention_with_dropout() -> Case:
    return _attention(0.3)


def _attention(dropout: float) -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 8, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(2, 8, 16))

    module = module_of(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), p=dropout)
    return Case(module, (numbers(2, 8, 16),), {}, mean_square)


@case
def autocast_inside() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(self.norm(x))
        return y.float()

    return Case(module_of(forward, inner=Mlp(16), norm=nn.LayerNorm(16)), (numbers(8, 16),), {}, mean_square)


@case
def parameters_in_bfloat16() -> Case:
    return Case(Mlp(16).bfloat16(), (numbers(8, 16).bfloat16(),), {}, mean_square)


@case
def dict_output_and_odd_arguments() -> Case:
    def forward(
        self: Any, x: torch.Tensor, *, scale: float = 1.0, flag: bool = False, mask: Any = None, extras: Any = None
    ) -> dict[str, Any]:
        y = self.inner(x) * scale
        if flag:
            y = y * mask
        return {"last": y + extras["b"][0], "all": (x, y), "count": 3}

    kwargs = {"scale": 3.0, "flag": True, "mask": numbers(4, 16), "extras": {"b": [numbers(4, 16)]}}
    module = module_of(forward, inner=Mlp(16))
    return Case(module, (numbers(4, 16),), kwargs, lambda o: o["last"].square().mean() + o["all"][1].sum())


@case
def tied_weights() -> Case:
    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens)))

    module = module_of(forward, embed=nn.Embedding(11, 16), head=nn.Linear(16, 11, bias=False), inner=Mlp(16))
    module.head.weight = module.embed.weight
    return Case(module, (torch.arange(8).view(2, 4) % 11,), {}, mean_square)


@case
def frozen_parameters() -> Case:
    module = nn.Sequential(Mlp(16), Mlp(16), Mlp(16))
    module[0].requires_grad_(False)
    module[1].layers[1].weight.requires_grad_(False)
    return Case(module, (numbers(4, 16),), {}, mean_square)


@case
def part_without_gradients() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)

    return Case(module_of(forward, teacher=Mlp(16), student=Mlp(16)), (numbers(4, 16),), {}, None)


@case
def unused_parameter() -> Case:
    module = module_of(lambda self, x: self.inner(x), inner=Mlp(16), unused=nn.Linear(3, 3))
    return Case(module, (numbers(4, 16),), {}, mean_square)


@case
def random_numbers_of_all_kinds() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x + torch.randn_like(x) * 0.1)
        return F.dropout(y, 0.2, True) * torch.rand(()).add(0.5) + F.rrelu(y, training=True)

    return Case(module_of(forward, inner=Mlp(16)), (numbers(4, 16),), {}, mean_square)


@case
def random_numbers_nobody_reads() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        y = self.inner(x)
        torch.randn(2)
        return y

    return Case(module_of(forward, inner=Mlp(16, dropout=0.1)), (numbers(4, 16),), {}, mean_square)


@case
def loss_and_unused_output() -> Case:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.second(hidden).mean(), hidden

    return Case(module_of(forward, first=Mlp(16), second=Mlp(16)), (numbers(4, 16),), {}, lambda o: o[0])


@case
def custom_autograd_function() -> Case:
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (x > 0) * 0.5

    module = module_of(lambda self, x: self.second(Clamp.apply(self.first(x))), first=Mlp(16), second=Mlp(16))
    return Case(module, (numbers(4, 16),), {}, mean_square)


@case
def module_hooks() -> Case:
    module = Mlp(16)
    module.layers[0].register_forward_hook(lambda m, i, o: o * 2)
    return Case(module, (numbers(4, 16),), {}, mean_square)


@case
def parameter_hooks() -> Case:
    module = Mlp(16)
    module.layers[0].weight.register_hook(lambda g: g * 2)
    return Case(module, (numbers(4, 16),), {}, mean_square)


@case
def tensors_that_are_no_buffers() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.table + torch.tensor([1.0, 2.0] * 8)

    return Case(module_of(forward, inner=Mlp(16), table=numbers(16)), (numbers(4, 16),), {}, mean_square)


@case
def complex_numbers() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.inner(x)) * (1 + 1j), n=16)

    return Case(module_of(forward, inner=Mlp(16)), (numbers(4, 16),), {}, mean_square)


@case
def buffer_that_is_read_and_overwritten() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).sin() * self.mean.exp()
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.count.add_(1)
        return y.sin() * self.mean

    module = module_of(forward, inner=Mlp(16))
    module.register_buffer("mean", torch.ones(16))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    return Case(module, (numbers(4, 16),), {}, mean_square)


class Writing(nn.Module):
    """An input is written to before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        found: torch.Tensor = self.layer(x) * y
        return found
