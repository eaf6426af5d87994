"""Stages one after the other, trained inside a budget: profile the chain, ask, verify, execute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, ChainStep, InvalidData, InvalidPlan, Problem, Verb, verify

from ..distributed.ranks import planner_of
from ..errors import CaptureError
from ..lowering.link import bandwidth, storable
from ..planning.budget import Budget
from ..planning.coordinator import Coordinator
from ..planning.options import DEFAULT, PlanFields, SolveOptions, solve_options
from ..planning.planner import CoordinatedPlanner, Planner, plan_or_raise
from ..planning.quick import improved, quick_answer
from ..planning.sources import OnProgress
from ..profiling.optimizers import check_optimizer
from .chained import ChainedModule
from .join_training import plan_join
from .joined import JoinedModule
from .profile import ProfiledChain, chain_of
from .rehearsal import StagesRoom, stages_budget


@overload
def optimize_chain(
    stages: Iterable[nn.Module], x: torch.Tensor, *, head: None = None, **given: Any
) -> ChainedModule: ...


@overload
def optimize_chain(
    stages: Iterable[Iterable[nn.Module]], x: Sequence[torch.Tensor], *, head: nn.Module, **given: Any
) -> JoinedModule: ...


def optimize_chain(
    stages: Iterable[Any],
    x: Any,
    *,
    budget: Budget | None = None,
    segments: int | None = None,
    head: nn.Module | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    offload: bool = False,
    host_bytes: int | None = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Any,
) -> ChainedModule | JoinedModule:
    """Make a module that runs stages one after the other, or in branches that meet, and trains inside a memory budget.

    Nothing is captured: each stage is run and measured as it is, so any Python inside a stage is fine. The budget is
    that of `remat.optimize`; bytes of the device count parameters, buffers and the gradients of all parameters as
    fixed, and so does the prediction. On an accelerator they are those that the driver has to give: three steps by the
    plan are run, after which parameters, buffers, gradients and random state are as before, and where these reserve
    more, less is planned for. The plan is for inputs of the size of `x`: where sizes vary,
    `remat.optimize(…, mode="chain")` makes one for each.

    With a `head` the stages are two or more branches, lists of stages, and `x` has an input for each: the module
    computes `head(branch_1(x_1), …, branch_k(x_k))`. The optimal plan of the join of equal steps (RR-9273) gives
    the order of the backward steps; with `method="join"` it is also the plan, otherwise the graph of the measured
    stages is asked for with that method, and the better of the two is taken.

    Args:
        stages: modules that take and give one tensor; with a head, two or more lists of such.
        x: what the first stage is given; with a head, one tensor for each branch.
        segments: in place of a budget, as for `torch.utils.checkpoint.checkpoint_sequential`: a plan of that many equal
            segments of which only the inputs are kept, for which no planner is asked.
        head: takes the results of the branches, one tensor each.
        optimizer, ema: as for `remat.optimize`.
        offload: whether values may move to the host and back; the link's bandwidth is measured.
        host_bytes: what the host may hold at most, or None without a limit.
        options, fields: those of `remat.SolveOptions` that concern the plan.

    Raises:
        CaptureError: a stage gives something other than one tensor, or overwrites its input; fewer than two branches,
            or an empty one.
        BudgetTooSmall, NothingFound: there is no plan; the message says what is enough.
        InvalidData: neither a budget of stages nor segments, or both; not a planner, or not an option; a head with
            what is for one chain alone; before anything runs.
        RanksDiffer: the ranks' branches or budgets are not equal.

    Example:
        >>> stages, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8, requires_grad=True)
        >>> optimize_chain(stages, x, segments=2)(x).sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    asking = solve_options(optimize_chain, PlanFields, options, fields)
    if (budget is None) == (segments is None):
        raise InvalidData("optimize_chain takes a budget, or a number of segments in place of it")
    if budget is None and (asking != DEFAULT or planner is not None or head is not None):
        raise InvalidData("segments are those of one chain, and no planner is asked: options go with a budget")
    if head is not None and (offload or host_bytes is not None or on_progress is not None):
        raise InvalidData("offload, host_bytes and on_progress are for one chain: branches move nothing to the host")
    modules = list(stages)
    if not modules and head is None:
        raise CaptureError("there is no stage to train")
    if segments is not None:
        return _segmented(modules, x, segments)
    assert budget is not None
    size = stages_budget(budget, asking.slack)
    asked = planner_of(planner, asking)
    check_optimizer(optimizer)
    if head is not None:
        return plan_join(modules, head, x, size, asked, asking, optimizer, ema)
    return plan_chain(
        modules, x, ChainAsked(size, asked, asking, optimizer, ema, offload, host_bytes), on_progress=on_progress
    )


class ChainAsked(NamedTuple):
    """How a chain is planned, whatever the size of its input.

    Attributes:
        budget: of stages, less the allocator's share: see `stages_budget`.
        optimizer, ema, offload, host_bytes: as for `optimize_chain`.
    """

    budget: Budget
    planner: CoordinatedPlanner
    options: SolveOptions
    optimizer: Any = None
    ema: Any = None
    offload: bool = False
    host_bytes: int | None = None


def plan_chain(
    modules: Sequence[nn.Module],
    x: torch.Tensor,
    asked: ChainAsked,
    *,
    known: Sequence[ChainedModule] = (),
    on_progress: OnProgress | None = None,
) -> ChainedModule:
    """Measure and plan stages for one kind of input.

    Args:
        known: what the same stages run by for other inputs, the latest last. With any, or `wait=False`, no solver is
            waited for: stages start on a quick plan, and the planner's takes over.

    Raises:
        CaptureError, BudgetTooSmall, NothingFound: as `optimize_chain`.
    """
    planner, options = asked.planner, asked.options
    link = bandwidth(x.device) if asked.offload else None
    host_bytes = storable(x.device, asked.host_bytes) if asked.offload else None
    measured = chain_of(modules, x, link_bytes_per_s=link, host_bytes=host_bytes)
    chain, needs_grad = agreed_chain(measured, planner.coordinator)
    room = StagesRoom(modules, [x], asked.budget, planner.coordinator, asked.optimizer, asked.ema)
    others = [(made.chain, made.answer) for made in known if made.answer is not None]
    at_once = bool(known) or not options.wait

    def ask(problem: Problem) -> Answer:
        if not at_once:
            return plan_or_raise(planner.plan(problem, options, on_progress=on_progress))
        return plan_or_raise(
            planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, options, others))
        )

    def over(problem: Problem, answer: Answer) -> int:
        return room.over(lambda: room.reserved(carry_out_chain(modules, problem, answer, needs_grad)))

    problem, answer = room.settled(room.problem(chain), ask, over)
    made = carry_out_chain(modules, problem, answer, needs_grad)
    made.reserved_bytes = room.seen
    if at_once and (answer.gap or 0) > options.max_gap:

        def verified(answer: Answer) -> Answer:
            carry_out_chain(modules, problem, answer, needs_grad)
            return answer

        made.better = improved(problem, planner, options, answer, verified, on_progress)
        if room.budget is not None:
            made.reserves = lambda better: None if over(problem, better) else room.seen
    return made


_MEASURED = ("forward_ns", "backward_ns", "forward_workspace_bytes", "backward_workspace_bytes")


def agreed_chain(measured: ProfiledChain, coordinator: Coordinator) -> ProfiledChain:
    """A chain with the times and workspaces that all ranks go by; its sizes stay this rank's own."""
    chain, needs_grad = measured
    costs = {name: getattr(chain, name) for name in _MEASURED}
    costs["untaped"] = chain.untaped_workspaces
    costs["link"] = () if chain.link_bytes_per_s is None else (chain.link_bytes_per_s,)
    costs["needs_grad"] = [int(n in needs_grad) for n in range(1, chain.stages + 1)]
    heard = coordinator.costs(costs)
    found: dict[str, Any] = {name: tuple(heard[name]) for name in _MEASURED}
    # a rank whose tapes are smaller has another problem, which is found out when it is asked
    most = zip(found["forward_workspace_bytes"], chain.tape_bytes, chain.activation_bytes[1:], strict=True)
    untaped = tuple(min(u, f + t - a) for u, (f, t, a) in zip(heard["untaped"], most, strict=True))
    link = heard["link"][0] if heard["link"] else None
    return ProfiledChain(
        replace(chain, **found, untaped_workspace_bytes=untaped, link_bytes_per_s=link),
        frozenset(n for n, differs in enumerate(heard["needs_grad"], 1) if differs),
    )


def carry_out_chain(
    modules: Sequence[nn.Module], problem: Problem, answer: Answer, needs_grad: frozenset[int] = frozenset()
) -> ChainedModule:
    """Stages with an answer's plan, verified.

    Raises:
        InvalidPlan: the plan is not one of this chain, or not what the answer claims.
    """
    if not isinstance(answer.plan, ChainPlan) or not isinstance(problem.subject, Chain):
        raise InvalidPlan(f"a list of stages needs a plan of its chain, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return ChainedModule(modules, problem.subject, answer.plan, answer, needs_grad)


def _segmented(modules: Sequence[nn.Module], x: torch.Tensor, segments: int) -> ChainedModule:
    chain, needs_grad = chain_of(modules, x)
    plan = segments_plan(chain.stages, segments)
    verify(Problem(chain, 2**53), plan)
    return ChainedModule(modules, chain, plan, needs_grad=needs_grad)


def segments_plan(stages: int, segments: int) -> ChainPlan:
    """Equal segments of which only the inputs are kept, the last one with its tapes (torch's checkpoint_sequential)."""
    count = max(1, min(segments, stages))
    size = stages // count
    starts = [1 + i * size for i in range(count)]
    ends = [*(s - 1 for s in starts[1:]), stages]
    steps: list[ChainStep] = []
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        steps += [ChainStep(Verb.F_CK if s == start else Verb.F_NONE, s) for s in range(start, end + 1)]
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        steps += [ChainStep(Verb.F_ALL, s) for s in range(start, end + 1)]
        steps += [ChainStep(Verb.B, s) for s in range(end, start - 1, -1)]
    return ChainPlan(tuple(steps))
