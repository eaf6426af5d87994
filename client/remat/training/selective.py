"""A plan as the policy of torch's selective checkpoints, for jobs that cannot have their modules captured to run."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat_ir import Answer, Plan, Problem, plain_peak, plain_plan, verify

from .._compat import OpOverload, storage_key, written_arguments
from ..capture.call import check_module, example_call
from ..capture.dataflow import is_random, tensors
from ..capture.operations import check_functional
from ..distributed.ranks import planner_of
from ..errors import CaptureError
from ..planning.budget import Budget, Fraction, UnitBytes, bounded, bytes_of, read_budget
from ..planning.options import PlanFields, SolveOptions, solve_options
from ..planning.planner import Planner, plan_or_raise
from .report import resident_at_boundary
from .step import TrainingStep, training_step

log = logging.getLogger("remat")

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class ContextFields(PlanFields, total=False):
    """The fields of `SolveOptions` that concern a checkpoint: nothing moves to the host."""

    functional_ops: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointContexts:
    """What `context_fn` of `torch.utils.checkpoint.checkpoint` may be: contexts that save what a plan holds.

    Attributes:
        answer: the planner's, on the captured step of the module.
        saved: operator → for each of its calls in the forward pass, whether its result is saved, and the sizes of that.
        held_bytes: saved from the forward to the backward pass, the module's results included.
        overhead: the time of everything that runs again over that of the step: all that is not saved.
    """

    answer: Answer
    saved: Mapping[Any, tuple[tuple[bool, tuple[torch.Size, ...]], ...]]
    held_bytes: int
    overhead: float

    def __call__(self) -> tuple[Any, Any]:
        """The contexts of one call: of its forward pass, and of its recomputation."""
        calls: Counter[Any] = Counter()
        kept: set[int] = set()
        told: list[str] = []

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            for written in tensors(written_arguments(operator, args, kwargs)):
                if storage_key(written) in kept:
                    raise CaptureError(
                        f"{operator} writes in place to a value that the checkpoint saves: write the module without "
                        "in-place operators, such as inplace=False"
                    )
            rows, place = self.saved.get(operator, ()), calls[operator]
            calls[operator] += 1
            if place >= len(rows):
                return AGAIN
            save, sizes = rows[place]
            if sizes != sizes_of(context.op_output):
                if not told:
                    told.append(str(operator))
                    log.warning(
                        "%s gives other sizes than when the checkpoint was planned, so that all such results are "
                        "computed again: make remat.checkpoint_contexts for each size of the input",
                        operator,
                    )
                return AGAIN
            if save:
                kept.update(storage_key(tensor) for tensor in tensors(context.op_output))
            return SAVE if save else AGAIN

        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return contexts


def checkpoint_contexts(
    module: nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    held: int | str | Fraction,
    planner: Planner | str | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[ContextFields],
) -> CheckpointContexts:
    """A plan of a module as `context_fn` of `torch.utils.checkpoint.checkpoint(module, …, use_reentrant=False)`.

    What is lost against `remat.optimize`: torch runs everything again that is not saved, once, when the backward pass
    comes to the module, needed or not, and all of it is there then; so what is held between the passes is bounded and
    the peak is not, and a plan that frees and computes again inside a pass is followed at their boundary alone. Random
    operators always run again, from the state that the checkpoint restores. Results of other sizes than here are not
    saved, and a warning is logged.

    Args:
        example_args, example_kwargs: one call of the module, as for `remat.optimize`.
        held: the most bytes that the module may hold from its forward to its backward pass, its results included; or a
            share of what it holds without a plan ("50%").
        planner: as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> x = torch.ones(4, 8, requires_grad=True)
        >>> contexts = checkpoint_contexts(block, x, held="60%", planner="greedy")
        >>> checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()

    Raises:
        InvalidData: not a size, a share, a planner or an option.
        CaptureError: the module cannot be captured as one graph, or updates buffers; in a call, an operator writes in
            place to what is saved.
        BudgetTooSmall, NothingFound: no plan holds so little.
    """
    check_module(module)
    asking = solve_options(checkpoint_contexts, ContextFields, options, fields)
    check_functional(asking.functional_ops)
    share = read_budget(held)
    asked = planner_of(planner, asking)
    args, kwargs = example_call(example_args, example_kwargs)
    step = training_step(module, args, kwargs, table=asked.profiles, functional=asking.functional_ops)
    if step.operations.flow.mutated:
        names = ", ".join(sorted(str(node.target) for node in step.operations.flow.mutated))
        raise CaptureError(
            f"{type(module).__name__} updates buffers ({names}), and a checkpoint would update them again in the "
            "backward pass: use remat.optimize, or leave batch normalization out of the checkpoint"
        )
    problem = _held_problem(step, share)
    answer = plan_or_raise(asked.plan(problem, asking), step.graph)
    assert isinstance(answer.plan, Plan)
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return _contexts(step, answer, answer.plan)


def _held_problem(step: TrainingStep, share: Budget) -> Problem:
    """The step with no budget but for what is held between the passes."""
    graph, peak = step.graph, plain_peak(step.graph) - step.graph.fixed_bytes
    if isinstance(share, Fraction):
        most = int(share.fraction * _bytes(step, resident_at_boundary(graph, plain_plan(graph))))
    else:
        most = bytes_of(share)  # type: ignore[arg-type]
    return Problem(bounded(graph, UnitBytes(peak, min(most, peak))), graph.fixed_bytes + peak)


def _contexts(step: TrainingStep, answer: Answer, plan: Plan) -> CheckpointContexts:
    flow = step.operations.flow
    values = resident_at_boundary(step.graph, plan)
    resident = {step.values[value] for value in values}
    rows: dict[Any, list[tuple[bool, tuple[torch.Size, ...]]]] = defaultdict(list)
    again_ns, forward = 0, frozenset(flow.kernels[: flow.forward_kernels])
    for node in flow.joint.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        save = bool(resident & set(flow.makes.get(node, ()))) and not is_random(node)
        rows[node.target].append((save, sizes_of(node.meta.get("val"))))
        if node in forward and not save:
            again_ns += step.profiled.kernels[node].cost_ns
    total = step.graph.total_cost_ns
    saved = {target: tuple(found) for target, found in rows.items()}
    return CheckpointContexts(answer, saved, _bytes(step, values), again_ns / total if total else 0.0)


def sizes_of(value: Any) -> tuple[torch.Size, ...]:
    """The sizes of all tensors in a value, in order."""
    return tuple(tensor.shape for tensor in tensors(value))


def _bytes(step: TrainingStep, values: frozenset[int]) -> int:
    return sum(step.graph.value_bytes[value] for value in values)
