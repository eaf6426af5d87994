"""Plans as policies of torch's selective checkpoints: of one module, or of a model's blocks within one budget.

For jobs that cannot have their modules captured to run: which blocks are checkpointed, and what each saves inside.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from remat_ir import Answer, Graph, InvalidData, Plan, Problem, plain_peak, plain_plan, readable, tags_of, verify

from .._compat import OpOverload, module_path, storage_key, written_arguments
from ..capture.call import check_module, example_call
from ..capture.dataflow import device_of, is_random, tensors
from ..capture.operations import check_functional, operations, to_graph
from ..distributed import planner_of
from ..errors import CaptureError, NothingFound
from ..planning.budget import Budget, Fraction, UnitBytes, bounded, budget_bytes, bytes_of, read_budget
from ..planning.checkpoints import Setting, evaluated, numbered_blocks
from ..planning.options import SolveOptions, solve_options
from ..planning.planner import Planner, plan_or_raise
from ..profiling.measure import forward_backward, peak_memory
from ..training.compared import undisturbed
from ..training.report import resident_at_boundary
from ..training.step import TrainingStep, training_step
from .tag import METHOD, TagFields

log = logging.getLogger("remat")

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


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
        calls = {operator: iter(rows) for operator, rows in self.saved.items()}
        kept: set[int] = set()
        told: list[str] = []

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            for written in tensors(written_arguments(operator, args, kwargs)):
                if storage_key(written) in kept:
                    raise CaptureError(
                        f"{operator} writes in place to a value that the checkpoint saves: write the module without "
                        "in-place operators, such as inplace=False"
                    )
            save, sizes = next(calls.get(operator, iter(())), (False, None))
            if sizes is not None and sizes != sizes_of(context.op_output):
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
    **fields: Unpack[TagFields],
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
    asking = solve_options(checkpoint_contexts, TagFields, options, fields)
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
    flow, values = step.operations.flow, resident_at_boundary(step.graph, answer.plan)
    resident = {step.values[value] for value in values}
    forward = frozenset(flow.kernels[: flow.forward_kernels])
    saved = frozenset(n for n in flow.kernels if resident & set(flow.makes[n]) and not is_random(n))
    again_ns = sum(step.profiled.kernels[n].cost_ns for n in forward - saved if isinstance(n.target, OpOverload))
    return _contexts(step, answer, "", saved, _bytes(step, values), again_ns)


def _held_problem(step: TrainingStep, share: Budget) -> Problem:
    """The step with no budget but for what is held between the passes."""
    graph, peak = step.graph, plain_peak(step.graph) - step.graph.fixed_bytes
    if isinstance(share, Fraction):
        most = int(share.fraction * _bytes(step, resident_at_boundary(graph, plain_plan(graph))))
    else:
        most = bytes_of(share)
    return Problem(bounded(graph, UnitBytes(peak, min(most, peak))), graph.fixed_bytes + peak)


def _contexts(
    step: TrainingStep, answer: Answer, path: str, saved: Set[fx.Node], held_bytes: int, again_ns: int
) -> CheckpointContexts:
    """Contexts of the module at a path, by the nodes that it saves."""
    rows: dict[Any, list[tuple[bool, tuple[torch.Size, ...]]]] = defaultdict(list)
    for node in step.operations.flow.joint.graph.nodes:
        if isinstance(node.target, OpOverload) and _inside(module_path(node), path):
            rows[node.target].append((node in saved, sizes_of(node.meta.get("val"))))
    total = step.graph.total_cost_ns
    each = {operator: tuple(found) for operator, found in rows.items()}
    return CheckpointContexts(answer, each, held_bytes, again_ns / total if total else 0.0)


def sizes_of(value: Any) -> tuple[torch.Size, ...]:
    """The sizes of all tensors in a value, in order."""
    return tuple(tensor.shape for tensor in tensors(value))


def _bytes(step: TrainingStep, values: frozenset[int]) -> int:
    return sum(step.graph.value_bytes[value] for value in values)


_SHARES = (1.0, 0.85, 0.7, 0.5)
"""Budgets, as shares of the one asked for, whose tagged plans say what blocks may save."""
_SEARCH_S = 20.0
"""Seconds in which choices for single blocks are compared."""
_TRIES = 4
"""Steps that are watched before a budget that does not hold is given up."""


@dataclass(frozen=True, eq=False)
class BlockPolicy:
    """Per-block checkpoints of a model, installed.

    Attributes:
        model: whose blocks have another `forward` now.
        contexts: by the path of each checkpointed block: what it saves inside, or None where it saves nothing.
        plan, cost_ns, peak_bytes: of the step as these checkpoints run it, fixed bytes included.
        fixed_bytes: parameters, buffers and inputs.
        measured_bytes: the peak of a real step; Python's frames hold a value or two for longer than the plan says.
        answer: the plan by tags within the same budget, with its bound: what is lost is measured from it.
    """

    model: nn.Module
    contexts: Mapping[str, CheckpointContexts | None]
    plan: Plan
    cost_ns: int
    peak_bytes: int
    fixed_bytes: int
    measured_bytes: int
    answer: Answer

    @property
    def lost(self) -> float | None:
        """What these checkpoints cost over the plan by tags, as a share; None where none was found."""
        return self.cost_ns / self.answer.cost_ns - 1 if self.answer.cost_ns else None

    def __str__(self) -> str:
        more = "no plan by tags was found" if self.lost is None else f"{100 * self.lost:+.2f} % over the plan by tags"
        return (
            f"{len(self.contexts)} blocks checkpointed, peak {readable(self.measured_bytes)}: {more}, since a "
            f"checkpoint runs all of a block that is not saved again at once; {self.answer.message}"
        )

    def remove(self) -> None:
        """Give the blocks the `forward` back that they had."""
        for block in map(self.model.get_submodule, self.contexts):
            installed = vars(block).get("forward")
            if isinstance(installed, partial) and installed.func is checkpoint:
                before = installed.args[0]
                del block.forward
                if getattr(before, "__func__", None) is not type(block).forward:  # the instance's own, as Accelerate's
                    block.forward = before


def checkpoint_policy(
    model: nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any] | Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    blocks: Iterable[nn.Module] | None = None,
    planner: Planner | str | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TagFields],
) -> BlockPolicy:
    """Checkpoint the blocks of a model by `torch.utils.checkpoint`, each with a policy, within one budget for the step.

    For models of Hugging Face's and torchtitan's that run their own step. Plans by tags at several budgets say what
    blocks may save; each block takes what is cheapest for the whole, evaluated on the captured step, and a real step is
    watched. What is lost against a tagged plan is stated: a checkpoint runs all of its block that is not saved again at
    once, and what lies outside of the blocks is saved. Random operators always run again. Blocks that update buffers
    are left as they are.

    Args:
        example_args, example_kwargs: one call of the model that returns its loss, as for `remat.optimize`.
        budget: of the whole step, as for `remat.optimize`.
        blocks: what may be checkpointed; by default the numbered modules that hold the most time.
        planner: as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a plan.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
        >>> model = nn.Sequential(*layers, nn.Flatten(0), nn.Linear(256 * 16, 1))  # the last result is the loss
        >>> policy = checkpoint_policy(model, torch.ones(256, 16), budget="80%", planner="greedy")
        >>> model(torch.ones(256, 16)).backward()
        >>> policy.remove()

    Raises:
        InvalidData: not a budget, a planner or an option; there are no numbered blocks, or a block is no part of it.
        CaptureError: the model cannot be captured as one graph.
        NothingFound: no choice of checkpoints fits; the message says what is enough, or what a real step needs.
    """
    check_module(model)
    asking = solve_options(checkpoint_policy, TagFields, options, fields)
    check_functional(asking.functional_ops)
    asked = planner_of(planner, asking)
    args, kwargs = example_call(example_args, example_kwargs)
    step = training_step(model, args, kwargs, table=asked.profiles, functional=asking.functional_ops)
    space = _Space(step, model, blocks, asking.functional_ops)
    size = budget_bytes(budget, space.graph, asking.slack)
    asking = replace(asking, method=METHOD)
    answers = [asked.plan(Problem(space.graph, int(share * size)), asking) for share in _SHARES]
    for plan in (answer.plan for answer in answers if isinstance(answer.plan, Plan)):
        space.learn(plan)
    run, less = forward_backward(model, args, kwargs), 0
    for _ in range(_TRIES):
        made = space.installed(model, size - less, answers[0])
        try:
            with undisturbed(model):
                measured = made.fixed_bytes + peak_memory(run, device_of(step.operations.flow)).peak_bytes
        except BaseException:
            made.remove()
            raise
        made = replace(made, measured_bytes=measured)
        if measured <= size:
            log.info("%s", made)
            return made
        made.remove()
        less += max(measured - size, size // 100)
    raise NothingFound(f"the checkpoints need {readable(measured, up=True)} in a real step", answers[0])


Choice = tuple[frozenset[int], ...]
"""For each block, its ops that are saved; one of which all are saved is not checkpointed."""


class _Space:
    """The choices of what each block saves, evaluated kernel by kernel."""

    def __init__(
        self, step: TrainingStep, model: nn.Module, blocks: Iterable[nn.Module] | None, functional: Sequence[str]
    ) -> None:
        self._step, self._fine = step, operations(step.operations.flow, functional=functional)
        self.graph, _ = to_graph(self._fine, step.profiled.kernels, step.graph.fixed_bytes)
        known = numbered_blocks(self.graph) if blocks is None else _given(self.graph, model, blocks)
        drawn = {i for i, op in enumerate(self._fine.ops) if op.nodes and is_random(op.nodes[0])}
        once = set(self.graph.once) - drawn
        self.blocks = {path: ops for path, ops in known.items() if not once.intersection(ops)}
        if not self.blocks:
            raise InvalidData("every block updates buffers, such as those of batch normalization, or is empty")
        self._whole = [frozenset(ops) - drawn for ops in self.blocks.values()]
        self._choices = [{frozenset(), whole} for whole in self._whole]

    def learn(self, plan: Plan) -> None:
        """Enter what a plan saves of each block as a choice for every block of that form."""
        again = tags_of(self.graph, plan)
        forms: dict[tuple[str, ...], set[frozenset[int]]] = defaultdict(set)
        for ops in self.blocks.values():
            forms[self._form(ops)].add(frozenset(place for place, op in enumerate(ops) if op not in again))
        for ops, whole, choices in zip(self.blocks.values(), self._whole, self._choices, strict=True):
            choices |= {whole.intersection(ops[place] for place in places) for places in forms[self._form(ops)]}

    def _form(self, ops: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(n.target) for op in ops for n in self._fine.ops[op].nodes)

    def evaluate(self, choice: Choice) -> Setting:
        """What the step comes to as checkpoints run it."""
        parts = zip(self.blocks.values(), choice, self._whole, strict=True)
        chunks = [ops for ops, saved, whole in parts if saved != whole]
        return evaluated(self.graph, "", chunks, frozenset().union(*choice))

    def best(self, size: int, answer: Answer) -> tuple[Setting, Choice]:
        """The cheapest choice found within a size: of all or nothing saved, and from there while a block gains.

        Raises:
            NothingFound: there is none.
        """
        end, count = time.monotonic() + _SEARCH_S, len(self.blocks)
        starts: list[Choice] = [(*[frozenset[int]()] * i, *self._whole[i:]) for i in range(count + 1)]
        known = [(self.evaluate(start), start) for start in starts]
        fitting = [pair for pair in known if pair[0].peak_bytes <= size]
        if not fitting:
            least = readable(min(found.peak_bytes for found, _ in known), up=True)
            raise NothingFound(f"no checkpoints of {count} blocks fit {readable(size)}; {least} is enough", answer)
        cheapest, best = min(fitting, key=lambda pair: pair[0].cost_ns)
        gains = True
        while gains and time.monotonic() < end:
            gains = False
            for i, choices in enumerate(self._choices):
                for saved in sorted(choices, key=sorted):
                    other = (*best[:i], saved, *best[i + 1 :])
                    found = self.evaluate(other)
                    if found.peak_bytes <= size and found.cost_ns < cheapest.cost_ns:
                        cheapest, best, gains = found, other, True
        return cheapest, best

    def installed(self, model: nn.Module, size: int, answer: Answer) -> BlockPolicy:
        """The cheapest choice within a size, in the model's blocks.

        Raises:
            NothingFound: there is none.
        """
        (found, choice), graph = self.best(size, answer), self.graph
        contexts: dict[str, CheckpointContexts | None] = {}
        for (path, ops), saved, whole in zip(self.blocks.items(), choice, self._whole, strict=True):
            if saved != whole:
                nodes = frozenset(n for op in saved for n in self._fine.ops[op].nodes)
                held = sum(graph.value_bytes[v] for op in saved for v in graph.op_values[op])
                again_ns = sum(graph.op_cost_ns[op] for op in ops if op not in saved)
                contexts[path] = _contexts(self._step, answer, path, nodes, held, again_ns) if saved else None
                block, given = model.get_submodule(path), contexts[path] or noop_context_fn
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=given)
        fixed, run = graph.fixed_bytes, (found.plan, found.cost_ns, found.peak_bytes)
        return BlockPolicy(model, contexts, *run, fixed, fixed, answer)


def _inside(place: str, path: str) -> bool:
    return not path or place == path or place.startswith(path + ".")


def _given(graph: Graph, model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, list[int]]:
    """The forward ops of each block that was named."""
    names = {id(module): name for name, module in model.named_modules()}
    assert graph.op_names is not None
    found: dict[str, list[int]] = {}
    for number, block in enumerate(blocks):
        path = names.get(id(block))
        if not path:
            raise InvalidData(f"block {number}, a {type(block).__name__}, is no part of this {type(model).__name__}")
        places = (graph.op_names[op].partition(":")[0] for op in range(graph.backward_from or 0))
        found[path] = [op for op, place in enumerate(places) if _inside(place, path)]
    return found
