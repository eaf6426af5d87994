"""Bytes that are there throughout a step: parameters, buffers, inputs, constants, and gradients from before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import _compat
from ..capture.dataflow import tensors
from ..device import storage_bytes


def resident(module: nn.Module, inputs: Any, constants: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of parameters, buffers, inputs and constants on the device of the parameters, each storage once."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, group in (
        ("parameters", module.parameters()),
        ("buffers", module.buffers()),
        ("inputs", tensors(inputs)),
        ("constants", constants.values()),
    ):
        found[name] = 0
        for tensor in map(here, group):
            if tensor.device.type == device.type and _compat.storage_key(tensor) not in seen:
                seen.add(_compat.storage_key(tensor))
                found[name] += storage_bytes(tensor)
    return found


def existing_gradients(module: nn.Module) -> int:
    """Bytes of gradients that are there before the step."""
    found: dict[int, int] = {}
    for parameter in module.parameters():
        if parameter.is_leaf and isinstance(parameter.grad, torch.Tensor):
            gradient = here(parameter.grad)
            found[_compat.storage_key(gradient)] = storage_bytes(gradient)
    return sum(found.values())


def here(tensor: Any) -> Any:
    """What of a tensor lies on this rank: the shard of one that is sharded (DTensor)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
