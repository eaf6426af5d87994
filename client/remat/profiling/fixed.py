"""Bytes that are there throughout a step: parameters, buffers, inputs, constants, and gradients from before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .. import _compat
from ..capture.dataflow import tensors
from ..device import storage_bytes


def resident(module: nn.Module, inputs: object, constants: Mapping[Any, torch.Tensor]) -> dict[str, int]:
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
    """Bytes of gradients that are there before the step, those included that fully_shard has not reduced yet."""
    own = (p.grad for p in module.parameters() if p.is_leaf)
    apart = [tensor for part in module.modules() for tensor in _compat.unreduced_by_fsdp(part)[1]]
    return distinct_bytes(g for g in (*own, *apart) if isinstance(g, torch.Tensor))


def all_gradients(module: nn.Module) -> int:
    """Bytes of a gradient for each parameter that is trained; unsharded ones where fully_shard does not reduce them."""
    whole = any(_compat.unreduced_by_fsdp(part)[0] for part in module.modules())
    trained = (p if whole else here(p) for p in module.parameters() if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def leaves_gradients(module: nn.Module) -> bool:
    """Whether this call is told to leave its gradients as they are: DDP's `no_sync`, `set_requires_gradient_sync`."""
    ddp: Any = _compat.active_ddp()
    alone = ddp is not None and not ddp.require_backward_grad_sync
    return alone or any(_compat.unreduced_by_fsdp(part)[0] for part in module.modules())


def bucket_bytes(module: nn.Module) -> tuple[int, bool]:
    """Bytes of the buckets of the DistributedDataParallel around this call, and whether gradients are views of them."""
    ddp: Any = _compat.active_ddp()
    return (0, False) if ddp is None else (all_gradients(module), bool(ddp.gradient_as_bucket_view))


def bytes_beside(tensors_of: Any, module: nn.Module) -> int:
    """Bytes of a module's tensors, or of given ones, on the device of `module` and not shared with it."""
    given = tensors_of.state_dict().values() if isinstance(tensors_of, nn.Module) else tensors_of
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    seen = {_compat.storage_key(here(t)) for t in (*module.parameters(), *module.buffers())}
    there = (t for t in map(here, tensors(tuple(given))) if t.device.type == device.type)
    return distinct_bytes(t for t in there if _compat.storage_key(t) not in seen)


def here(tensor: Any) -> Any:
    """What of a tensor lies on this rank: the shard of one that is sharded (DTensor)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distinct_bytes(found: Iterable[torch.Tensor]) -> int:
    """Bytes of what of some tensors lies on this rank, each storage once."""
    return sum({_compat.storage_key(tensor): storage_bytes(tensor) for tensor in map(here, found)}.values())
