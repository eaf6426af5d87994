"""A graph of torch.compile's with symbols is traced once, its blocks that repeat a few times, whatever the sizes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import sympy
import torch
import torch.nn.functional as F
from benchmarks.models.subject import transformer
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

import remat
from client.comparing import step_differences
from client.small_models import Mlp, Writing, mean_square, numbers
from remat import _compat
from remat.capture import joint
from remat.capture.joint import compiled_joint
from remat.capture.repeats import runs
from remat.capture.sizes import sized_by_inputs
from remat.profiling import measure
from tiers import first

WITH_SYMBOLS = "sizes are symbols of its trace"
"""What the log says once for each graph."""

pytestmark = pytest.mark.usefixtures("anew")


class Case(NamedTuple):
    """A module and its calls, whose third one or a later one is traced with symbols."""

    module: Callable[[], nn.Module]
    calls: Sequence[tuple[Any, ...]]
    loss: Callable[[Any], torch.Tensor] = mean_square


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


class Sized(nn.Module):
    """Values that depend on sizes: a mask, positions, a scale, and views of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        mask = torch.ones(rows, rows).tril()
        mixed = (self.layers(x)[None].expand(rows, -1, -1) * mask[:, :, None]).sum(0)
        return mixed / rows + torch.arange(rows)[:, None] / (2 * rows + 1)


class Images(nn.Module):
    """Convolutions and batch norm, whose statistics every call updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.second, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(F.relu(self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))
        return found


class Scaled(nn.Module):
    """A number that is an argument, and one that is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(16, 2)

    def forward(self, x: torch.Tensor, by: float) -> tuple[torch.Tensor, float]:
        return self.layers(x) * (by / 10) * x.shape[0], x.shape[0] * 2


class Joined(nn.Module):
    """Two inputs of lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.table(tokens), context), 1)
        scores = both @ both.transpose(1, 2) / both.shape[1] ** 0.5
        return F.gelu(self.out(F.dropout(scores.softmax(-1), 0.1) @ both))[:, : tokens.shape[1]]


def tokens(length: int) -> torch.Tensor:
    return torch.arange(3 * length).view(3, length) % 20


CASES = {
    "dropout": Case(lambda: Mlp(16, 3, 0.2), [(numbers(n, 16),) for n in (7, 5, 9, 6, 12, 9)]),
    "attention": Case(Blocks, [(numbers(4, n, 16),) for n in (24, 20, 17, 33, 20, 26)]),
    "sizes": Case(Sized, [(numbers(n, 16),) for n in (7, 5, 9, 6, 12)]),
    "images": Case(Images, [(numbers(2, 3, n, n + 2),) for n in (16, 20, 13, 24, 17)]),
    "channels last": Case(
        Images, [(numbers(b, 3, n, n).to(memory_format=torch.channels_last),) for b, n in ((2, 16), (3, 20), (5, 13))]
    ),
    "numbers in and out": Case(Scaled, [(numbers(4, 16), k) for k in (2, 3, 5, 7, 11)], lambda found: found[0].sum()),
    "floats": Case(Scaled, [(numbers(4, 16), k) for k in (0.5, 0.25, 0.75, 0.1)], lambda found: found[0].sum()),
    "a float that stays": Case(
        Scaled,
        [(numbers(n, 16), k) for n, k in ((4, 0.5), (4, 0.3), (6, 0.3), (7, 0.3), (5, 0.3))],
        lambda f: f[0].sum(),
    ),
    "two lengths": Case(Joined, [(tokens(n), numbers(3, m, 16)) for n, m in ((5, 6), (7, 4), (4, 9), (8, 8), (3, 5))]),
    "0 and 1": Case(lambda: Mlp(16, 2), [(numbers(n, 16),) for n in (5, 0, 1, 7, 3, 1, 0, 4)], torch.sum),
}


@pytest.mark.parametrize("name", first(1, CASES))
def test_every_size_trains_bit_for_bit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    plain = case.module()
    model = copy.deepcopy(plain)
    # sizes 0 and 1 have graphs of their own, and four calls of so few bytes have no plan within less than all
    run = torch.compile(model, backend=remat.backend("100%" if name == "0 and 1" else "80%", planner="greedy"))
    with caplog.at_level(logging.INFO, "remat"):
        for call in (*case.calls, *case.calls):
            found = step_differences(plain, model, call, run, case.loss)
            assert found == [], [each.shape for each in call if hasattr(each, "shape")]
    assert (WITH_SYMBOLS in caplog.text) == (name != "floats")
    assert "traced by itself" not in caplog.text
    assert "without a plan" not in caplog.text


def test_a_plan_is_compiled_once_for_all_sizes() -> None:
    """One for the graph of the first size, which Dynamo takes for the only one, and one for all others."""
    model, behind = Mlp(16, 3), remat.backend("100%", planner="greedy")
    run = torch.compile(model, backend=behind)
    for rows in (7, 5, 9, 6, 12, 8):
        run(numbers(rows, 16)).sum().backward()
    assert len(behind.planned) == 6
    assert len({each.run for each in behind.planned}) == 2


@pytest.mark.thorough
def test_nothing_is_kept_for_its_size(caplog: pytest.LogCaptureFixture) -> None:
    """The peak is that of a trace at the size itself, to the byte; more where nothing is computed again."""
    peaks = {}
    for sizes in ((96, 64, 80, 112), (112,)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Blocks(4)
        run = torch.compile(model, backend=remat.backend(remat.Fraction(0), planner="greedy", on_failure="raise"))
        for size in sizes:
            step = measure.forward_backward(run, (numbers(4, size, 16),))
            step()
            model.zero_grad()
        peaks[len(sizes)] = measure.peak_memory(step).peak_bytes
    assert peaks[4] == peaks[1]


@pytest.mark.thorough
def test_inputs_that_share_memory_and_are_written_have_traces_of_their_own() -> None:
    def given(rows: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        both = numbers(2 * rows + 2, 16)
        if kind == "apart":
            return both[:rows].clone(), both[rows : 2 * rows].clone()
        return both[1 : rows + 1], both[2 : rows + 2]

    plain = Writing()
    run = torch.compile(copy.deepcopy(plain), backend=remat.backend("100%", planner="greedy"))
    for rows, kind in ((3, "apart"), (5, "apart"), (4, "apart"), (6, "shared"), (7, "apart"), (4, "shared")):
        assert torch.equal(run(*given(rows, kind)), plain(*given(rows, kind))), (rows, kind)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is F.gelu else found


@pytest.mark.thorough
def test_a_mode_of_functions_is_applied_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=remat.backend("100%", planner="greedy"))
    with caplog.at_level(logging.INFO, "remat"), Doubled():
        for rows in (3, 5, 4, 7):
            assert step_differences(plain, model, (numbers(rows, 16),), run, mean_square) == []
    assert WITH_SYMBOLS in caplog.text


def test_a_trace_holds_for_the_sizes_that_its_guards_let_through() -> None:
    rows, columns = sympy.symbols("rows columns", positive=True, integer=True)
    symbols = _compat.Symbols({rows: sympy.Integer(6), columns: sympy.Integer(4)})

    dynamos = ShapeEnv()
    one = symbols.like(6, dynamos.create_symintnode(rows, hint=6))
    other = symbols.like(4, dynamos.create_symintnode(columns, hint=4))

    def held() -> list[tuple[int, int]]:
        pairs = [(r, c) for r in (0, 1, 3, 6, 8) for c in (4, 6)]
        return [(r, c) for r, c in pairs if symbols.values({rows: sympy.Integer(r), columns: sympy.Integer(c)})]

    assert held() == [(3, 4), (3, 6), (6, 4), (6, 6), (8, 4), (8, 6)]
    assert one % 2 == 0
    assert one > other
    assert held() == [(6, 4), (8, 4), (8, 6)]


def words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(length))


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, length - 2 * row :] = 0
    return mask


SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
DECODERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 100, "n_embd": 32, "n_layer": 7, "n_head": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_hidden_layers": 7, "num_key_value_heads": 1}),
    "bert": ("BertForSequenceClassification", "BertConfig", {**SMALL, "num_hidden_layers": 7}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 7, "num_heads": 2},
    ),
}


@pytest.mark.parametrize("name", first(0, DECODERS, 1))
def test_models_of_transformers_train_bit_for_bit_at_many_lengths(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, config, sizes = DECODERS[name]
    more = {"decoder_start_token_id": 0} if name == "t5" else {}
    model = transformer(kind, config, **sizes, **more, use_cache=False)
    plain = copy.deepcopy(model)
    remat.enable(model, budget="70%", planner="greedy", mode="graph", self_check=False)
    with caplog.at_level(logging.INFO, "remat"):
        for at, length in enumerate((12, 16, 9, 24, 12, 11)):
            batch = 3 if name != "bert" or at < 3 else 4
            given = {"input_ids": words(batch, length), "attention_mask": padding(batch, length)}
            given["labels"] = {"bert": words(batch, 1)[:, 0] % 2, "t5": words(batch, length // 2 + 1)}.get(
                name, given["input_ids"]
            )
            steps = (measure.forward_backward(each, (), given, loss=lambda out: out.loss) for each in (plain, model))
            expected, found = (measure.outcome(each, step) for each, step in zip((plain, model), steps, strict=True))
            assert measure.differences(expected, found) == [], length
    assert WITH_SYMBOLS in caplog.text
    assert "traced by itself" not in caplog.text
    assert "were traced, the others are copies" in caplog.text
    alike = 6 if name == "llama" else 7
    assert name == "t5" or caplog.text.count(f"the model repeats {alike} blocks") >= 2


def caught(dynamic: bool) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo makes of a call of the blocks, and its inputs."""
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        def run(*given: Any) -> Any:
            seen.append((graph, list(given)))
            return graph(*given)

        return run

    torch.compile(Blocks(), backend=keep, dynamic=dynamic)(torch.randn(4, 24, 16))
    (found,) = seen
    return found


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
def test_torchs_notes_on_a_short_graph_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its inputs, outputs and tangents, field by field: the runtime of the compiled function goes by them."""
    graph, inputs = caught(dynamic=False)
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
    graph, inputs = caught(dynamic=True)
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
