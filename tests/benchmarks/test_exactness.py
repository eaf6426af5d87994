"""Torch's samples of modules and operators, and architectures: equal to stock `aot_eager`, or refused with a reason."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from benchmarks.exactness import __main__ as command
from benchmarks.exactness.compare import Sample, compared, quick_profiles

PARTS = 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs decide nothing here, so kernels are timed once; the log would be long."""
    from remat.profiling import timing

    for name in ("ROUNDS", "SAMPLES", "LARGEST_CACHE_BYTES"):
        monkeypatch.setattr(timing, name, getattr(timing, name))
    monkeypatch.setattr(logging.getLogger("remat"), "disabled", True)
    quick_profiles()
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("section", command.SECTIONS)
def test_samples_train_as_aot_eager_does(section: str, part: int) -> None:
    """Every module, every operator with a gradient, and more than sixty architectures; each twelfth in a test."""
    for sample in itertools.islice(command.samples(section, 1), part, None, PARTS):
        found = compared(sample)
        assert found.ending in ("bitwise", "as eager", "refused", "not by aot_eager", "nothing to train"), found
        assert found.over_bytes <= SMALL_BYTES, found
        if found.ending == "refused" and section == "architectures":
            assert ".py, line " in found.why, found


SMALL_BYTES = 512
"""By so much at most some convolutions of the CPU are above what was predicted."""


def test_the_page_is_made_of_the_results() -> None:
    """And says that nothing differs."""
    found = {section: command.read(command.RESULTS / f"exactness-{section}.jsonl") for section in command.SECTIONS}
    version = torch.__version__
    assert (command.ROOT / "docs" / "exactness.md").read_text() == command.page(found, version)
    for section, least in (("modules", 100), ("operators", 500), ("architectures", 80)):
        assert len({f.name for f in found[section]}) >= least
    assert not [f for findings in found.values() for f in findings if f.ending == "differs"]
    assert all(f.why for findings in found.values() for f in findings if f.ending in ("refused", "not by aot_eager"))


class Noisy(torch.nn.Module):
    """Adds numbers that no seed governs, so that no two runs are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + drifting(x)


@torch.library.custom_op("exactness_tests::drifting", mutates_args=())
def drifting(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(next(_SEEDS)))


@drifting.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_SEEDS = itertools.count()


def test_a_difference_is_found() -> None:
    """A module that is not what it was in its last run does not pass for equal."""
    found = compared(Sample("Noisy", lambda: (Noisy(), (torch.ones(2, 4),), {})))
    assert found.ending == "differs"
    assert "loss 0" in found.why


def test_a_refusal_is_told_with_its_line() -> None:
    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.masked_select(self.inner(x), x > 0)

    found = compared(Sample("Chosen", lambda: (Chosen(), (torch.ones(3, 4),), {})))
    assert found.ending == "refused"
    assert "masked_select" in found.why
    assert "test_exactness.py, line" in found.why
