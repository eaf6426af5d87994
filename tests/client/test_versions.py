"""Which torch is taken: every one from the oldest that was tried, and what is missing is said by its name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from remat._compat.versions import NEWEST, OLDEST

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def imported(before: str) -> subprocess.CompletedProcess[str]:
    """The client's private names of torch imported in a process in which torch was changed first."""
    code = f"import torch\n{before}\nimport remat._compat"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.13.0a0+29b7f5e.nv26.05", "2.15.1+cu132", "2.16.0.dev20261101", "3.0.0"]
)
def test_the_package_asks_for_no_upper_bound(version: str) -> None:
    """Pre-releases and vendors' builds are taken, and no installed torch is replaced by an older one."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    (torch,) = [r for r in map(Requirement, extras["torch"]) if r.name == "torch"]
    assert torch.specifier.contains(version)
    assert not torch.specifier.contains("2.10.0")


def test_a_newer_torch_is_named_once_in_the_log() -> None:
    """It is used, and no warning comes where the release was tried."""
    newer = f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev20261101"
    done = imported(f"torch.__version__ = {newer!r}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(newer) == 1
    tried = imported(f"torch.__version__ = '{NEWEST[0]}.{NEWEST[1]}.0a0+vendor'")
    assert tried.returncode == 0, tried.stderr
    assert "was tried with" not in tried.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "named"),
    [
        ("torch.__version__ = '2.10.1'", "torch 2.11 or later, and 2.10.1 is installed"),
        ("import sys; sys.modules['torch._dynamo.exc'] = None", "torch._dynamo.exc"),
        (
            "import torch._functorch.aot_autograd as a\n"
            "def other(model, *args): ...\n"
            "other.__name__ = 'aot_compile_joint_with_descriptors'\n"
            "a.aot_compile_joint_with_descriptors = other",
            "aot_compile_joint_with_descriptors(partition_fn=…)",
        ),
    ],
    ids=["too old", "a module", "a parameter"],
)
def test_what_torch_lacks_is_named_with_the_releases_that_have_it(before: str, named: str) -> None:
    done = imported(before)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: ")
    assert named in last
    assert f"{OLDEST[0]}.{OLDEST[1]}" in last
