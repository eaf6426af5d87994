"""`remat.optimize`: capture, profile, ask, verify, and the module that trains by the plan."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Plan, Problem, Progress, verify

from ..chains.chained import ChainedModule
from ..chains.training import optimize_chain
from ..distributed.ranks import RankPlanner
from ..errors import CaptureError
from ..planning.budget import Budget, Fraction, bounded, budget_bytes, device_budget
from ..planning.planner import Planner, in_step, plan_or_raise, planner_for, profile_table
from ..planning.profiles import ProfileTable
from ..planning.sources import GreedyPlanner
from ..profiling.fixed import existing_gradients
from ..profiling.optimizers import optimizer_state
from .module import MOST_PLANS, OnFailure, Rematerialized
from .planned import Later, Planned
from .sizes import plan_of_another_size
from .step import Around, running_peak, training_step

OnProgress = Callable[[Progress], None]
Mode: TypeAlias = Literal["auto", "graph", "chain"]
log = logging.getLogger("remat")

BUSY = threading.RLock()
"""Torch captures and compiles one step at a time: it changes its own settings meanwhile."""

_ASKING = threading.Semaphore(2)
"""Of many sizes that wait for their plans, so many are asked for at once."""


def optimize(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    max_gap: float = 0.001,
    wait: bool = True,
    optimizer: Any = None,
    slack: float = 1.0,
    on_failure: OnFailure = "raise",
    on_progress: OnProgress | None = None,
    self_check: bool = True,
    mode: Mode = "auto",
    most_plans: int = MOST_PLANS,
) -> Rematerialized:
    """Make a module that trains inside a memory budget, with the gradients of plain training.

    The training step is captured for the example inputs without running it, its kernels are profiled one by one, and
    the plan is asked for now. Parameters and buffers are shared with `model`.

    Args:
        example_args, example_kwargs: one call of the model; a tuple or list of positional arguments.
        budget: bytes of the device ("12GiB", 12 * 2**30), `remat.Fraction(0.5)` of what plain training needs beyond
            its fixed bytes, or `remat.ActivationBytes("2GiB")`.
        planner: None (the service of REMAT_BASE_URL, else the local solver, else the client's own greedy plan), a URL,
            "local", "greedy", or any object with the method `plan`.
        wait: False starts training on the client's quick greedy plan; the planner's takes over at the start of a later
            step, once it is there.
        optimizer: counted with the state that its first step will make.
        slack: bytes reserved over bytes allocated, where a budget is bytes of a device.
        on_failure: what to do where a step cannot be captured: "raise", or train "plain" and say so in the log.
        self_check: whether the first step of each plan measures its peak, and warns where it is off by more than 3 %.
        mode: "graph" captures the step as one graph; "chain" runs the stages of an `nn.Sequential` one after the other,
            with any Python inside (LSTM, branches on data): see `remat.optimize_chain`; "auto" takes the graph, and
            the chain where a Sequential of one tensor cannot be captured.
        most_plans: how many kinds of calls keep their plan; beyond, the one used least lately is planned anew.

    A call of another size gets a plan of its own. Where the step is the same but for its sizes, it starts on the plan
    of a size that is known, verified on the new one, and the planner's takes over as with `wait=False`. Kernels of a
    size between two known ones, or little below, are not timed: their times follow from those two.

    Returns:
        A module with the state_dict of `model`.

    Raises:
        CaptureError: the training step cannot be captured; the message says why.
        BudgetTooSmall, NothingFound: there is no plan; the message says what would do.
        InvalidData: not a budget, or not a planner.
    """
    made = planned_module(
        model,
        budget,
        planner=planner,
        method=method,
        time_limit_s=time_limit_s,
        max_gap=max_gap,
        wait=wait,
        optimizer=optimizer,
        slack=slack,
        on_failure=on_failure,
        on_progress=on_progress,
        self_check=self_check,
        mode=mode,
        most_plans=most_plans,
    )
    made.plan_for(tuple(example_args), example_kwargs)
    return made


def planned_module(
    model: nn.Module,
    budget: Budget,
    *,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    on_failure: OnFailure = "raise",
    self_check: bool = True,
    mode: Mode = "auto",
    most_plans: int = MOST_PLANS,
    **asking: Any,
) -> Rematerialized:
    """A module that plans each kind of call when it first sees it; the arguments are those of `optimize`."""
    if mode not in get_args(Mode):
        raise InvalidData(f"mode is one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    asked = planner_for(planner)
    table = profile_table(asked)

    def graph(args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[Planned]) -> Planned:
        extra = {"gradients": existing_gradients(model), "optimizer state": optimizer_state(optimizer)}
        return plan_step(
            model,
            args,
            kwargs,
            budget=budget,
            planner=asked,
            table=table,
            extra=extra,
            known=known,
            **asking,
        )

    def chain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChainedModule:
        if not _is_chain(model, args, kwargs):
            raise CaptureError(f"chain mode takes an nn.Sequential and one tensor, not {type(model).__name__}")
        given = {name: asking[name] for name in ("method", "time_limit_s", "max_gap") if name in asking}
        size = device_budget(budget, asking.get("slack", 1.0))
        state = optimizer_state(optimizer)
        stages: list[nn.Module] = list(model)  # type: ignore[call-overload]
        return optimize_chain(stages, args[0], budget=size, planner=asked, optimizer_bytes=state, **given)

    def make_plan(args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[Planned]) -> Planned | ChainedModule:
        if mode == "chain":
            return chain(args, kwargs)
        try:
            return graph(args, kwargs, known)
        except CaptureError as error:
            if mode == "graph" or not _is_chain(model, args, kwargs) or not error.stages_may_do:
                raise
            log.info("the stages run as a chain: %s", error)
            return chain(args, kwargs)

    return Rematerialized(model, make_plan, on_failure, self_check, most_plans)


def _is_chain(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call runs stages one after the other, the first on the only argument."""
    one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
    return one and isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def plan_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    budget: Budget,
    planner: Planner,
    table: ProfileTable | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    max_gap: float = 0.001,
    slack: float = 1.0,
    extra: Mapping[str, int] | None = None,
    on_progress: OnProgress | None = None,
    wait: bool = True,
    known: Sequence[Planned] = (),
) -> Planned:
    """Capture, profile and plan one kind of call; the plan is verified here, whoever made it.

    Args:
        extra: fixed bytes beside those of the module and its inputs, by name.
        known: plans of other kinds of calls, the latest last; one that fits is used until the planner's is there.
    """
    with BUSY:
        like = known[-1].step if known else None
        step = training_step(
            model,
            args,
            kwargs,
            table=table,
            extra=extra,
            like=like,
            sizes=[planned.step.profiled for planned in known],
        )
    size = max(budget_bytes(budget, step.graph, slack), _room(budget, step.graph, known))
    problem = Problem(bounded(step.graph, budget), size)

    def ask(who: Planner) -> Answer:
        return who.plan(problem, method=method, time_limit_s=time_limit_s, max_gap=max_gap, on_progress=on_progress)

    def greedy() -> Answer:
        return GreedyPlanner().plan(problem, time_limit_s=time_limit_s, max_gap=max_gap)

    ranks = planner if isinstance(planner, RankPlanner) else None
    quick = None if in_step(planner) else plan_of_another_size(problem, known)
    if quick is None and not wait:
        quick = greedy() if ranks is None else ranks.agreed(problem, greedy)
    if quick is None or not isinstance(quick.plan, Plan):
        return carry_out(step, problem, plan_or_raise(ask(planner), step.graph))
    log.info("training starts on %s", "a greedy plan" if quick.cache is None else "the plan of another size")
    made = carry_out(step, problem, quick)
    if (quick.gap or 0) <= 0:
        return made
    most = quick.cost_ns or 0

    def better(answer: Answer) -> Planned | None:
        return carry_out(step, problem, answer) if answer.plan is not None and (answer.cost_ns or 0) < most else None

    if ranks is not None:
        return replace(made, better=ranks.later(problem, lambda: ask(ranks.asked), better))
    return replace(made, better=_later(lambda: ask(planner), better))


def _room(budget: Budget, graph: Graph, known: Sequence[Planned]) -> int:
    """What a share of an earlier, larger call came to: the last, smaller batch of an epoch may use as many bytes."""
    if not isinstance(budget, Fraction):
        return 0
    rooms = (planned.answer.budget_bytes - planned.step.graph.fixed_bytes for planned in known)
    return graph.fixed_bytes + max(rooms, default=0)


def _later(ask: Callable[[], Answer], better: Callable[[Answer], Planned | None]) -> Later:
    """What `better` makes of the planner's answer, when that comes.

    It is asked in a thread of its own, which does not keep the process; the plan is compiled there, too.
    """
    found: Future[Planned | None] = Future()

    def work() -> None:
        made = None
        try:
            with _ASKING:
                answer = ask()
            made = better(answer)
        except Exception as error:  # the planner's trouble is no reason to stop training
            log.warning("no better plan came, training goes on by the quick one: %s", error)
        found.set_result(made)

    threading.Thread(target=work, name="remat-planner", daemon=True).start()
    return found


def carry_out(step: Any, problem: Problem, answer: Answer) -> Planned:
    """A step with an answer's plan, verified and compiled.

    Raises:
        InvalidPlan: the plan is not one of this problem, or not what the answer claims.
    """
    if not isinstance(answer.plan, Plan):
        raise InvalidPlan(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
    verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    predicted = min(verdict.peak_bytes, running_peak(step, answer.plan))
    with BUSY:
        around: list[Around] = []
        run = step.compile(answer.plan, around)
    return Planned(step, answer, run, predicted, around=around)
