"""`torch.compile(model, backend="remat", options={"budget": "50%"})`: what torch finds under the backend's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from remat_ir import InvalidData

from .backend import backend
from .sized import Backend

if TYPE_CHECKING:
    from .inductor.backend import InductorBackend

MOST_KEPT = 16
"""How many sets of options keep their backend, and with it the plans that those of other sizes start from."""

_kept: list[tuple[dict[str, Any], Backend | InductorBackend]] = []
"""The last used at the end. Dynamo compiles one graph at a time in a process."""


def by_name(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """One graph of Dynamo's by a plan; equal options share a backend, whichever model they are for.

    Args:
        options: `budget`, and what else `remat.backend` takes, by name.
        mode: one of Inductor's; refused.

    Raises:
        InvalidData: there is a mode, no budget, or what `remat.backend` refuses.
        CaptureError, PlanningError: as from `remat.backend`'s.
    """
    if mode is not None:
        raise InvalidData(
            f'backend="remat" has no mode {mode!r}, which is one of Inductor\'s: leave it out, and use '
            'options={"budget": "50%"}, with "inner": "inductor" for kernels that Inductor generates'
        )
    if not isinstance(options, Mapping) or "budget" not in options:
        raise InvalidData('backend="remat" needs a budget: options={"budget": "50%"}, or "12GiB"')
    return _backend_of(dict(options))(module, example_inputs)


def _backend_of(options: dict[str, Any]) -> Backend | InductorBackend:
    for i, (known, made) in enumerate(_kept):
        if known == options:
            _kept.append(_kept.pop(i))
            return made
    made = backend(**options)
    _kept.append((options, made))
    del _kept[:-MOST_KEPT]
    return made


by_name.reset = _kept.clear  # type: ignore[attr-defined]  # torch._dynamo.reset calls it
