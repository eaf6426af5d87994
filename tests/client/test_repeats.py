"""Blocks that repeat are traced a few times and copied: the graph is the one that a trace of all of them gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from client.small_models import numbers
from remat import _compat
from remat.capture import joint, repeats
from remat.capture.dataflow import tensors
from remat.compile.alone import capture
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

    def __init__(self, module: nn.Module, args: Sequence[Any] = (), **kwargs: Any) -> None:
        traced = capture(module, args, kwargs)
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


def _in_eval_mode(block: Any) -> None:
    block.eval()


def _frozen(block: Any) -> None:
    block.requires_grad_(False)


def _partly_frozen(block: Any) -> None:
    block.norm.bias.requires_grad_(False)


def _other_dropout(block: Any) -> None:
    block.dropout.p = 0.2


def _other_number(block: Any) -> None:
    block.scale = 1.5


def _integer(block: Any) -> None:
    block.scale = 1


def _branch_by_index(block: Any) -> None:
    block.special = block.number


def _hook(block: Any) -> None:
    block.register_forward_hook(lambda _module, _args, output: output * 2)


def _other_strides(block: Any) -> None:
    block.out.weight = nn.Parameter(block.out.weight.detach().t().contiguous().t())


CHANGES = [
    _in_eval_mode,
    _frozen,
    _partly_frozen,
    _other_dropout,
    _integer,
    _branch_by_index,
    _hook,
    _other_strides,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_differs_is_not_a_copy(change: Callable[[Any], None]) -> None:
    """The blocks before and after it are, each as a run."""
    module = Stack(count=13)
    change(module.blocks[6])
    both = Both(module, example())
    assert both.same
    assert sum(both.runs) <= 13
    assert all(count <= 7 for count in both.runs)


@pytest.mark.parametrize("place", first(1, [0, 3, BLOCKS - 1]))
@pytest.mark.parametrize("change", [_other_dropout, _frozen])
def test_a_block_that_differs_at_an_end(change: Callable[[Any], None], place: int) -> None:
    module = Stack()
    change(module.blocks[place])
    assert Both(module, example()).same


BLIND: dict[str, tuple[str, Callable[..., Any], Callable[[Any], None]]] = {
    "constants": ("words", lambda value, node=None: type(value).__name__, _other_dropout),
    "metadata": ("metadata", lambda value: type(value).__name__, _partly_frozen),
    "strides": ("metadata", lambda value: getattr(value, "shape", None), _other_strides),
}


@pytest.mark.parametrize("blind", BLIND)
def test_a_search_that_is_blind_to_a_difference_is_seen(
    blind: str, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graphs that differ, or by what is expected of the traced ones before."""
    name, mutant, change = BLIND[blind]
    module = Stack()
    change(module.blocks[4])
    monkeypatch.setattr(repeats, name, mutant)
    both = Both(module, example())
    assert both.runs == [BLOCKS]
    assert not both.same or "changes no plan: NotAlike" in said()


MUTANTS = {
    "the block itself for the one before": lambda place: (
        place._replace(kind=joint._INNER) if place.kind == joint._BEFORE else place
    ),
    "what the third reads for the one after": lambda place: (
        place._replace(kind=joint._OUTER) if place.kind == joint._AFTER else place
    ),
    "the third's parameters": lambda place: place._replace(kind=joint._OUTER) if place.kind == joint._OWN else place,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_copy_that_reads_from_elsewhere_is_seen(
    mutant: str, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = joint._Traced.place
    monkeypatch.setattr(joint._Traced, "place", lambda *given: MUTANTS[mutant](right(*given)))
    assert not Both(Stack(), example()).same or "traced one by one" in said()


def test_a_storage_that_is_not_the_blocks_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "fake_like", lambda tensor, _: tensor)
    assert not Both(Stack(), example()).same


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


def test_a_search_for_blocks_that_fails_leaves_the_capture_as_it_was(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: Any) -> Any:
        raise TypeError("unhashable type")

    monkeypatch.setattr(joint, "runs", fails)
    assert Both(Stack(), example()).same
    assert "changes no plan: TypeError: unhashable type" in said()
