"""The one place to ask for a model: by name and size, the same weights and batch each time."""

from __future__ import annotations

import warnings

import torch

from benchmarks.models import blocks, language, vision
from benchmarks.models.subject import ARCHITECTURES, Subject

__all__ = ["ARCHITECTURES", "SEED", "build", "named"]

SEED = 11
assert blocks, (language, vision)  # importing them enters their architectures


def named(size: str) -> tuple[str, ...]:
    """The architectures that there are in a size, sorted."""
    return tuple(sorted(name for name, (_, sizes) in ARCHITECTURES.items() if size in sizes))


def build(name: str, size: str = "tiny") -> Subject:
    """A model in train mode and one batch.

    Args:
        size: "tiny", whose step takes milliseconds; "small", to compile; "full", whose step takes 100 to 500 ms on one
            core and needs 100 to 400 MiB above parameters and inputs; "large".

    Raises:
        KeyError: there is no such model, or not in that size.
    """
    import transformers

    make, sizes = ARCHITECTURES[name]
    if size not in sizes:
        raise KeyError(f"{name} is there as {', '.join(sizes)}, not as {size}")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = make(size)
    subject.model.train()
    return subject
