"""The figures: the page says what the measured files say, and the committed page is that of the committed files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.figures.draw import draw, page, rows_of
from benchmarks.figures.measure import FOLDER, MEASURES, Settings, budgets_of, measure


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
