"""Stages one after the other, trained inside a budget: profile the chain, ask, verify, execute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, Graph, InvalidData, InvalidPlan, Problem, budget_at, verify
from remat_ir.chain_plan import ChainStep, Verb

from ..errors import CaptureError
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, bytes_of
from ..planning.planner import Planner, plan_or_raise, planner_for
from ..profiling.fixed import existing_gradients
from .chained import ChainedModule
from .profile import chain_of
from .transfer import bandwidth


def optimize_chain(
    stages: nn.Sequential | Sequence[nn.Module],
    x: torch.Tensor,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    max_gap: float = 0.001,
    optimizer_bytes: int = 0,
    offload: bool = False,
    host_bytes: int | None = None,
) -> ChainedModule:
    """Make a module that runs stages one after the other and trains inside a memory budget.

    Nothing is captured: each stage is run and measured as it is, so any Python inside a stage will do. The budget is
    that of `remat.optimize`; bytes of the device count parameters, buffers and the gradients of all parameters as
    fixed, and so does the prediction.

    Args:
        offload: whether values may move to the host and back; the link's bandwidth is measured.
        host_bytes: what the host may hold at most, or None without a limit.

    Raises:
        CaptureError: a stage gives something other than one tensor, or overwrites its input.
        BudgetTooSmall, NothingFound: there is no plan; the message says what would do.
        InvalidData: not a budget, or not a planner.
    """
    modules = list(stages)
    if not modules:
        raise CaptureError("there is no stage to train")
    link = bandwidth(x.device) if offload else None
    asked = planner_for(planner)
    chain, graded = chain_of(modules, x, link_bytes_per_s=link, host_bytes=host_bytes if offload else None)
    among_ranks = getattr(asked, "agreed_chain", None)
    if among_ranks is not None:
        chain, graded = among_ranks(chain, graded)
    problem = Problem(chain, activation_budget(budget, chain, modules, optimizer_bytes))
    answer = plan_or_raise(asked.plan(problem, method=method, time_limit_s=time_limit_s, max_gap=max_gap))
    return carry_out_chain(modules, problem, answer, graded)


def carry_out_chain(
    modules: Sequence[nn.Module], problem: Problem, answer: Answer, graded: frozenset[int] = frozenset()
) -> ChainedModule:
    """Stages with an answer's plan, verified.

    Raises:
        InvalidPlan: the plan is not one of this chain, or not what the answer claims.
    """
    if not isinstance(answer.plan, ChainPlan) or not isinstance(problem.subject, Chain):
        raise InvalidPlan(f"a list of stages needs a plan of its chain, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return ChainedModule(modules, problem.subject, answer.plan, answer, graded)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[nn.Module],
    segments: int | None,
    input: torch.Tensor,
    *,
    budget: Budget | None = None,
    planner: Planner | str | None = None,
    **asking: Any,
) -> torch.Tensor:
    """`torch.utils.checkpoint.checkpoint_sequential` with a budget: for those who change one import.

    The first call for a shape profiles the stages and asks for a plan, later calls run by it. Without a budget
    `segments` says how much memory to use, as there: a plan of that many equal segments.

    Raises:
        ValueError: neither a budget nor segments.
    """
    modules = list(functions)
    key = (*map(id, modules), input.shape, input.dtype, input.device, input.requires_grad, segments, repr(budget))
    made = _made.get(key)
    if made is None:
        if budget is not None:
            made = optimize_chain(modules, input, budget=budget, planner=planner, **asking)
        elif segments is not None:
            made = _segmented(modules, input, segments)
        else:
            raise ValueError("checkpoint_sequential needs a budget or a number of segments")
        while len(_made) >= 64:
            _made.pop(next(iter(_made)))
        _made[key] = made
    result: torch.Tensor = made(input)
    return result


_made: dict[Any, ChainedModule] = {}
"""Planned chains by their modules and input; each holds its modules, so that no id is used twice."""


def _segmented(modules: Sequence[nn.Module], x: torch.Tensor, segments: int) -> ChainedModule:
    chain, graded = chain_of(modules, x)
    plan = segments_plan(chain.stages, segments)
    verify(Problem(chain, 2**53), plan)
    return ChainedModule(modules, chain, plan, graded=graded)


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


def activation_budget(
    budget: Budget, subject: Chain | Graph, modules: Sequence[nn.Module], optimizer_bytes: int = 0
) -> int:
    """A budget in bytes of activations, the input's included; bytes of the device lose what is fixed beside them."""
    if isinstance(budget, Fraction):
        return budget_at(subject, budget.fraction)
    if isinstance(budget, ActivationBytes):
        return subject.fixed_bytes + bytes_of(budget.size)
    if isinstance(budget, UnitBytes):
        raise InvalidData("a chain has one budget for all of its stages: give bytes, not remat.UnitBytes")
    whole = nn.ModuleList(modules)
    fixed = sum(t.numel() * t.element_size() for t in (*whole.parameters(), *whole.buffers()))
    new = sum(p.numel() * p.element_size() for p in whole.parameters() if p.requires_grad)
    return max(0, bytes_of(budget) - fixed - max(new, existing_gradients(whole)) - optimizer_bytes)
