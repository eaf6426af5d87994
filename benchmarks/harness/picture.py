"""Pictures: a figure of panels, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(count: int, rows: int = 1, size: tuple[float, float] = (5, 4), **more: Any) -> tuple[Any, Any]:
    """A figure of so many panels, each of a size in inches, and the array of their axes; those beyond are blank."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns, (width, height) = -(-count // rows), size
    whole = width * columns, height * rows
    drawn, axes = pyplot.subplots(rows, columns, figsize=whole, layout="constrained", squeeze=False, **more)
    for axis in axes.flat[count:]:
        axis.axis("off")
    return drawn, axes


def save(figure: Any, path: Path) -> None:
    """Write a figure without what would change from one version of the library to the next, and let it go."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
