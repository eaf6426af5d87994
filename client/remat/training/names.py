"""What a solve is called in the lists of a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..capture.dataflow import tensors
from ..planning.options import LONGEST_NAME, SolveOptions
from ..settings import settings


def name_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The class of a module and the shape of the first tensor of its call.

    Example:
        >>> import torch
        >>> name_of(nn.Linear(8, 2), (torch.ones(4, 8),), {})
        'Linear 4×8'
    """
    first = next(tensors((tuple(args), kwargs)), None)
    shape = () if first is None else first.shape
    return " ".join(filter(None, (type(module).__name__, "×".join(map(str, shape)))))[:LONGEST_NAME]


def with_name(options: SolveOptions, name: str) -> SolveOptions:
    """Options with a name that was not given, where the settings say that such names may be sent."""
    return options if options.name is not None or not settings().send_names else replace(options, name=name)
