"""The memory tables: Checkmate's Figure 1, and Tables 1 and 2 of RR-9273: `python -m benchmarks.figures.memory`.

Nothing is computed: the layers of the Checkmate networks are counted, and the ResNets of torch run on the meta device,
where outputs are counted, and the storages that autograd saves for the backward pass, each once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures.draw import NAMES
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.picture import figure, save
from benchmarks.harness.table import csv_text, table
from benchmarks.models.stages import stages_of
from benchmarks.models.subject import Around

PAGE = Path(__file__).parents[1] / "results" / "memory.md"
ROWS = Path(__file__).parents[1] / "results" / "figures" / "memory.csv"
PICTURE = ROWS.with_suffix(".png")

IMAGES = 32
SENTENCES, TOKENS = 8, 512
DEVICE = 16 * 10**9
"""Bytes of the paper's V100."""

WEIGHTS = {"resnet18": 175.05, "resnet34": 329.29, "resnet50": 384.85, "resnet101": 674.65, "resnet152": 913.36}
"""RR-9273, Table 1: megabytes for each model to keep all weights."""

WITH_ACTIVATIONS = {
    224: (230.05, 413.00, 620.27, 1027.21, 1410.62),
    350: (309.83, 534.96, 964.66, 1543.72, 2139.75),
    500: (449.21, 749.73, 1570.93, 2472.72, 3458.50),
    650: (639.07, 1039.08, 2387.54, 3682.00, 5161.76),
    1100: (1496.10, 2346.95, 6073.06, 9208.30, 12961.96),
    1500: (2628.70, 4075.07, 10944.42, 16515.11, 23277.27),
}
"""RR-9273, Table 2: megabytes for weights and activations at batch 1, by image side and in the order of Table 1."""

CLASSES = 1000
COPIES = 4
"""Table 1 is four times the parameters, with 1,000 classes: they, their gradients and, it seems, two copies more."""

COUNTED = ("convolution", "batch_norm", "relu", "pool")
"""Whose outputs Table 2 counts twice, value and gradient; the sum of a residual block is in its ReLU, in place."""


class _Outputs(TorchDispatchMode):
    """Adds up the bytes of the outputs of operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        first = found[0] if isinstance(found, tuple | list) else found
        if isinstance(first, torch.Tensor):
            self.made[func._schema.name] += FLOAT * first.numel()
        return found


def counted_bytes(stages: list[nn.Module], x: torch.Tensor) -> int:
    """Twice the outputs of the layers that RR-9273 counts."""
    with _Outputs() as outputs:
        for stage in stages:
            x = stage(x)
    return 2 * sum(size for name, size in outputs.made.items() if any(kind in name for kind in COUNTED))


def saved_bytes(stages: list[nn.Module], x: torch.Tensor) -> int:
    """The bytes that autograd saves for the backward pass of stages, parameters and buffers aside."""
    own = {StorageWeakRef(t.untyped_storage()) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    found: dict[StorageWeakRef, int] = {}
    alive = []  # a storage's place must not be taken by another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        found[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for stage in stages:
            x = stage(x)
    return sum(size for storage, size in found.items() if storage not in own)


def resnets() -> list[dict[str, str | int | float]]:
    """Tables 1 and 2 side by side with ours, in MiB: weights, outputs counted twice, and what autograd saves."""
    rows: list[dict[str, str | int | float]] = []
    for at, (name, paper) in enumerate(WEIGHTS.items()):
        with torch.device("meta"):
            stages = stages_of(name, 1)
        parameters = sum(p.numel() for stage in stages for p in stage.parameters())
        classifier = stages[-1].linear
        assert isinstance(classifier, nn.Linear)
        parameters += (CLASSES - classifier.out_features) * (classifier.in_features + 1)
        for side, totals in WITH_ACTIVATIONS.items():
            image = torch.empty(1, 3, side, side, device="meta")
            rows.append(
                {
                    "network": name,
                    "image": side,
                    "paper_weights": paper,
                    "weights": round(COPIES * FLOAT * parameters / 2**20, 2),
                    "paper_activations": round(totals[at] - paper, 2),
                    "activations": round(counted_bytes(stages, image) / 2**20, 2),
                    "saved": round(saved_bytes(stages, image) / 2**20, 2),
                }
            )
    return rows


class Bar(NamedTuple):
    """A network of Figure 1: its name, its batch, and GB of parameters and of activations."""

    network: str
    batch: str
    parameters: float
    activations: float


def networks() -> list[Bar]:
    """Those of Checkmate's evaluation, what their layers make, and the language models that it cites in Figure 1 alone.

    Of a language model the activations are what autograd saves, the matrix of scores of its attention among them.
    """
    bars = []
    for name in NAMES:
        network = ARCHITECTURES[name]()
        graph = training_graph(network, IMAGES)
        assert graph.backward_from is not None
        forward = {v for v, op in enumerate(graph.value_op) if op < graph.backward_from}
        activations = sum(graph.value_bytes[v] for v in forward) / 1e9
        bars.append(Bar(NAMES[name], f"{IMAGES} images", FLOAT * network.parameters / 1e9, activations))
    for name, model in language_models().items():
        ids = torch.zeros(SENTENCES, TOKENS, dtype=torch.long, device="meta")
        parameters = FLOAT * sum(parameter.numel() for parameter in model.parameters()) / 1e9
        bars.append(Bar(name, f"{SENTENCES} × {TOKENS} tokens", parameters, saved_bytes([model], ids) / 1e9))
    return bars


def language_models() -> dict[str, nn.Module]:
    """BERT and RoBERTa of the large size, and the encoder of the big Transformer, on the meta device."""
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        return {
            "Transformer": nn.Sequential(nn.Embedding(37_000, 1024), encoder).train(),
            "BERT": _Hidden(BertModel(BertConfig(**large), add_pooling_layer=False)).train(),
            "RoBERTa": _Hidden(
                RobertaModel(
                    RobertaConfig(**large, vocab_size=50_265, max_position_embeddings=514), add_pooling_layer=False
                )
            ).train(),
        }


class _Hidden(Around):
    """A model of transformers that returns its last hidden state alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(ids).last_hidden_state
        return hidden


def table_of(bars: Sequence[Bar]) -> str:
    """Figure 1 in numbers."""
    rows = []
    for bar in bars:
        ratio = bar.activations / bar.parameters
        rows.append([bar.network, bar.batch, f"{bar.parameters:.2f}", f"{bar.activations:.2f}", f"{ratio:.0f}"])
    return table(("network", "batch", "parameters, GB", "activations, GB", "ratio"), rows)


def draw(bars: Sequence[Bar], path: Path) -> None:
    """Figure 1 as bars, with the memory of the paper's device."""
    drawn, ((axis,),) = figure(1, size=(9, 4))
    places = range(len(bars))
    parameters = [bar.parameters for bar in bars]
    axis.bar(places, parameters, color="tab:gray", label="parameters")
    axis.bar(places, [bar.activations for bar in bars], bottom=parameters, color="tab:blue", label="activations")
    axis.axhline(DEVICE / 1e9, color="black", linestyle="--", linewidth=1, label="16 GB, a V100")
    axis.set_xticks(places, [f"{bar.network}\n{bar.batch}" for bar in bars], rotation=45, ha="right", fontsize=8)
    axis.set_ylabel("GB")
    axis.legend()
    save(drawn, path)


def page() -> str:
    """The page with all tables."""
    names = ("network", "image", "weights: paper", "here", "activations: paper", "here", "saved by autograd")
    body = [[text if isinstance(text, str | int) else f"{text:.0f}" for text in row.values()] for row in resnets()]
    return f"""# Memory of activations and parameters

`python -m benchmarks.figures.memory`; nothing is measured by a clock or an allocator, so each run gives the same.

## Checkmate, Figure 1: activations far outweigh parameters

The paper shows bars without numbers. Here: what the layers of its evaluation's networks make,
416 × 608 for segmentation and 224 × 224 for the others, and what autograd saves of three language models of the large
size, which the paper cites in this figure alone. Gradients of parameters, as large as these, are left out.

![Parameters and activations](figures/memory.png)

{table_of(networks())}

## RR-9273, Tables 1 and 2: ResNets at batch 1

In MiB. The paper's weights are four times the parameters with 1,000 classes; its activations, Table 2 minus Table 1,
are twice the outputs of convolutions, batch norms, ReLUs (in place, so that a residual sum is one of them) and pooling.
Autograd saves about a third of that.

{table(names, body)}
"""


def main() -> None:
    """Write the page, the rows and the picture, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    out.write_text(page())
    ROWS.write_text(csv_text(resnets()))
    draw(networks(), PICTURE)
    print(page())


if __name__ == "__main__":
    main()
