"""The graphs of RematBench: five families, deterministic, each with six budgets.

A graph is made by one function, here or in a module named here, and is the same on every machine: costs are whole
nanoseconds by a roofline that the module's docstring states, sizes are bytes. `manifest.json` has what is fixed: the
digest, sizes and budgets of each. Graphs of up to 1,500 ops are in `graphs/`. Larger ones are made when they are
first asked for, kept in `~/.cache/rematbench` (`REMATBENCH_CACHE`), and refused if their digest is another.

    python -m benchmarks.rematbench.instances             what there is
    python -m benchmarks.rematbench.instances --make      make all that are not stored, and compare digests
    python -m benchmarks.rematbench.instances --enter     enter what is new in the manifest (NAMES: these again)

Budgets: with P the plain peak and L the least peak of a plan that was known when the graph was entered (what
`least-budget` found in 5 s, in 40 s beyond 1,500 ops), six equal steps from 1.01 L up to 0.9 P. They stay as they are
entered. Where 1.01 L is above 0.87 P, too little can be saved, and the graph is left out.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.graphs.architectures import ARCHITECTURES, training_graph
from benchmarks.graphs.instances import instance as generated
from benchmarks.solver.chains import random_chain
from remat.planning.links import LINKS
from remat_ir import Chain, Graph, InvalidData, Join, Problem, from_node_link, plain_peak
from remat_ir.digest import graph_digest
from remat_solver import least_budget

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest.json"
STORED_OPS = 1500
LEAST_S = 5.0
FAMILIES = ("captured", "checkmate", "random", "chains", "link")
"""Captured training steps; the networks of Checkmate's paper; random graphs, and networks by rules; Rotor's chains and
joins; graphs and chains with a link to the host."""

Subject = Graph | Chain


class Recipe(NamedTuple):
    """How a graph is made: its family, the function, and a sentence that says what it is."""

    family: str
    make: Callable[[], Subject]
    what: str


@dataclass(frozen=True)
class Instance:
    """A graph of the benchmark.

    Attributes:
        subject: what is planned: a graph, or a chain for the programs that take chains.
        graph: the same as a graph; plans and certificates are about it.
        budgets: in bytes, ascending.
    """

    name: str
    family: str
    subject: Subject
    graph: Graph
    digest: str
    budgets: tuple[int, ...]

    def problem(self, number: int) -> Problem:
        """The graph with one of its budgets, 0 for the smallest."""
        return Problem(self.graph, self.budgets[number])


def lifted(subject: Subject) -> Graph:
    """A chain as a graph, with its link if it has one; a graph as it is."""
    if isinstance(subject, Graph):
        return subject
    return subject.to_graph() if subject.link is None else subject.to_graph().with_link(subject.link)


def _checkmate(network: str, batch: int) -> Graph:
    return training_graph(ARCHITECTURES[network](), batch, "v100")


def _network_chain(name: str, batch: int, image: int, link: str | None = None) -> Chain:
    from benchmarks.rematbench.chains import network_chain

    chain = network_chain(name, batch, image)
    return chain if link is None else replace(chain, link_bytes_per_s=LINKS[link].to_host_bytes_per_s)


def _captured(name: str, grouped: bool, link: str | None = None) -> Graph:
    from benchmarks.rematbench.models import captured

    graph = captured(name, grouped)
    return graph if link is None else graph.with_link(LINKS[link])


def _join(*lengths: int) -> Graph:
    return Join(lengths, 1_000_000, 2_000_000, 500_000, slots=0, slot_bytes=64 << 20).to_graph()


def _linked(name: str, link: str) -> Graph:
    return generated(name).with_link(LINKS[link])


GENERATED = (
    *(f"dag-{ops}-s{seed}" for ops, seeds in ((100, 3), (250, 3), (500, 2), (1000, 2)) for seed in range(1, seeds + 1)),
    *(f"dense-{ops}-s{seed}" for ops in (100, 250, 500, 1000) for seed in (1, 2)),
    *(f"random-{ops}-s{seed}" for ops in (25, 60, 125, 250) for seed in (1, 2)),
    *("dag-2500-s1", "dense-2500-s1", "random-625-s1", "dag-10000-s1", "random-2500-s1"),
    *("vgg-16-whole", "unet-4", "unet-4-whole", "resnet-16", "resnet-16-whole", "densenet-24", "densenet-58-whole"),
    *("gpt-12", "gpt-12-whole", "gpt-36", "gpt-96-whole", "resnet-50-whole", "gpt-430-whole"),
)
ROTOR = (
    *(("resnet18", 8, 500), ("resnet34", 8, 500), ("resnet50", 8, 224), ("resnet50", 4, 500), ("resnet101", 4, 500)),
    *(("resnet152", 4, 224), ("resnet200", 4, 224), ("densenet121", 4, 224), ("densenet161", 4, 224)),
    *(("densenet169", 4, 500), ("densenet201", 4, 224), ("inception", 8, 299)),
)
JOINS = ((4, 4), (10, 10), (20, 5), (8, 8, 8), (30, 20, 10))
LINKED = (
    *("vgg-16", "resnet-8", "gpt-12", "unet-3", "densenet-12", "random-40-s1"),
    *("vgg-16-whole", "gpt-12-whole", "unet-4-whole", "resnet-16", "random-25-s1", "dag-100-s1", "gpt-36"),
)
POFO = (("resnet50", 8, 500), ("resnet101", 8, 224), ("densenet121", 8, 224), ("inception", 16, 299))


def recipes() -> dict[str, Recipe]:
    """Every graph of the benchmark by its name, in order."""
    from benchmarks.rematbench.models import MODELS

    found: dict[str, Recipe] = {}
    for name, model in MODELS.items():
        for grouped in (False, True):
            kind = "grouped" if grouped else "kernels"
            what = f"one training step of {model.title}, priced for a {model.device}, {kind}"
            found[f"{name}-{kind}"] = Recipe("captured", partial(_captured, name, grouped), what)
    for network in ("vgg16", "vgg19", "mobilenet", "resnet50", "unet", "segnet", "fcn8"):
        for batch in {"vgg16": (64, 256), "vgg19": (64, 256), "fcn8": (8, 32)}.get(network, (1, 32)):
            what = f"{network} of Checkmate's figures, layer by layer, batch {batch}, V100"
            found[f"checkmate-{network}-b{batch}"] = Recipe("checkmate", partial(_checkmate, network, batch), what)
    for name in GENERATED:
        what = "generated by the rules of benchmarks.graphs.instances"
        found[name] = Recipe("random", partial(generated, name), what)
    for network, batch, image in ROTOR:
        make = partial(_network_chain, network, batch, image)
        what = f"stages of {network}, batch {batch}, images of {image}², V100"
        found[f"chain-{network}-{batch}x{image}"] = Recipe("chains", make, what)
    for stages in (16, 50, 100, 339):
        make = partial(random_chain, stages, stages)
        found[f"chain-random-{stages}"] = Recipe("chains", make, f"{stages} stages, log-normal times and sizes")
    for lengths in JOINS:
        what = f"a join of {len(lengths)} branches of equal steps (RR-9273, Problem 2), as a graph"
        found["join-" + "-".join(map(str, lengths))] = Recipe("chains", partial(_join, *lengths), what)
    for network, batch, image in POFO:
        for link in ("pcie3", "pcie4"):
            make = partial(_network_chain, network, batch, image, link)
            what = f"stages of {network}, batch {batch}, images of {image}², V100, over {link}"
            found[f"pofo-{network}-{batch}x{image}-{link}"] = Recipe("link", make, what)
    for name in LINKED:
        found[f"{name}-pcie4"] = Recipe("link", partial(_linked, name, "pcie4"), f"{name}, generated, over pcie4")
    return found


def manifest() -> dict[str, dict[str, Any]]:
    """What is fixed of each instance, by name."""
    return dict(json.loads(MANIFEST.read_text())) if MANIFEST.exists() else {}


def stored(name: str, folder: Path = HERE) -> Path:
    """Where a graph is kept."""
    return folder / "graphs" / f"{name}.json.xz"


def cache() -> Path:
    """Where large graphs are kept once they are made."""
    return Path(os.environ.get("REMATBENCH_CACHE", "~/.cache/rematbench")).expanduser()


def load(name: str) -> Instance:
    """An instance, read or made, its digest compared.

    Raises:
        KeyError: there is none of that name.
        ValueError: it came out as another graph than the one in the manifest.
    """
    entry = manifest()[name]
    for path in (stored(name), stored(name, cache())):
        if path.exists():
            subject = _read(path)
            break
    else:
        subject = recipes()[name].make()
        _keep(name, cache(), subject)
    graph = lifted(subject)
    if graph_digest(graph) != entry["digest"]:
        raise ValueError(
            f"{name} has another digest than the manifest says: remove it from {cache()}, or it came out new"
        )
    return Instance(name, entry["family"], subject, graph, entry["digest"], tuple(entry["budgets"]))


def outside(folder: Path) -> dict[str, Instance]:
    """The graphs that others made, of the node-link files of a folder, as those of Moccasin's repository.

    Their budgets are shares of the plain peak, from 0.4 to 0.9: the published tables have 0.8 and 0.9.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidData: a file is no graph; the message names it.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            graph = from_node_link(path.read_text())
        except InvalidData as error:
            raise InvalidData(f"{path.name}: {error}", error.pointer) from None
        peak = plain_peak(graph)
        budgets = tuple(peak * tenths // 10 for tenths in range(4, 10))
        family = "checkmate" if "(MLSys)" in path.stem else "random"
        found[path.stem] = Instance(path.stem, family, graph, graph, graph_digest(graph), budgets)
    if not found:
        raise FileNotFoundError(f"{folder} has no *.json")
    return found


def _read(path: Path) -> Subject:
    with lzma.open(path, "rt") as file:
        data = json.load(file)
    return Graph.from_json(data) if data["format"].startswith("remat-graph") else Chain.from_json(data)


def write(path: Path, data: Any, preset: int | None = None) -> None:
    """Write data as compressed JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    with lzma.open(aside, "wt", preset=preset) as file:
        json.dump(data, file, separators=(",", ":"))
    aside.replace(path)


def _keep(name: str, folder: Path, subject: Subject) -> None:
    if isinstance(subject, Graph):
        subject = replace(subject, op_names=None, value_names=None)
    write(stored(name, folder), subject.to_json(), 9)


def budgets_of(graph: Graph) -> tuple[int, int, tuple[int, ...]]:
    """The plain peak, the least known one, and the six budgets, all in bytes."""
    plain = plain_peak(graph)
    alone = graph.with_link(None) if graph.link is not None else graph
    seconds = LEAST_S if graph.ops <= STORED_OPS else 8 * LEAST_S
    least = least_budget(alone, time_limit_s=seconds, prover=None).least_budget_bytes or plain
    low, high = least + least // 100, plain * 9 // 10
    return plain, least, tuple(low + (high - low) * k // 5 for k in range(6))


def entry_of(name: str) -> dict[str, Any]:
    """What the manifest says of an instance; its graph is written where it is kept.

    Raises:
        ValueError: nearly nothing can be saved there, so that six budgets make no sense.
    """
    recipe = recipes()[name]
    subject = recipe.make()
    graph = lifted(subject)
    plain, least, budgets = budgets_of(graph)
    if budgets[0] > 0.87 * plain:
        raise ValueError(f"{name}: the least known peak is {least} of {plain} bytes")
    _keep(name, HERE if graph.ops <= STORED_OPS else cache(), subject)
    return {
        "family": recipe.family, "what": recipe.what, "ops": graph.ops, "values": graph.values,
        "digest": graph_digest(graph), "total_cost_ns": graph.total_cost_ns, "plain_peak_bytes": plain,
        "least_known_bytes": least, "budgets": list(budgets),
    }  # fmt: skip


def enter(names: list[str]) -> Iterator[str]:
    """Enter instances in the manifest, or all that are new there; a line for each."""
    known, order = manifest(), list(recipes())
    for name in names or [name for name in order if name not in known]:
        start = time.monotonic()
        try:
            entry = entry_of(name)
        except Exception as error:  # what can't be captured is left out, and said
            said = str(error).partition("\n")[0]
            yield f"{name}: left out: {type(error).__name__}: {said[:200]}"
            continue
        known = manifest() | {name: entry}  # another process may have entered others meanwhile
        kept = {key: known[key] for key in order if key in known}
        MANIFEST.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items()) + "\n}\n")
        yield f"{name}: {known[name]['ops']} ops, {time.monotonic() - start:.1f} s"


def main(arguments: list[str] | None = None) -> int:
    """List, make or enter instances."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rematbench.instances")
    parser.add_argument("--make", action="store_true", help="make all that are not stored, and compare digests")
    parser.add_argument("--enter", action="store_true", help="enter what is new in the manifest")
    parser.add_argument("names", nargs="*", help="these alone")
    given = parser.parse_args(arguments)
    if given.enter:
        for line in enter(given.names):
            print(line, flush=True)
        return 0
    wrong = 0
    for name, entry in manifest().items():
        if given.names and name not in given.names:
            continue
        print(f"{name}: {entry['family']}, {entry['ops']} ops; {entry['what']}", flush=True)
        if given.make:
            try:
                load(name)
            except ValueError as error:
                print(f"  {error}")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
