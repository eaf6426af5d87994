"""The figures: the page says what the measured files say, and the committed page is that of the committed files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.figures.draw import draw, page
from benchmarks.figures.measure import FOLDER, MEASURES, measure
from benchmarks.figures.panels import rows_of
from benchmarks.figures.solves import Settings, budgets_of


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
    write(folder, "batches", [{**batch, "method": "auto", "batch": 60, "bound": 61}])
    write(folder, "times", [row("milp", "", 1000), row("auto", 1010, 1010, status="optimal")])
    draw(folder)
    text = (tmp_path / "figures.md").read_text()
    assert text == page(folder)
    assert "| 1.00 | 10.00 (≥ 5.00) | 30.00 | – |" in text
    assert "1.154, 2 of 2 (1.27)" in text  # the root of 1.1 · 1.21
    assert "| U-Net | 57 (printed version: 61) | – | – | – | – | – | – | **60** (≤ 61) |" in text
    assert "0.5 s, no plan" in text
    assert "0.5 s, optimal" in text
    for name in ("tradeoff", "batches", "times"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_measurements_are_merged_by_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run for some methods replaces their rows and leaves the others."""

    def rows(plan: Settings) -> list[dict[str, object]]:
        return [row(method, plan.points, plan.seconds) for method in ("auto", "milp") if plan.wants("unet", method)]

    monkeypatch.setitem(MEASURES, "times", rows)
    measure("times", tmp_path, Settings(2.5, 7))
    measure("times", tmp_path, Settings(3.5, 8, frozenset({"auto"})))
    measure("times", tmp_path, Settings(9, 9, None, frozenset({"vgg16"})))
    assert (tmp_path / "times.txt").read_text().startswith("at most 9 s a solve")
    found = [(r["method"], r["cost"], r["bound"]) for r in rows_of(tmp_path, "times")]
    assert found == [("milp", "7", "2.5"), ("auto", "8", "3.5")]


def test_the_committed_page_is_that_of_the_committed_files() -> None:
    assert (FOLDER.parent / "figures.md").read_text() == page(FOLDER)


def test_budgets_span_from_the_least_need_to_the_plain_peak() -> None:
    from benchmarks.graphs.architectures import ARCHITECTURES, training_graph

    from remat_ir import plain_peak
    from remat_ir.working_set import working_set

    graph = training_graph(ARCHITECTURES["vgg16"](), 4)
    budgets = budgets_of(graph, 5)
    assert (budgets[0], budgets[-1]) == (working_set(graph).least_bytes, plain_peak(graph))
    assert len(budgets) == 5


@pytest.mark.slow
def test_the_committed_memory_tables_are_what_the_command_writes() -> None:
    from benchmarks.figures import memory

    assert memory.PAGE.read_text() == memory.page()


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


def test_the_tables_of_captured_steps_add_up() -> None:
    from benchmarks.figures.captured_page import say_profiles, say_trained

    def strings(**more: object) -> dict[str, str]:
        return {key: str(value) for key, value in row(**more).items()}

    rows = [
        strings(method="auto", cost=1100, bound=1100, costs="measured", share=0.5),
        strings(method="auto", cost=1200, bound=1100, costs="roofline", share=0.5),
        strings(method="ap-sqrt", cost="", bound="", costs="measured", share=0.5),
    ]
    assert "| 50 % | 10.00 / 20.00 (≥ 10.00) | – / – |" in say_profiles(rows)
    ran = {"share": 0.5, "predicted_bytes": 1000, "measured_bytes": 990, "unequal": 0}
    found = [
        strings(method="auto", cost=1100, bound=1100, measured=0.15, **ran),
        strings(method="ap-sqrt", cost=1300, bound="", measured=0.3, **{**ran, "unequal": 2, "measured_bytes": 1001}),
    ]
    text = say_trained(found)
    assert "| 50 % | 10.0 → 15.0 | 30.0 → 30.0 |" in text
    assert (
        "exactness.md)): 1 of 2. The peak by the allocator's own events is at\nmost the predicted one: 1 of 2" in text
    )
    assert "mean error of 2.2 % (4.3 % at most)" in text


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
