"""What of torch's data parallelism a plan does not go with: refused by name, before it hangs or trains wrong."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from .. import _compat
from ..errors import CaptureError


def refuse_sharded(module: nn.Module) -> None:
    """Refuse to capture a module whose parameters are not all whole when it is called.

    Raises:
        CaptureError: FSDP shards a part of it by itself, or the whole of it is called outside of FSDP's hooks.
    """
    unit = fsdp_module()
    wrapper = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, part in module.named_modules():
        if name and isinstance(part, (*unit, *wrapper)):
            raise CaptureError(
                f"FSDP shards {name} of this {_class_before(module)} as a unit of its own, so one plan of the whole is "
                "not supported: enable remat on each unit, or make a chain of the units"
            )
    if any(map(_compat.sharded_by_fsdp, module.modules())):
        name = next((name for name, p in module.named_parameters() if hasattr(p, "to_local")), "a parameter")
        raise CaptureError(
            f"{name} is sharded over ranks (DTensor) when this {type(module).__name__} is captured: use "
            "remat.enable on the unit that fully_shard gathers, which plans inside its call, and not remat.optimize"
        )
    refuse_flattened(module)


def refuse_flattened(module: nn.Module) -> None:
    """Refuse a module whose parameters the older FSDP has flattened.

    Raises:
        CaptureError: it has.
    """
    if any(map(_compat.flattened_by_fsdp, module.modules())):
        raise CaptureError(
            f"FullyShardedDataParallel has flattened the parameters of this {type(module).__name__}, which is not "
            "supported: use fully_shard (FSDP2) on each unit"
        )


def _class_before(module: nn.Module) -> str:
    """The name of a module's class before `fully_shard` gave it another one."""
    sharded = fsdp_module()
    return next(c.__name__ for c in type(module).__mro__ if not (sharded and issubclass(c, sharded)))


def refuse_split_by_ddp() -> None:
    """Refuse to plan a part of a step that DDP has cut under `torch.compile`.

    Raises:
        CaptureError: Dynamo compiles one bucket of several.
    """
    if _compat.split_by_ddp():
        raise CaptureError(
            "DistributedDataParallel under torch.compile cuts the step at its buckets and has each compiled alone, so "
            "no plan sees the whole: set torch._dynamo.config.optimize_ddp = False before the first step; compile each "
            "block with a backend and a budget of its own where communication has to overlap the backward pass"
        )


def refuse_searching_ddp() -> None:
    """Refuse to run stages by a plan where DDP looks for unused parameters in their graph.

    Raises:
        CaptureError: the surrounding DDP has find_unused_parameters=True, and would find every one of them unused.
    """
    ddp: Any = _compat.active_ddp()
    if ddp is not None and ddp.find_unused_parameters and not ddp.static_graph:
        raise CaptureError(
            "DistributedDataParallel(find_unused_parameters=True) is not supported around stages that run by a plan: "
            "their backward passes are nested, so DDP would take every parameter for an unused one; leave it out"
        )


def fsdp_module() -> tuple[type, ...]:
    """The class of what fully_shard has sharded, if there can be any."""
    return _class("torch.distributed.fsdp", "FSDPModule")


def _class(module: str, name: str) -> tuple[type, ...]:
    """A class, if its module has been imported: otherwise nothing is one of it."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()
