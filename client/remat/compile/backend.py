"""`remat.backend`: what `torch.compile` is given, for torch's own kernels or for those that Inductor generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planning.budget import Budget
from ..planning.planner import Planner, planner_for
from .eager import Backend


def backend(
    budget: Budget,
    planner: Planner | str | None = None,
    inner: str = "eager",
    options: Mapping[str, Any] | None = None,
    **asking: Any,
) -> Backend:
    """A backend for `torch.compile(model, backend=…, fullgraph=True, dynamic=False)` that trains inside a budget.

    Dynamo guards the inputs: another shape, dtype or train mode is compiled and planned anew.

    Args:
        budget: as for `remat.optimize`.
        planner: as for `remat.optimize`.
        inner: what runs the ops: "eager", torch's own kernels, or "inductor", the kernels that Inductor generates.
        options: Inductor's, as for `torch.compile(options=…)`.
        asking: `method`, `time_limit_s`, `max_gap`, `slack`, `on_progress`, as for `remat.optimize`.

    Raises:
        ValueError: an `inner` that there is not, or options for one that takes none.
        InvalidData: an option of Inductor's that plans cannot be carried out with.
        ImportError: this torch lacks what plans under Inductor need; the message names it.
    """
    if inner == "inductor":
        from .inductor.backend import InductorBackend

        return InductorBackend(budget, planner_for(planner), options=options, **asking)
    if inner != "eager":
        raise ValueError(f"inner must be 'eager' or 'inductor', not {inner!r}")
    if options:
        raise ValueError("options are Inductor's: they go with inner='inductor'")
    return Backend(budget, planner_for(planner), **asking)
