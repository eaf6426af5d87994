"""The memory tables: Checkmate's Figure 1, and Tables 1 and 2 of RR-9273: `python -m benchmarks.figures.memory`.

Nothing is run: the layers of the Checkmate networks are counted, and the ResNets of torch run on the meta device, where
the storages that autograd saves for the backward pass are added up, each once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.figures.panels import NAMES
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.table import table
from benchmarks.models.stages import RESNETS, resnet

PAGE = Path(__file__).parents[1] / "results" / "memory.md"

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

COPIES = 4
"""Table 1 is 3.9 to 4.0 times the parameters: they, their gradients and, it seems, two copies more."""


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


def resnets() -> str:
    """Tables 1 and 2 side by side with what torch's autograd saves, in MiB."""
    rows = []
    for at, (name, paper) in enumerate(WEIGHTS.items()):
        with torch.device("meta"):
            stages = resnet(*RESNETS[name], 64, 1, large=True)  # for ten classes: 1000 take 2 to 8 MiB more
        weights = sum(p.numel() for stage in stages for p in stage.parameters()) * FLOAT / 2**20
        for side, totals in WITH_ACTIVATIONS.items():
            made = saved_bytes(stages, torch.empty(1, 3, side, side, device="meta")) / 2**20
            first = side == next(iter(WITH_ACTIVATIONS))
            ours = f"{COPIES * weights:.0f}" if first else ""
            rows.append(
                [name, str(side), f"{paper}" if first else "", ours, f"{totals[at] - paper:.0f}", f"{made:.0f}"]
            )
    names = ("network", "image", "weights: paper", f"{COPIES} × weights here", "activations: paper", "here")
    return table(names, rows)


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
    return f"""# Memory of activations and parameters

`python -m benchmarks.figures.memory`; nothing is measured by a clock or an allocator, so each run gives the same.

## Checkmate, Figure 1: activations far outweigh parameters

The paper shows bars without numbers, of other networks too. Here: what the layers of its evaluation's networks make,
416 × 608 for segmentation and 224 × 224 for the others.

{networks()}

## RR-9273, Tables 1 and 2: ResNets at batch 1

In MiB; activations of the paper are Table 2 minus Table 1. Here they are what autograd saves. The
paper's are 2.6 to 3.2 times that; what it counts, it does not say.

{resnets()}
"""


def main() -> None:
    """Write the page, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    out.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
