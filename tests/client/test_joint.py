"""Blocks that repeat in a graph of torch.compile's: few of them are traced, at the sizes of each call."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import fx, nn

import remat
from client.comparing import step_differences
from client.test_named_backend import OPTIONS
from remat import _compat
from remat.capture import joint
from remat.capture.joint import compiled_joint
from remat.capture.repeats import runs
from remat.capture.sizes import sized_by_inputs
from remat.profiling import measure


class Blocks(nn.Module):
    """Equal blocks with dropout, whose attention reads a size."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        parts = (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(parts)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            heads = x.view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2)
            mixed = torch.softmax(heads @ heads.transpose(-1, -2) / x.shape[1], -1) @ heads
            x = x + block(mixed.transpose(1, 2).reshape(x.shape))
        return x.square().mean()


pytestmark = pytest.mark.usefixtures("anew")


@pytest.mark.thorough
def test_few_blocks_are_traced_at_each_size(caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit what eager trains, static and with symbols, by plans that compute again."""
    plain = Blocks()
    model = copy.deepcopy(plain)
    behind = remat.backend("60%", planner="greedy")
    run = torch.compile(model, backend=behind)
    with caplog.at_level(logging.INFO, "remat"):
        for length in (24, 20, 17, 24, 20):
            x = (torch.randn(4, length, 16),)
            assert step_differences(plain, model, x, run) == []
    assert caplog.text.count("the model repeats 7 blocks of ") == 2, "and further sizes are traced once, with symbols"
    assert all(answer.overhead for answer in behind.answers)


@pytest.mark.thorough
def test_a_trace_that_fails_for_blocks_is_made_of_the_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("not alike")

    monkeypatch.setattr(joint, "expand", failing)
    model, x = Blocks(), torch.randn(4, 24, 16)
    with caplog.at_level(logging.INFO, "remat"):
        torch.compile(model, backend="aot_eager")(x)
        torch._dynamo.reset()
        torch.compile(model, backend=remat.backend(**OPTIONS))(x).backward()
    assert "all blocks are traced one by one" in caplog.text


@pytest.mark.thorough
def test_torchs_notes_on_a_short_graph_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its inputs, outputs and tangents, field by field: the runtime of the compiled function goes by them."""
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*given: Any) -> Any:
            seen.append((graph, list(given)))
            return graph(*given)

        return run

    torch.compile(Blocks(), backend=keep, dynamic=False)(torch.randn(4, 24, 16))
    ((graph, inputs),) = seen
    assert runs(graph.graph)
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(joint, "runs", lambda _: [])
        with _compat.traced_alone():
            descriptor = compiled_joint(graph, inputs)
        state = descriptor._aot_state
        found.append((len(_compat.joint_graph(descriptor).graph.nodes), state.fw_metadata, state.flat_args))
    (nodes, one, args), (others, other, same) = found
    assert nodes == others
    assert len(args) == len(same)
    for field in dataclasses.fields(one):
        assert repr(getattr(one, field.name)) == repr(getattr(other, field.name)), field.name


@pytest.mark.thorough
def test_sizes_are_computed_from_the_inputs_numbers() -> None:
    """Blocks are then alike, although none of their sizes is known."""
    seen: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            seen.append((graph, inputs))
            return graph(*inputs)

        return run

    torch.compile(Blocks(), backend=keep, dynamic=True)(torch.randn(4, 24, 16))
    ((graph, inputs),) = seen
    whole = sized_by_inputs(graph)
    read = [node for node in whole.graph.nodes if isinstance(_compat.example_of(node), torch.SymInt)]
    assert read
    assert not any(isinstance(_compat.example_of(each), torch.Tensor) for node in read for each in node.all_input_nodes)
    assert runs(whole.graph)
    losses = []
    for each in (graph, whole):
        torch.manual_seed(0)
        losses.append(measure.loss_of(each(*inputs)))
    assert losses[0] == losses[1]
