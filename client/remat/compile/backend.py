"""`remat.backend`: what `torch.compile` is given, for torch's own kernels or for those that Inductor generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from remat_ir import InvalidData

from ..capture.operations import check_functional
from ..distributed import planner_of
from ..planning.budget import Budget, read_budget
from ..planning.options import BackendFields, SolveOptions, StepFields, solve_options
from ..planning.planner import Planner, check_method
from ..planning.sources import OnProgress
from .sized import Backend

if TYPE_CHECKING:
    from .inductor.backend import InductorBackend


def backend(
    budget: Budget,
    planner: Planner | str | None = None,
    inner: str = "eager",
    inductor_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[BackendFields],
) -> Backend | InductorBackend:
    """A backend for `torch.compile(model, backend=…)` that trains inside a budget.

    Dynamo guards the inputs: what it compiles anew is planned anew, and so is each size that a call has. With torch's
    own kernels a further size starts on a quick plan, and a better one takes over at the start of a later step; under
    Inductor, which needs `dynamic=False`, the next process has that.

    Args:
        budget: as for `remat.optimize`.
        planner: as for `remat.optimize`.
        inner: what runs the ops: "eager", torch's own kernels, or "inductor", the kernels that Inductor generates.
        inductor_options: Inductor's, as for `torch.compile(options=…)`.
        on_progress: as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan; with torch's own kernels
            `wait`, `on_failure` and `most_plans`, too.

    Raises:
        ValueError: an `inner` that there is not, or options of Inductor's for another one.
        InvalidData: not a budget, not a planner, not an option, or one of Inductor's that plans cannot be carried out
            with.
        ImportError: this torch lacks what plans under Inductor need; the message names it.
    """
    asking = solve_options(backend, StepFields if inner == "inductor" else BackendFields, options, fields)
    check_functional(asking.functional_ops)
    budget = read_budget(budget)
    asked = planner_of(planner, asking)
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
