"""Blocks that repeat are traced a few times and copied: the graph is the one that a trace of all of them gives.

In stacks that are more than a chain, too, which are copied or traced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from client.small_models import Case, mean_square, numbers
from client.test_exact import callable_of, outcome
from remat import _compat
from remat.capture import joint, repeats
from remat.capture.dataflow import tensors
from remat.compile.alone import capture
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import training_step
from remat_ir import plain_plan
from tiers import first

BLOCKS = 8
NOTES = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "desc",
    "partitioner_tag",
    "original_aten",
    "tensor_meta",
)


def described(joint: fx.GraphModule) -> list[Any]:
    """A joint graph in words: all but the names of nodes, with storages by the order in which they appear."""
    nodes = {node: at for at, node in enumerate(joint.graph.nodes)}
    storages: dict[int, int] = {}
    found = []
    for node in nodes:
        reads = [nodes[n] for n in repeats.nodes_in((node.args, node.kwargs))]
        held = list(tensors(node.meta.get("val")))
        places = [storages.setdefault(_compat.storage_key(t), len(storages)) for t in held]
        sizes = [(t.untyped_storage().nbytes(), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in held]
        notes = [repr(node.meta.get(key)) for key in NOTES]
        constants = repr(fx.node.map_arg((node.args, node.kwargs), lambda _: None))
        found.append((node.op, str(node.target), constants, reads, places, sizes, notes))
    return found


class Both:
    """The joint graphs of a call: as it is captured, and traced whole."""

    def __init__(self, module: nn.Module, args: Sequence[Any]) -> None:
        traced = capture(module, args)
        self.descriptor, self.captured = traced.descriptor, described(traced.joint)
        with _compat.traced_alone():
            whole = _compat.export_joint(traced.module, traced.inputs)
            self.whole = described(_compat.joint_graph(whole))
        self.runs = [len(run.blocks) for run in repeats.runs(traced.module.graph)]

    @property
    def same(self) -> bool:
        return self.captured == self.whole


class Block(nn.Module):
    """A transformer's, with all that a test changes in one of them."""

    def __init__(self, number: int = 0, width: int = 16) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.number, self.kind, self.scale, self.special = number, "gelu", 1.0, -1

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(-1, -2) * self.scale + mask, -1) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        y = self.up(self.last(x))
        y = torch.relu(y) if self.number == self.special else F.gelu(y) if self.kind == "gelu" else F.silu(y)
        return x + self.dropout(self.down(y))


class Stack(nn.Module):
    """Blocks one after the other, between two layers, with a mask that all of them read."""

    def __init__(self, kind: Callable[..., nn.Module] = Block, count: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(kind(number) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -9.0)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def example() -> tuple[torch.Tensor]:
    return (numbers(2, 6, 16),)


def test_blocks_are_copied_and_the_graph_is_that_of_all(said: Callable[[], str]) -> None:
    both = Both(Stack(), example())
    assert both.runs == [BLOCKS]
    assert both.same
    assert f"{repeats.KEPT} of each kind were traced" in said()


CHANGES: dict[str, Callable[[Any], object]] = {
    "eval mode": lambda block: block.eval(),
    "frozen": lambda block: block.requires_grad_(False),
    "partly frozen": lambda block: block.norm.bias.requires_grad_(False),
    "another dropout": lambda block: setattr(block.dropout, "p", 0.2),
    "an integer": lambda block: setattr(block, "scale", 1),
    "a branch by its index": lambda block: setattr(block, "special", block.number),
    "a hook": lambda block: block.register_forward_hook(lambda _module, _args, output: output * 2),
    "other strides": lambda block: setattr(
        block.out, "weight", nn.Parameter(block.out.weight.detach().t().contiguous().t())
    ),
}


@pytest.mark.parametrize("change", first(2, CHANGES))
def test_a_block_that_differs_is_not_a_copy(change: str) -> None:
    """The blocks before and after it are, each as a run."""
    module = Stack(count=13)
    CHANGES[change](module.blocks[6])
    both = Both(module, example())
    assert both.same
    assert sum(both.runs) <= 13
    assert all(count <= 7 for count in both.runs)


@pytest.mark.parametrize("place", first(1, [0, 3, BLOCKS - 1]))
@pytest.mark.parametrize("change", ["another dropout", "frozen"])
def test_a_block_that_differs_at_an_end(change: str, place: int) -> None:
    module = Stack()
    CHANGES[change](module.blocks[place])
    assert Both(module, example()).same


def test_what_differs_in_the_joint_graph_alone_is_traced_whole(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a step of the trace to depend on what it traced before, two blocks would show it."""
    real, shown = joint.words, []

    def counting(value: Any) -> Any:
        shown.append(value)
        return real(value) if len(shown) < 90 else object()

    monkeypatch.setattr(joint, "words", counting)
    assert Both(Stack(), example()).same
    assert "changes no plan: NotAlike" in said()


@pytest.mark.thorough
def test_a_search_for_blocks_that_fails_leaves_the_capture_as_it_was(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: Any) -> Any:
        raise TypeError("unhashable type")

    monkeypatch.setattr(joint, "runs", fails)
    assert Both(Stack(), example()).same
    assert "changes no plan: TypeError: unhashable type" in said()


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


@pytest.mark.parametrize("name", first(0, ODD, 4))
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


@pytest.mark.parametrize("name", first(0, ["tied weights", "in place", "one counter"], 1))
def test_copied_blocks_train_exactly(name: str, profiles: DiskProfiles) -> None:
    """As torch's own aot_eager does, with dropout, twice."""
    case = Case(ODD[name](), example(), {}, mean_square)
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    stock = torch.compile(case.module, backend="aot_eager")
    assert (
        measure.differences(outcome(case, stock), outcome(case, callable_of(case, step, plain_plan(step.graph)))) == []
    )
