"""`remat.backend`: what `torch.compile` is given, for torch's own kernels or for those that Inductor generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from remat_ir import InvalidData

from ..capture.operations import check_functional
from ..planning.budget import Budget, read_budget
from ..planning.options import SolveOptions, StepFields, solve_options
from ..planning.planner import Planner, check_method, planner_for
from ..planning.sources import OnProgress
from .eager import Backend


def backend(
    budget: Budget,
    planner: Planner | str | None = None,
    inner: str = "eager",
    inductor_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> Backend:
    """A backend for `torch.compile(model, backend=…, fullgraph=True, dynamic=False)` that trains inside a budget.

    Dynamo guards the inputs: another shape, dtype or train mode is compiled and planned anew. It starts on a quick
    plan, and is compiled once more when the planner has a better one; under Inductor the next process has that.

    Args:
        budget: as for `remat.optimize`.
        planner: as for `remat.optimize`.
        inner: what runs the ops: "eager", torch's own kernels, or "inductor", the kernels that Inductor generates.
        inductor_options: Inductor's, as for `torch.compile(options=…)`.
        on_progress: as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan.

    Raises:
        ValueError: an `inner` that there is not, or options of Inductor's for another one.
        InvalidData: not a budget, not a planner, not an option, or one of Inductor's that plans cannot be carried out
            with.
        ImportError: this torch lacks what plans under Inductor need; the message names it.
    """
    asking = solve_options(backend, StepFields, options, fields)
    check_functional(asking.functional_ops)
    budget = read_budget(budget)
    asked = planner_for(planner)
    check_method(asked.asked, asking.method)
    if inner == "inductor" and asking.link is not None:
        raise InvalidData("link= goes with inner='eager': plans under Inductor move nothing to the host")
    if inner == "inductor":
        from .inductor.backend import InductorBackend

        return InductorBackend(budget, asked, asking, inductor_options or {}, on_progress)
    if inner != "eager":
        raise ValueError(f"inner must be 'eager' or 'inductor', not {inner!r}")
    if inductor_options:
        raise ValueError("inductor_options go with inner='inductor'")
    return Backend(budget, asked, asking, on_progress)
