"""The client's cases and models of the zoo, moved to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from client.small_models import Case


def moved(case: Case, to: torch.device) -> Case:
    """The case there: parameters, buffers, inputs, and tensors that are attributes of a module."""

    def move(thing: Any) -> Any:
        return thing.detach().to(to).requires_grad_(thing.requires_grad) if isinstance(thing, torch.Tensor) else thing

    module = case.module.to(to)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                setattr(part, name, move(value))
    return case._replace(module=module, args=tree_map(move, case.args), kwargs=tree_map(move, case.kwargs))
