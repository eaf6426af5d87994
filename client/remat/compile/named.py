"""`torch.compile(model, backend="remat", options={"budget": "50%"})`: what torch finds under the backend's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from remat_ir import InvalidData

from ..capture.operations import check_functional
from ..planning.budget import Budget, read_budget
from ..planning.options import OnFailure, SolveOptions, StepFields, solve_options
from ..planning.planner import Planner, check_method, planner_for
from ..planning.sources import OnProgress
from .backend import backend
from .eager import Backend
from .sized import SizedBackend

MOST_KEPT = 16
"""How many sets of options keep their backend, and with it the plans that those of other sizes start from."""

_kept: list[tuple[dict[str, Any], SizedBackend | Backend]] = []
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
        options: `budget`, and what else `remat.backend` takes, by name; with torch's own kernels `wait`, `on_failure`
            and `most_plans`, too, and sizes may be symbols: each is planned when a call has it.
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


class NamedFields(StepFields, total=False):
    """The fields of `SolveOptions` that a backend has which goes by its name."""

    wait: bool
    on_failure: OnFailure
    most_plans: int


def _backend_of(options: dict[str, Any]) -> SizedBackend | Backend:
    for i, (known, made) in enumerate(_kept):
        if known == options:
            _kept.append(_kept.pop(i))
            return made
    made = _made(**options)
    _kept.append((options, made))
    del _kept[:-MOST_KEPT]
    return made


def _made(
    budget: Budget,
    planner: Planner | str | None = None,
    inner: str = "eager",
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Any,
) -> SizedBackend | Backend:
    if inner != "eager" or "inductor_options" in fields:
        return backend(budget, planner, inner, on_progress=on_progress, options=options, **fields)
    asking = solve_options(backend, NamedFields, options, fields)
    check_functional(asking.functional_ops)
    asked = planner_for(planner)
    check_method(asked.asked, asking.method)
    return SizedBackend(read_budget(budget), asked, asking, on_progress)


by_name.reset = _kept.clear  # type: ignore[attr-defined]  # torch._dynamo.reset calls it
