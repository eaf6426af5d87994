"""The figures of RR-9273, Section 6, on small sizes."""

from __future__ import annotations

from benchmarks.figures.joins import figure_8, figure_9, figure_10, threshold


def test_figure_8_falls_to_the_least_makespan() -> None:
    rows = list(figure_8((3,)))
    for model, least in (("CM", 5), ("SNN", 7), ("RNN", 3)):
        chosen = [row for row in rows if row[0] == model]
        assert chosen[0][2] == least
        assert chosen[-1][3:] == (1.0, 1.0)
        ratios = [row[4] for row in chosen]
        assert ratios == sorted(ratios, reverse=True)
        # one slot less than enough costs one forward step more
        assert ratios[-2] == (12 * 3 + 2) / (12 * 3 + 1)
    assert {size for _, size, _ in threshold(rows)} == {3}


def test_figures_9_and_10_compare_with_chains() -> None:
    nine = {(model, size, slots): y for model, size, slots, _, y in figure_9((7, 9), 4)}
    for (model, size, slots), ratio in nine.items():
        assert ratio >= nine["RNN", size, slots] >= 1  # one chain is a lower bound on every join of its size
        assert model in ("CM", "SNN", "RNN")
    assert all(row[4] >= 1 for row in figure_10((9, 12), 20))
