"""`remat.enable` and `remat.optimize`: plans for a module that stays itself, in place, and the file that keeps them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack

import torch
from torch import nn

from remat_ir import Answer, InvalidData, Problem, verify

from ..capture.call import check_module, example_call
from ..chains.modules import ChainedModule, ChainPlans, is_sequential
from ..compile.carrier import Carrier
from ..compile.plans import UNBOUNDED, Traced
from ..compile.shared import Division
from ..planning.budget import Budget, UnitBytes
from ..planning.options import DEFAULT, SolveOptions, TrainingFields, solve_options
from ..planning.phases import Phases
from ..planning.plan_file import PlannedStep, write_plan_file
from ..planning.planner import CoordinatedPlanner, Planner
from ..planning.sources import OnProgress
from ..planning.summary import headline
from ..profiling.profile import device_kind
from .memory import StepPeak, summary
from .optimize import Planning, carry_out, planning, profiled_step
from .step import Planned, TrainingStep
from .traced import Trained, TrainingBackend

log = logging.getLogger("remat")

M = TypeVar("M", bound=nn.Module)

TrainingCarrier: TypeAlias = Carrier[TrainingBackend, ChainPlans]


def enable(
    model: M,
    *,
    budget: Budget | None = None,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> M:
    """Train this module by plans from now on, in place: the counterpart of `gradient_checkpointing_enable()`.

    The module keeps its class, attributes, hooks and state_dict. A call with gradients enabled is captured by
    torch.compile and runs by the plan of its sizes, made when they are first seen; a call without runs as before. Wrap
    in DDP after this.

    The modules of an `nn.ModuleList`, such as the blocks that FSDP2 shards one by one, have plans of their own inside
    one budget, whatever else the step holds: see `docs/adoption.md`.

    Args:
        budget, plan, planner, optimizer, ema, on_progress, options, fields: as for `remat.optimize`.

    Returns:
        The same module.

    Raises:
        RuntimeError: it, or one of its modules, is enabled already.
        InvalidData: as for `remat.optimize`, before anything is captured.

    A first call for which a plan file has no plan raises `PlanMismatch`.
    """
    check_module(model)
    refuse_enabled(model)
    asking = solve_options(enable, TrainingFields, options, fields)
    made = planning(budget, asking, plan=plan, planner=planner, optimizer=optimizer, ema=ema, on_progress=on_progress)
    if isinstance(model, nn.ModuleList):
        _enable_all(list(dict.fromkeys(model)), made)  # a module may be there more than once
    else:
        _enable(model, made, asking)
    return model


def optimize(
    model: M,
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> M:
    """Train this module inside a memory budget, with the gradients of stock `aot_eager`, bit for bit.

    It is `remat.enable`, and a plan now: the training step of one call is captured without running it, its kernels are
    profiled one by one, and the plan is asked for. Where Dynamo breaks the forward into parts, the first of them is
    planned now and the others in the first step. Eager PyTorch may differ by rounding: see `docs/exactness.md`.

    Args:
        example_args, example_kwargs: one call of the model. The first is a tuple or list of positional arguments, one
            tensor, or a dict of keyword arguments, such as a tokenizer's batch.
        budget: bytes of the device ("12GiB", 12 * 2**30), a share of what plain training needs beyond its fixed bytes
            ("50%", `remat.Fraction(0.5)`), or `remat.ActivationBytes("2GiB")`; with `plan` None is the file's.
        plan: a file that `remat.save_plans` or the command `remat plan` wrote. Its plan is verified on the step that is
            captured here and priced by the kernels here; no planner is asked. The first step must be one of the file's.
        planner: None (the service of REMAT_BASE_URL, else the local solver, else the client's own greedy plan), a URL,
            "local", "greedy", or any object with the method `plan`.
        optimizer: counted with the state that its first step will make, and with what that takes while it runs: see
            `Planned.update_peak_bytes`.
        ema: copies of the parameters that are held as well, as a module or as tensors.
        on_progress: called with a `remat_ir.Progress` at each improvement, such as `print`; without it a terminal shows
            what is done and for how long.
        options, fields: a `remat.SolveOptions`, its fields as keywords, or both; a keyword counts.

    A call of another size gets a plan of its own. It starts on the plan of a size that is known, verified on the new
    one, or else on a quick plan, and the planner's takes over as with `wait=False`. Kernels of a size between two known
    ones, or little below, are not timed: their times follow from those two.

    Returns:
        The same module; `remat.disable` undoes it.

    Raises:
        CaptureError: the training step cannot be captured, and `on_failure` is "raise"; the message says why.
        BudgetTooSmall, NothingFound: there is no plan; the message says what is enough.
        PlanMismatch: the plan file is for another step, and which op differs; or its plan does not fit the budget.
        InvalidData: not a budget, not a planner, not an optimizer, or not an option; before anything is captured.
        RuntimeError: remat is enabled on the module.
    """
    check_module(model)
    refuse_enabled(model)
    asking = solve_options(optimize, TrainingFields, options, fields)
    args, kwargs = example_call(example_args, example_kwargs)
    made = planning(budget, asking, plan=plan, planner=planner, optimizer=optimizer, ema=ema, on_progress=on_progress)
    carrier = _enable(model, made, asking)
    try:
        found = carrier.plan(args, kwargs)
    except BaseException:
        disable(model)
        raise
    if found is None and carrier.stages is None:
        log.warning(
            "nothing of this %s is planned: no gradient comes from the call, or none can be", type(model).__name__
        )
    return model


def _enable(model: nn.Module, made: Planning, asking: SolveOptions) -> TrainingCarrier:
    chosen = made.options  # of a plan file, graphs alone
    if chosen.mode == "chain" and not is_sequential(model):
        raise InvalidData(f"mode='chain' takes an nn.Sequential and one tensor, not {type(model).__name__}")
    whole = chosen.mode == "auto" and chosen.link is None and is_sequential(model) and "forward" not in vars(model)

    def make_stages(model: nn.Module) -> ChainPlans:
        return ChainPlans(model, made.chain, asking)

    stages = make_stages if whole or chosen.mode == "chain" else None
    carrier = install(model, functools.partial(made.backend, refuses=whole), stages)
    if chosen.mode == "chain":
        carrier.stages = make_stages(model)
    return carrier


def _enable_all(models: Sequence[nn.Module], made: Planning) -> None:
    """Let several modules train by plans inside one budget.

    Raises:
        InvalidData: there are none, or the budget is one of a single unit.
        RuntimeError: one is enabled already.
    """
    if not models:
        raise InvalidData("there are no modules in this ModuleList to plan")
    if isinstance(made.budget, UnitBytes):
        raise InvalidData(f"the budget of several modules is bytes or a share of what they need, not {made.budget!r}")
    if made.options.mode == "chain":
        raise InvalidData("mode='chain' takes an nn.Sequential and one tensor, not a ModuleList")
    for model in models:
        refuse_enabled(model)
    shared = made.shared()
    for model in models:
        install(model, functools.partial(made.backend, shared=shared))


def install(
    model: nn.Module,
    make_backend: Callable[[nn.Module], TrainingBackend],
    make_stages: Callable[[nn.Module], ChainPlans] | None = None,
) -> TrainingCarrier:
    """Let a module run by the plans of a backend; the arguments are those of `Carrier`."""
    carrier = Carrier(model, model.__dict__.get("forward"), make_backend, make_stages)
    model.__dict__["forward"] = carrier
    return carrier


def following(
    model: nn.Module, planned: Planned, planner: CoordinatedPlanner, options: SolveOptions = DEFAULT
) -> TrainingCarrier:
    """What runs a module's calls by a plan that is known; the module stays as it is.

    Args:
        planner: whose table has the costs of the kernels.
        options: of which `self_check` and those that concern a step are followed.

    A call of another step than the plan's raises `InvalidPlan`.
    """
    assert planned.answer.plan is not None
    plan, method = planned.answer.plan, planned.answer.method

    def make(model: nn.Module, traced: Traced, _: Sequence[Planned]) -> Planned:
        with Phases(lambda _: None) as phases:
            step = profiled_step(model, traced, planner, options, None, (planned,), phases)
        problem = Problem(step.graph, 2**53)
        return carry_out(step, problem, Answer.of_plan(problem, plan, method=method))

    before = model.__dict__.get("forward")
    return Carrier(model, before, lambda model: TrainingBackend(model, make, planner, options))


def disable(model: M) -> M:
    """Undo `enable` or `optimize`; the module trains without plans again.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> disable(remat.enable(model, budget="100%", planner="greedy")) is model
        True
    """
    for part in model if isinstance(model, nn.ModuleList) else ():
        disable(part)
    forward = carrier_of(model)
    if forward is not None:
        del model.__dict__["forward"]
        if forward.before is not None:
            model.__dict__["forward"] = forward.before
        forward.backend.shared.watching.end()
        forward.undo()
    return model


def carrier_of(model: object) -> TrainingCarrier | None:
    """What runs a module by plans; None: nothing does."""
    found = getattr(model, "__dict__", {}).get("forward")
    return found if isinstance(found, Carrier) else None


def carriers_of(model: nn.Module) -> list[TrainingCarrier]:
    """What runs a module by plans, or those of an `nn.ModuleList`."""
    parts = list(dict.fromkeys(model)) if isinstance(model, nn.ModuleList) else [model]
    return [found for part in parts if (found := carrier_of(part)) is not None]


def backend_of(model: nn.Module) -> TrainingBackend:
    """The backend that a module runs behind.

    Raises:
        RuntimeError: it is not enabled.
    """
    return _enabled(model).backend


def _enabled(model: nn.Module) -> TrainingCarrier:
    found = carrier_of(model)
    if found is None:
        parts = " itself: each of its modules has plans of its own" if carriers_of(model) else ""
        raise RuntimeError(f"remat is not enabled on this {type(model).__name__}{parts}")
    return found


def refuse_enabled(model: nn.Module) -> None:
    """Refuse a module that has plans already.

    Raises:
        RuntimeError: it has.
    """
    if carrier_of(model) is not None:
        raise RuntimeError(f"remat is enabled on this {type(model).__name__} already; call remat.disable first")


class Plans:
    """The planned side of a module that trains by plans; as text, a line for each of them and what its first step used.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> found = plans_of(remat.optimize(model, x, budget="100%", planner="greedy"))
        >>> len(found.plans), found.unplanned
        (1, 0)
    """

    def __init__(self, carrier: TrainingCarrier) -> None:
        self._carrier = carrier

    @property
    def model(self) -> nn.Module:
        """The module itself."""
        return self._carrier.model

    @property
    def plans(self) -> tuple[Planned, ...]:
        """The plans so far, of each graph at each of its sizes."""
        return tuple(each.planned for each in self._carrier.backend.trained if not each.failed)

    @property
    def unplanned(self) -> int:
        """How many sizes of graphs run without a plan."""
        graphs = self._carrier.backend.graphs
        return sum(len(graph.made) for graph in graphs) - len(self.plans)

    @property
    def chains(self) -> tuple[ChainedModule, ...]:
        """The chain plans so far, with what runs them."""
        return () if self._carrier.stages is None else self._carrier.stages.plans

    @property
    def peaks(self) -> Mapping[Planned, StepPeak]:
        """What the first step of each plan came to, where it has run and was watched."""
        return self._carrier.backend.peaks

    @property
    def division(self) -> Division | None:
        """What the calls of a step with several got of the budget that they share; None: it has not been divided."""
        return self._carrier.backend.division

    @property
    def calls(self) -> tuple[int, int]:
        """How many calls that give gradients have run by a plan, and how many without one."""
        return self._carrier.planned_calls, self._carrier.unplanned_calls

    def __str__(self) -> str:
        lines = []
        for planned in self.plans:
            text = headline(planned.step.graph, planned.answer, peak_bytes=planned.predicted_bytes)
            measured = summary(self.peaks, planned)
            lines.append(f"{text}; {measured}" if measured else text)
        lines += [f"a chain of {each.chain.stages} stages" for each in self.chains]
        if self.division is not None:
            lines.append(str(self.division))
        if self.unplanned:
            lines.append(f"without a plan: {self.unplanned} of torch.compile's graphs at some sizes")
        return "\n".join(lines) or "nothing is planned yet: the first step makes the plan"

    def plan_for(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Planned | None:
        """The plan that the first graph of a call with these arguments runs by, made now if there is none.

        None: it runs as stages, or without a plan.

        Raises:
            CaptureError: it cannot be captured, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        found = self._carrier.plan(args, kwargs)
        return found.planned if isinstance(found, Trained) else None


def plans_of(model: nn.Module) -> Plans:
    """The plans of a module that `enable` or `optimize` was called for: answers, predictions, measured peaks.

    Raises:
        RuntimeError: it is not enabled.
    """
    return Plans(_enabled(model))


def save_plans(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's plans to a file that `plan=` of `remat.optimize` and `remat.enable` takes.

    A job that is restarted with it runs the same plans, and nothing is solved. The file has the names
    of modules in it, and no weights. Calls that run without a plan, and chains, are left out. Where a step has several
    calls, the file has the plan of each and the budget that they share, once it has been divided.

    Args:
        model: one that `remat.optimize` or `remat.enable` was called for; those of an `nn.ModuleList` share one file.

    Raises:
        InvalidData: it has no plan of a captured step yet, or the file cannot be written.
        RuntimeError: it is not enabled.

    Example:
        >>> import remat, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.ones(4, 8)
        >>> path = tempfile.mkdtemp() + "/plan.json"
        >>> before = remat.plans_of(remat.optimize(model, x, budget="100%", planner="greedy")).plans
        >>> remat.save_plans(model, path)
        >>> pinned = remat.plans_of(remat.optimize(remat.disable(model), x, plan=path)).plans
        >>> pinned[0].answer.plan == before[0].answer.plan
        True
    """
    backend = next((found.backend for found in carriers_of(model)), None) or backend_of(model)
    division = backend.division
    if division is None and backend.shared.several:
        raise InvalidData("the calls of a step share a budget that has not been divided yet: train a few steps first")
    if division is None:
        write_plan_file(path, [_row(made.step, made.answer) for made in plans_of(model).plans])
        return
    shared = division.fixed_bytes + division.allowed_bytes
    rows = []
    for each, plan in backend.shared.chosen():
        if isinstance(each, Trained):
            graph = each.graph
            peak = verify(Problem(graph, UNBOUNDED), plan).peak_bytes  # of groups of kernels: a little above the step's
            answer = Answer.of_plan(Problem(graph, max(shared, peak)), plan, method="division")
            rows.append(_row(each.planned.step, answer))
    write_plan_file(path, rows, shared)


def _row(step: TrainingStep, answer: Answer) -> PlannedStep:
    return PlannedStep(step.graph, answer, device_kind(step.operations.flow.kernels))
