"""`remat.optimize_pipeline`: the stages of a pipeline, planned together for the schedule that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist

from remat_ir import InvalidData, readable

from ..capture.call import example_call
from ..capture.operations import check_functional
from ..distributed.ranks import Ranks, planner_of
from ..planning.budget import Budget, UnitBytes, read_budget
from ..planning.options import SolveOptions, StepFields, solve_options
from ..planning.planner import Planner
from ..training.compared import undisturbed
from ..training.job import Job, warn_of_update
from ..units.units import EACH
from .search import Picked, Search


@dataclass(frozen=True)
class PipelinePlans:
    """What the stages of a pipeline got; bytes are this rank's, times are predicted and those of all ranks.

    Attributes:
        stages: by number, this rank's alone.
        budget_bytes, predicted_bytes, measured_bytes: of a step of the schedule, fixed bytes included.
        reserved_bytes: the most that torch's allocator reserves for training by the plans, as some steps did, where the
            budget was one of a device's bytes; else None.
        fixed_bytes: parameters, buffers, inputs, the pipeline's own buffers, optimizer state, EMA copies.
        update_peak_bytes: predicted while the optimizer steps: fixed bytes, gradients, outputs, the step's temporaries.
        makespan_ns, plain_makespan_ns: of a step by these plans, and by plain ones if these fitted.
        bound_ns: no choice among the plans at hand has a shorter makespan.
    """

    stages: Mapping[int, UnitBytes]
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    fixed_bytes: int
    update_peak_bytes: int
    makespan_ns: int
    plain_makespan_ns: int
    bound_ns: int
    reserved_bytes: int | None = None

    @property
    def overhead(self) -> float:
        """Of the makespan over the plain one."""
        return self.makespan_ns / max(1, self.plain_makespan_ns) - 1

    def __str__(self) -> str:
        reserved = "" if self.reserved_bytes is None else f", {readable(self.reserved_bytes)} reserved"
        return (
            f"stages {', '.join(map(str, self.stages))} within {readable(self.budget_bytes)}: peak "
            f"{readable(self.predicted_bytes)} predicted, {readable(self.measured_bytes)} measured{reserved}; the "
            f"pipeline's makespan is {100 * self.overhead:.1f} % over plain"
        )


def optimize_pipeline(
    stages: Any,
    schedule: Any,
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> PipelinePlans:
    """Train the stages of a pipeline by plans, in place, inside one budget for each rank.

    What a rank holds at each moment is read from the actions of the schedule; the plans are chosen for all ranks
    together, so that a step of the schedule takes the least time. Some steps of the schedule are run for that, and the
    caller's parameters, buffers, gradients and random state are left as they were. Call it on every rank, after the
    schedule is made and before its first step. Nothing is planned while the schedule runs, so that no rank waits for
    another one's plan; micro-batches of another size are planned by each rank alone, within what their stage has got.

    Args:
        stages: this rank's `PipelineStage`, or a list of them.
        schedule: one of `torch.distributed.pipelining`, of these stages: `ScheduleGPipe`, `Schedule1F1B`,
            `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, or your own.
        example_args, example_kwargs: one batch, as this rank gives it to `schedule.step`: inputs on the first stage's
            rank, `target=` on the last one's.
        budget: of this rank, as for `remat.optimize`; a fraction is one of what the rank needs without a plan besides
            the fixed bytes, with this schedule. Bytes of an accelerator are those that its driver has to give: three
            more steps show what is reserved.
        planner: as for `remat.optimize`; each rank asks for its own stages.
        optimizer, ema: of this rank's parameters, as for `remat.optimize`.
        options, fields: as for `remat.optimize_units`.

    Raises:
        CaptureError: a stage cannot be captured, on some rank.
        BudgetTooSmall: no choice of plans fits some rank's budget; the message says which, and what is enough.
        NothingFound: the measured peak stayed over a budget.
        InvalidData: not stages or a schedule of theirs, not a budget of a rank, not a planner, or not an option.
        RuntimeError: torch.distributed is not initialized, or remat is enabled on a stage already.
    """
    asking = solve_options(optimize_pipeline, StepFields, options, fields, default=EACH)
    budget = _checked(asking, budget)
    own = _stages(stages)
    if not dist.is_initialized():
        raise RuntimeError("optimize_pipeline needs torch.distributed: call init_process_group first")
    job = Job(optimizer, ema)
    args, kwargs = example_call(example_args, example_kwargs)
    search = Search(own, schedule, planner_of(planner, asking), asking, job, Ranks(own[0].group))
    try:
        with undisturbed(search.model):
            picked = search.run(lambda: schedule.step(*args, **kwargs), budget, (args, kwargs))
    except BaseException:
        search.undo()
        raise
    plans = _plans(search, picked)
    warn_of_update(job, plans.update_peak_bytes, plans.budget_bytes)
    return plans


def _checked(asking: SolveOptions, budget: Budget) -> Budget:
    """The budget of a rank, once what is asked for is known to be what a pipeline takes.

    Raises:
        InvalidData: it is not.
    """
    check_functional(asking.functional_ops)
    if asking.link is not None:
        raise InvalidData("optimize_pipeline looks for plans that move nothing to the host: leave link= out")
    budget = read_budget(budget)
    if isinstance(budget, UnitBytes):
        raise InvalidData(f"the budget of a rank is bytes or a share of what it needs, not {budget!r}")
    if asking.ranks is not False:
        raise InvalidData("each rank of a pipeline runs stages of its own, and plans them by itself: leave ranks= out")
    return budget


def _plans(search: Search, picked: Picked) -> PipelinePlans:
    """What a search ended with, with all that is there throughout."""
    fixed = search.standing.fixed_bytes
    update = fixed + search.standing.left_bytes + search.job.update().temporaries_bytes
    return PipelinePlans(
        stages={stage.stage_index: p.size for stage, p in zip(search.stages, picked.points, strict=True)},
        budget_bytes=fixed + picked.allowed,
        predicted_bytes=fixed + picked.predicted,
        measured_bytes=fixed + picked.measured,
        fixed_bytes=fixed,
        update_peak_bytes=update,
        makespan_ns=picked.choice.makespan_ns,
        plain_makespan_ns=picked.plain_ns,
        bound_ns=picked.choice.bound_ns,
        reserved_bytes=picked.reserved,
    )


def _stages(stages: Any) -> list[Any]:
    """The stages of this rank as a list.

    Raises:
        InvalidData: they are none.
    """
    own = list(stages) if isinstance(stages, Iterable) else [stages]
    for stage in own:
        if not (hasattr(stage, "submod") and hasattr(stage, "stage_index")):
            raise InvalidData(f"stages are torch.distributed.pipelining.PipelineStage, not {type(stage).__name__}")
    if not own:
        raise InvalidData("there are no stages to plan")
    return own
