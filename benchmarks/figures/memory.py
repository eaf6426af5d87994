"""The memory tables: Checkmate's Figure 1, and Tables 1 and 2 of RR-9273: `python -m benchmarks.figures.memory`.

Nothing is computed: the layers of the Checkmate networks are counted, and the ResNets of torch run on the meta device,
where outputs are counted, and the storages that autograd saves for the backward pass, each once.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures.panels import NAMES
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.table import table
from benchmarks.models.stages import RESNETS, resnet

PAGE = Path(__file__).parents[1] / "results" / "memory.md"
ROWS = Path(__file__).parents[1] / "results" / "figures" / "memory.csv"

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
            stages = resnet(*RESNETS[name], 64, 1, large=True)
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


def text_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def networks() -> str:
    """Parameters and activations of the Checkmate networks at batch 32, in GB, as in its Figure 1."""
    rows = []
    for name in NAMES:
        network = ARCHITECTURES[name]()
        graph = training_graph(network, 32)
        assert graph.backward_from is not None
        forward = {v for v, op in enumerate(graph.value_op) if op < graph.backward_from}
        activations = sum(graph.value_bytes[v] for v in forward) / 1e9
        parameters = FLOAT * network.parameters / 1e9
        rows.append([NAMES[name], f"{parameters:.2f}", f"{activations:.2f}", f"{activations / parameters:.0f}"])
    return table(("network", "parameters, GB", "activations at batch 32, GB", "ratio"), rows)


def page() -> str:
    """The page with all tables."""
    names = ("network", "image", "weights: paper", "here", "activations: paper", "here", "saved by autograd")
    body = [[text if isinstance(text, str | int) else f"{text:.0f}" for text in row.values()] for row in resnets()]
    return f"""# Memory of activations and parameters

`python -m benchmarks.figures.memory`; nothing is measured by a clock or an allocator, so each run gives the same.

## Checkmate, Figure 1: activations far outweigh parameters

The paper shows bars without numbers, of other networks too. Here: what the layers of its evaluation's networks make,
416 × 608 for segmentation and 224 × 224 for the others.

{networks()}

## RR-9273, Tables 1 and 2: ResNets at batch 1

In MiB. The paper's weights are four times the parameters with 1,000 classes; its activations, Table 2 minus Table 1,
are twice the outputs of convolutions, batch norms, ReLUs (in place, so that a residual sum is one of them) and pooling.
Autograd saves about a third of that.

{table(names, body)}
"""


def main() -> None:
    """Write the page and the rows, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    out.write_text(page())
    ROWS.write_text(text_of(resnets()))
    print(page())


if __name__ == "__main__":
    main()
