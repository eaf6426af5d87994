"""Parameters that several stages use: their gradients meet as in plain training, before hooks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class SharedParameters:
    """Which parameters more than one stage uses.

    Attributes:
        users: for each such parameter, the stages that use it, in the order in which autograd adds up their parts.
    """

    def __init__(self, names: Sequence[Mapping[str, nn.Parameter]]) -> None:
        self._names = tuple(names)
        self.users: dict[nn.Parameter, tuple[int, ...]] = {}
        for n, named in reversed(list(enumerate(names))):
            for parameter in named.values():
                self.users[parameter] = (*self.users.get(parameter, ()), n)

    def of(self, n: int) -> Mapping[str, nn.Parameter]:
        """The shared parameters of stage n, by their names in its module."""
        return self._names[n]


def shared_parameters(modules: Sequence[nn.Module]) -> SharedParameters:
    """The parameters with a gradient that more than one of the modules uses, in the order of a plain forward pass."""
    found = [{name: p for name, p in module.named_parameters() if p.requires_grad} for module in modules]
    times: dict[int, int] = {}
    for named in found:
        for parameter in named.values():
            times[id(parameter)] = times.get(id(parameter), 0) + 1
    return SharedParameters([{name: p for name, p in named.items() if times[id(p)] > 1} for named in found])


class SharedGradients:
    """Adds up the parts of shared parameters' gradients in plain training's order, and accumulates each sum once.

    Floating-point addition does not associate: a part that comes before its turn waits.
    """

    def __init__(self, shared: SharedParameters) -> None:
        self._shared = shared
        self._waiting: dict[nn.Parameter, dict[int, torch.Tensor | None]] = {p: {} for p in shared.users}
        self._sums: dict[nn.Parameter, tuple[torch.Tensor | None, bool]] = {}
        self._next = dict.fromkeys(shared.users, 0)

    def add(self, n: int, parts: Mapping[str, list[torch.Tensor]]) -> None:
        """Take the parts that the backward step of stage n made, by name; none is a part, too."""
        for name, parameter in self._shared.of(n).items():
            found = parts.get(name)
            self._waiting[parameter][n] = found.pop() if found else None
            self._meet(parameter)

    def _meet(self, parameter: nn.Parameter) -> None:
        users, waiting = self._shared.users[parameter], self._waiting[parameter]
        total, own = self._sums.pop(parameter, (None, False))
        at = self._next[parameter]
        while at < len(users) and users[at] in waiting:
            part = waiting.pop(users[at])
            at += 1
            if part is None:
                continue
            if total is None:
                total = part
            elif own:
                total.add_(part)
            else:
                total, own = total + part, True
        self._next[parameter] = at
        if at < len(users):
            self._sums[parameter] = (total, own)
        elif total is not None:
            torch.autograd.backward((parameter,), (total,))
