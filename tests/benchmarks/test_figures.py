"""The figures: the page says what the measured files say, and the committed page is that of the committed files."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.figures.draw import draw, page, rows_of
from benchmarks.figures.measure import FOLDER, MEASURES, Piece, Settings, pieces_of, run_piece, run_pieces
from benchmarks.graphs.architectures import ARCHITECTURES, training_graph

from remat_ir import plain_peak


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.txt").write_text("at most 1 s a solve, on a test")


def row(method: str, cost: object, bound: object, budget: int = 10**9, **more: object) -> dict[str, object]:
    return {
        "network": "unet",
        "batch": 32,
        "ops": 71,
        "method": method,
        "budget_bytes": budget,
        "status": "feasible" if cost else "nothing_found",
        "cost": cost,
        "bound": bound,
        "once": 1000,
        "peak_bytes": 1,
        "restricted_to": "",
        "seconds": 0.5,
        **more,
    }


def test_the_page_adds_up(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    write(folder, "tradeoff", [row("auto", 1100, 1050), row("ap-sqrt", 1300, ""), row("griewank", "", "")])
    write(
        folder,
        "ratios",
        [
            row("auto", 1000, 1000),
            row("auto", 1000, 1000, 2 * 10**9),
            row("ap-sqrt", 1100, ""),
            row("ap-sqrt", 1210, "", 2 * 10**9),
        ],
    )
    batch = {"network": "unet", "memory": "16 GB", "overhead": 0.1, "seconds": 1}
    write(folder, "batches", [{**batch, "method": "auto", "batch": 60, "bound": 61, "ended": "time"}])
    write(folder, "times", [row("milp", "", 1000), row("auto", 1010, 1010, status="optimal")])
    draw(folder)
    text = (tmp_path / "figures.md").read_text()
    assert text == page(folder)
    assert "| 1.00 | 10.00 (≥ 5.00) | 30.00 | – |" in text
    assert "1.154, 2 of 2 (1.27)" in text  # the root of 1.1 · 1.21
    assert "| U-Net | 57 (printed version: 61) | – | – | – | – | – | – | – | **60*** (≤ 61) |" in text
    assert "0.5 s, no plan" in text
    assert "0.5 s, optimal" in text
    for name in ("tradeoff", "batches", "times"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is not run again, and takes the place of older rows of the same methods in the file."""
    ran = []

    def pieces(plan: Settings) -> Iterator[Piece]:
        for method in ("checkpoint-all", "ap-sqrt"):

            def rows(method: str = method) -> list[dict[str, object]]:
                ran.append(method)
                return [row(method, len(ran), "")]

            yield Piece("unet", method, "", 1.0, 1, rows)

    monkeypatch.setitem(MEASURES, "times", pieces)
    folder = tmp_path / "figures"
    write(folder, "times", [row("ap-sqrt", 7, ""), row("auto", 8, "")])
    run_piece("times", "unet-ap-sqrt", folder, Settings())
    assert {(r["method"], r["cost"]) for r in rows_of(folder, "times")} == {("ap-sqrt", "1"), ("auto", "8")}
    assert "1 of 2 rows are older" in (folder / "times.txt").read_text()
    assert run_pieces(["times"], folder, Settings(), [], math.inf)
    assert ran == ["ap-sqrt", "checkpoint-all"]
    assert [r["method"] for r in rows_of(folder, "times")] == ["checkpoint-all", "ap-sqrt", "auto"]
    assert not run_pieces(["times"], tmp_path / "anew", Settings(), [], time.monotonic())
    assert ran == ["ap-sqrt", "checkpoint-all"]
    assert run_pieces(["times"], folder, Settings(), [], math.inf, since="9999")
    assert sorted(ran[2:]) == ["ap-sqrt", "checkpoint-all"]
    assert len(rows_of(folder, "times")) == 3


def test_a_piece_says_what_it_was_measured_on(tmp_path: Path) -> None:
    """Both ways to count memory, what ended on its limit, and each row's load and commit."""
    graph = training_graph(ARCHITECTURES["vgg16"](), 4)
    methods = ("chen-sqrt", "lp-rounding")
    found = list(pieces_of(Settings(program_s=1e-3), "vgg16", 4, graph, [plain_peak(graph) - 1], methods))
    assert [piece.name for piece in found] == ["vgg16-chen-sqrt", "vgg16-lp-rounding"]
    rows = [made for piece in found for made in piece.rows()]
    assert [(r["method"], r["freeing"], r["ended"]) for r in rows] == [
        ("chen-sqrt", "", ""),
        ("chen-sqrt", "paper", ""),
        ("lp-rounding", "", "time"),
    ]
    run_piece("batches", "vgg19-checkpoint-all-0", tmp_path, Settings())
    assert {"load", "commit", "date", "limit_s"} <= set(rows_of(tmp_path, "batches")[0])
    assert "load average" in (tmp_path / "batches.txt").read_text()
    with pytest.raises(SystemExit, match="no piece nothing"):
        run_piece("batches", "nothing", tmp_path, Settings())


def test_the_committed_page_is_that_of_the_committed_files() -> None:
    assert (FOLDER.parent / "figures.md").read_text() == page(FOLDER)


@pytest.mark.slow
def test_the_committed_memory_tables_are_what_the_command_writes() -> None:
    from benchmarks.figures import memory
    from benchmarks.harness.table import csv_text

    assert memory.PAGE.read_text() == memory.page()
    assert memory.ROWS.read_text() == csv_text(memory.resnets())


def test_what_autograd_saves_is_counted_once_a_storage() -> None:
    """A linear layer saves its input, a ReLU what it gives, which the next layer saves again; weights don't count."""
    import torch
    from benchmarks.figures.memory import saved_bytes
    from torch import nn

    stages = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)]
    assert saved_bytes(stages, torch.randn(2, 8)) == 4 * 2 * (8 + 16)


@pytest.mark.parametrize(
    ("name", "classes", "side"), [("vgg16", 1000, 224), ("mobilenet", 1000, 224), ("unet", 19, 96)]
)
def test_the_modules_are_the_networks_of_the_graphs(
    name: str, classes: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their full width they have as many parameters and running statistics, and as many convolutions."""
    import torch
    from benchmarks.graphs.architectures import ARCHITECTURES
    from benchmarks.models import paper
    from torch import nn

    for what, number in (("THINNER", 1), ("CLASSES", classes), ("SIDE", side)):
        monkeypatch.setattr(paper, what, number)
    with torch.device("meta"):
        model, _ = paper.NETWORKS[name](1)
    network = ARCHITECTURES[name]()
    held = [*model.parameters(), *(b for b in model.buffers() if b.dim())]
    assert sum(tensor.numel() for tensor in held) == network.parameters
    layers = [layer.name.split("_")[0] for layer in network.layers]
    made = sum(isinstance(part, nn.Conv2d) for part in model.modules())
    heads = sum(isinstance(part, nn.Linear) for part in model.modules())
    assert made + heads == sum(layers.count(kind) for kind in ("conv", "depthwise", "dense"))


@pytest.mark.slow
def test_plans_of_a_captured_network_train_exactly_within_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.figures import captured

    monkeypatch.setattr(captured, "BATCHES", {captured.TRAINED: (2, 2)})
    monkeypatch.setattr(captured, "ROUNDS", 2)
    rows = list(captured.trained(Settings(2, 3, frozenset({"auto", "linearized-greedy"}))))
    assert {found["share"] for found in rows} == {0, 0.5, 1}
    for found in rows:
        assert found["unequal"] == 0
        assert found["measured_bytes"] <= found["predicted_bytes"] <= found["budget_bytes"]
