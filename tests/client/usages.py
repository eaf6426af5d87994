"""What people run in a training step: small modules with one usage each, for `test_usages.py` and the table of docs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .small_models import Case, mean_square, numbers

WIDTH = 16


class Usage(NamedTuple):
    """What a row of the table of `docs/adoption.md` is about, what it says, and what makes the case."""

    text: str
    verdict: str
    make: Callable[[], Case]


USAGES: dict[str, Usage] = {}
PLANNED, PARTS, PLAIN = "one plan", "plans for the parts around it", "as it is"


def usage(text: str, verdict: str = PLANNED) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def note(make: Callable[[], Case]) -> Callable[[], Case]:
        USAGES[make.__name__] = Usage(text, verdict, make)
        return make

    return note


class Around(nn.Module):
    """Two layers before what a function does with the module and a tensor, and one after it."""

    def __init__(self, middle: Callable[..., torch.Tensor] | None = None, **parts: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle = middle
        for name, part in parts.items():
            setattr(self, name, part)

    def inner(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.middle(self, x, *args)

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.last(self.inner(torch.tanh(self.second(torch.tanh(self.first(x)))), *args))


def around(middle: Callable[..., torch.Tensor], *args: Any, rows: int = 8, **parts: Any) -> Case:
    return Case(Around(middle, **parts), (numbers(rows, WIDTH), *args), {}, mean_square)


# attention and higher-order operators


def heads(x: torch.Tensor) -> torch.Tensor:
    """[rows, WIDTH] as [1, 2, rows, WIDTH / 2]."""
    return x.view(1, x.shape[0], 2, WIDTH // 2).transpose(1, 2)


def nearer(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return score - 0.1 * (query - key)


def earlier(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


@usage("`flex_attention` with a score function")
def flex_attention_with_a_score() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return flex_attention(heads(x), heads(x.tanh()), heads(x), score_mod=nearer).transpose(1, 2).reshape(x.shape)

    return around(middle, rows=128)


@usage("`flex_attention` with a block mask")
def flex_attention_with_a_block_mask() -> Case:
    def middle(_: nn.Module, x: torch.Tensor, mask: Any) -> torch.Tensor:
        return flex_attention(heads(x), heads(x.tanh()), heads(x), block_mask=mask).transpose(1, 2).reshape(x.shape)

    return around(middle, create_block_mask(earlier, 1, 1, 128, 128, device="cpu"), rows=128)


@usage("`torch.compiler.nested_compile_region`")
def nested_compile_region() -> Case:
    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight) + x

    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        return block(block(x, module.first.weight), module.last.weight)

    return around(middle)


@usage("`torch.cond`")
def cond() -> Case:
    return around(lambda _, x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)))


@usage("`map` over rows")
def map_over_rows() -> Case:
    from torch._higher_order_ops.map import map as over

    def scaled(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (row * weight).tanh()

    return around(lambda module, x: over(scaled, x, module.scale), scale=nn.Parameter(torch.ones(WIDTH)))


@usage("`scan`")
def scan() -> Case:
    from torch._higher_order_ops.scan import scan as over

    def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = (carry + row).tanh()
        return found, found.clone()

    return around(lambda _, x: over(step, torch.zeros_like(x[0]), x)[1])


@usage("`associative_scan`, as state-space models have it")
def associative_scan() -> Case:
    from torch._higher_order_ops.associative_scan import associative_scan as over

    def combine(left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return around(lambda _, x: over(combine, (x.sigmoid(), x), dim=0, combine_mode="generic")[1])


@usage("`while_loop` that is not differentiated")
def while_loop() -> Case:
    from torch._higher_order_ops.while_loop import while_loop as loop

    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (torch.tensor(0), x.detach()))[1]
        return x + scale

    return around(middle)


# custom operators and autograd functions


@torch.library.custom_op("remat_usages::scaled_", mutates_args={"x"})
def scaled_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@usage("a custom operator that writes to a value")
def custom_operator_that_mutates() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept = x.detach().clone()
        scaled_(kept, 0.5)
        return x * kept

    return around(middle)


@torch.library.custom_op("remat_usages::noted", mutates_args={"largest"})
def noted(x: torch.Tensor, largest: torch.Tensor) -> None:
    largest.copy_(torch.maximum(largest, x.abs().amax(0)))


@usage("a custom operator that writes to a buffer")
def custom_operator_that_writes_a_buffer() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        noted(x.detach(), module.largest)
        return x / (1 + module.largest)

    return around(middle, largest=nn.Buffer(torch.zeros(WIDTH)))


class ByOut(torch.autograd.Function):
    """A product in chunks that are written by `out=`, as heads of language models are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        found = x.new_empty(x.shape[0], weight.shape[0])
        for at in range(0, x.shape[0], 4):
            torch.mm(x[at : at + 4], weight.t(), out=found[at : at + 4])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        found = torch.empty_like(x)
        torch.mm(gradient, weight, out=found)
        return found, gradient.t() @ x


@usage("an autograd function around products with `out=`")
def autograd_function_around_out() -> Case:
    return around(lambda module, x: ByOut.apply(x, module.first.weight))


class Rounded(torch.autograd.Function):
    """Rounds forward, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@usage("a straight-through estimator")
def straight_through_estimator() -> Case:
    return around(lambda _, x: Rounded.apply(x))


# sizes and layouts that depend on the data


class Ctc(Around):
    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        found = super().forward(x).view(-1, 1, WIDTH).log_softmax(-1)
        return F.ctc_loss(found, args[0], torch.tensor([x.shape[0]]), torch.tensor([args[0].shape[1]]))


@usage("`ctc_loss`")
def ctc_loss() -> Case:
    return Case(Ctc(lambda _, x: x.sin()), (numbers(12, WIDTH), torch.tensor([[1, 3, 2, 5]])), {}, None)


@usage("an embedding with sparse gradients", PARTS)
def embedding_with_sparse_gradients() -> Case:
    tokens, table = torch.tensor([1, 3, 1, 0, 2, 2, 7, 5]), nn.Embedding(10, WIDTH, sparse=True)
    return around(lambda module, x, tokens: x + module.table(tokens), tokens, table=table)


@usage("jagged tensors", PARTS)
def jagged_tensors() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8]))
        return torch.tanh(module.jagged(nested)).values()

    return around(middle, jagged=nn.Linear(WIDTH, WIDTH))


@usage("experts in a loop over those that have tokens", PARTS)
def experts_in_a_loop() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = module.router(x).softmax(-1).topk(2, -1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(module.experts):
            rows, places = torch.where(chosen == i)
            if rows.numel():
                found.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return found

    experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
    return around(middle, router=nn.Linear(WIDTH, 3), experts=experts)


@usage("`nonzero`", PARTS)
def nonzero() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        return x.index_add(0, rows, x[rows].sin())

    return around(middle)


@usage("a boolean mask", PARTS)
def boolean_mask() -> Case:
    return around(lambda _, x: x * x[x > 0].mean())


@usage("a branch on the value of a tensor", PARTS)
def branch_on_a_value() -> Case:
    return around(lambda _, x: x.sin() if x.sum().item() > 0 else x.cos())


# recurrent networks


@usage("an LSTM", PARTS)
def lstm() -> Case:
    return around(lambda module, x: module.inside(x[None])[0][0], inside=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True))


@usage("a GRU", PARTS)
def gru() -> Case:
    inside = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
    return around(lambda module, x: module.inside(x[None])[0][0], inside=inside)


@usage("an LSTM cell in a loop")
def lstm_cell() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(1, WIDTH), x.new_zeros(1, WIDTH)
        found = []
        for row in x:
            hidden = module.cell(row[None], hidden)
            found.append(hidden[0])
        return torch.cat(found)

    return around(middle, cell=nn.LSTMCell(WIDTH, WIDTH))


@usage("packed sequences", PARTS)
def packed_sequences() -> Case:
    def middle(module: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x.view(2, -1, WIDTH), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(module.inside(packed)[0], batch_first=True)[0].reshape(-1, WIDTH)

    return around(middle, torch.tensor([3, 4]), inside=nn.LSTM(WIDTH, WIDTH, batch_first=True))


# autograd and functional transforms inside


@usage("`torch.func.functional_call`")
def functional_call() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        scaled = {name: 0.5 * value for name, value in module.inside.named_parameters()}
        return torch.func.functional_call(module.inside, scaled, (x,))

    return around(middle, inside=nn.Linear(WIDTH, WIDTH))


@usage("`torch.func.vmap` inside")
def vmap_inside() -> Case:
    return around(lambda module, x: torch.func.vmap(module.inside)(x), inside=nn.Linear(WIDTH, WIDTH))


@usage("`torch.func.grad` inside")
def func_grad_inside() -> Case:
    return around(lambda _, x: x + torch.func.grad(lambda y: y.sin().sum())(x))


@usage("`torch.autograd.grad` of a leaf that is made inside", PARTS)
def autograd_grad_inside() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            there = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(there.pow(3).sum(), there)
        return x + found

    return around(middle)


@usage("`torch.autograd.grad` inside with `create_graph=True`")
def autograd_grad_inside_that_is_trained() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        return x + found

    return around(middle)


@usage("`torch.utils.checkpoint` inside")
def checkpoint_inside() -> Case:
    from torch.utils.checkpoint import checkpoint

    inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
    return around(lambda module, x: checkpoint(module.inside, x, use_reentrant=False), inside=inside)


# state of modules


@usage("spectral norm, by a parametrization")
def spectral_norm() -> Case:
    inside = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return around(lambda module, x: module.inside(x), inside=inside)


@usage("spectral norm, by a hook")
def spectral_norm_by_hook() -> Case:
    return around(lambda module, x: module.inside(x), inside=nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@usage("weight norm")
def weight_norm() -> Case:
    inside = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return around(lambda module, x: module.inside(x), inside=inside)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


@usage("`parametrize.cached`")
def parametrize_cached() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return module.inside(torch.tanh(module.inside(x)))

    inside = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(inside, "weight", Symmetric())
    return around(middle, inside=inside)


@usage("a buffer that is assigned anew")
def buffer_that_is_assigned_anew() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.average = 0.9 * module.average + 0.1 * x.detach().mean(0)
        return x - module.average

    return around(middle, average=nn.Buffer(torch.zeros(WIDTH)))


@usage("a counter")
def counter() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.steps += 1
        return x / module.steps

    return around(middle, steps=0)


@usage("features that are recorded on the module")
def recorded_features() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.features = x.detach()
        module.all_features["middle"] = x
        return x.sin()

    return around(middle, features=None, all_features={})


@usage("a key–value cache in a list")
def cache_in_a_list() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for part in x.chunk(4):
            cache.append(module.inside(part))
            part = torch.cat(cache)
        module.cache = [each.detach() for each in cache]
        return part

    return around(middle, inside=nn.Linear(WIDTH, WIDTH), cache=[])


@usage("metrics in a dictionary, by `item`", PARTS)
def metrics_in_a_dictionary() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.metrics["mean"] = x.mean().item()
        return x.sin()

    return around(middle, metrics={})


@usage("`print`", PARTS)
def print_in_forward() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    return around(middle)


# random numbers


@usage("a branch on `random.random()`", PARTS)
def python_random_numbers() -> Case:
    return around(lambda _, x: x * random.random() if random.random() > 0.3 else x.sin())


@usage("`torch.manual_seed`", PARTS)
def manual_seed_in_forward() -> Case:
    def middle(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return x + torch.randn_like(x)

    return around(middle)


@usage("a generator of its own", PARTS)
def generator_in_forward() -> Case:
    def middle(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=module.generator)

    return around(middle, generator=torch.Generator().manual_seed(3))


@usage("numpy")
def numpy_in_forward() -> Case:
    return around(lambda _, x: x * torch.from_numpy(x.detach().numpy().clip(0, 1)))


# compiled parts


@usage("a part under `torch.compile`")
def compiled_part() -> Case:
    inside = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="aot_eager")
    return around(lambda module, x: module.inside(x), inside=inside)


@usage("a part that Inductor compiles")
def part_compiled_by_inductor() -> Case:
    inside = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return around(lambda module, x: module.inside(x), inside=inside)


@usage("a part under `torch.compiler.disable`", PARTS)
def disabled_part() -> Case:
    inside = torch.compiler.disable(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return around(lambda module, x: module.inside(x), inside=inside)
