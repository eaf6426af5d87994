"""The backend's name made known to torch in this process, as an installed package's is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "torch_dynamo_backends"


def installed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Lay the project's entry points where Python finds those of packages, and let torch look for them again."""
    from torch._dynamo.backends import registry

    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    info = folder / "remat_entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: remat-entry-points\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
    )
    patch.syspath_prepend(str(folder))
    torch._dynamo.list_backends()
    registry._discover_entrypoint_backends.__wrapped__()
