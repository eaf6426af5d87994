"""Plans as policies of torch's selective checkpoints: of one module, or of a model's blocks within one budget.

For jobs that cannot have their modules captured to run: which blocks are checkpointed, and what each saves inside.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    InvalidPlan,
    Plan,
    Problem,
    plain_peak,
    plain_plan,
    readable,
    tags_of,
    verify,
)

from .._compat import OpOverload, module_path, storage_key, written_arguments
from ..capture.call import check_module, example_call
from ..capture.dataflow import device_of, is_random, tensors
from ..capture.operations import check_functional, operations, to_graph
from ..distributed import planner_of
from ..errors import CaptureError, NothingFound
from ..planning.budget import Budget, Fraction, UnitBytes, bounded, budget_bytes, bytes_of, read_budget
from ..planning.checkpoints import checkpointed_plan, numbered_blocks
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
    return _contexts(step, answer, answer.plan)


def _held_problem(step: TrainingStep, share: Budget) -> Problem:
    """The step with no budget but for what is held between the passes."""
    graph, peak = step.graph, plain_peak(step.graph) - step.graph.fixed_bytes
    if isinstance(share, Fraction):
        most = int(share.fraction * _bytes(step, resident_at_boundary(graph, plain_plan(graph))))
    else:
        most = bytes_of(share)
    return Problem(bounded(graph, UnitBytes(peak, min(most, peak))), graph.fixed_bytes + peak)


def _contexts(step: TrainingStep, answer: Answer, plan: Plan) -> CheckpointContexts:
    flow = step.operations.flow
    values = resident_at_boundary(step.graph, plan)
    resident = {step.values[value] for value in values}
    calls = [node for node in flow.joint.graph.nodes if isinstance(node.target, OpOverload)]
    saved = frozenset(n for n in calls if resident & set(flow.makes.get(n, ())) and not is_random(n))
    again = frozenset(flow.kernels[: flow.forward_kernels]) & set(calls) - saved
    again_ns, total = sum(step.profiled.kernels[node].cost_ns for node in again), step.graph.total_cost_ns
    return CheckpointContexts(answer, _rows(calls, saved), _bytes(step, values), again_ns / total if total else 0.0)


def _rows(calls: Iterable[fx.Node], saved: Set[fx.Node]) -> dict[Any, tuple[tuple[bool, tuple[torch.Size, ...]], ...]]:
    """For each operator, in the order of its calls, whether its result is saved, and its sizes."""
    rows: dict[Any, list[tuple[bool, tuple[torch.Size, ...]]]] = defaultdict(list)
    for node in calls:
        rows[node.target].append((node in saved, sizes_of(node.meta.get("val"))))
    return {target: tuple(found) for target, found in rows.items()}


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
        for path in self.contexts:
            self.model.get_submodule(path).__dict__.pop("forward", None)


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
        >>> model = nn.Sequential(*layers)
        >>> policy = checkpoint_policy(model, torch.ones(256, 16), budget="80%", planner="greedy")
        >>> model(torch.ones(256, 16)).sum().backward()
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
    size = budget_bytes(budget, step.graph, asking.slack)
    answers = []
    for share in _SHARES:
        answer = asked.plan(Problem(step.graph, int(share * size)), replace(asking, method=METHOD))
        answers.append(answer)
        if isinstance(answer.plan, Plan):
            space.learn(answer.plan)
    run, less = forward_backward(model, args, kwargs), 0
    for _ in range(_TRIES):
        made = _installed(model, space, size - less, answers[0])
        with undisturbed(model):
            measured = made.fixed_bytes + peak_memory(run, device_of(step.operations.flow)).peak_bytes
        made = replace(made, measured_bytes=measured)
        if measured <= size:
            log.info("%s", made)
            return made
        made.remove()
        less += max(measured - size, size // 100)
    raise NothingFound(f"the checkpoints need {readable(measured, up=True)} in a real step", answers[0])


def _installed(model: nn.Module, space: _Space, size: int, answer: Answer) -> BlockPolicy:
    """The cheapest choice within a size, in the model's blocks.

    Raises:
        NothingFound: there is none.
    """
    found = space.best(size)
    if found is None:
        least = min(peak for _, peak in map(space.evaluate, space.starts()))
        raise NothingFound(
            f"no checkpoints of {len(space.blocks)} blocks fit {readable(size)}; {readable(least, up=True)} is enough",
            answer,
        )
    contexts = space.contexts(found, answer)
    for path, each in contexts.items():
        block = model.get_submodule(path)
        more: dict[str, Any] = {} if each is None else {"context_fn": each}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    fixed = space.graph.fixed_bytes
    return BlockPolicy(model, contexts, space.plan(found), *space.evaluate(found), fixed, fixed, answer)


Choice = tuple[frozenset[int], ...]
"""For each block, its ops that are saved, by their places in it."""


class _Space:
    """The choices of what each block saves, evaluated kernel by kernel."""

    def __init__(
        self, step: TrainingStep, model: nn.Module, blocks: Iterable[nn.Module] | None, functional: Sequence[str]
    ) -> None:
        self._step, flow = step, step.operations.flow
        self._fine = operations(flow, functional=functional)
        self.graph, _ = to_graph(self._fine, step.profiled.kernels, step.graph.fixed_bytes)
        known = numbered_blocks(self.graph) if blocks is None else _given(self.graph, model, blocks)
        self._drawn = frozenset(i for i, op in enumerate(self._fine.ops) if op.nodes and is_random(op.nodes[0]))
        again = self.graph.once
        self.blocks = {
            path: ops for path, ops in known.items() if not any(op in again and op not in self._drawn for op in ops)
        }
        if not self.blocks:
            raise InvalidData("every block updates buffers, such as those of batch normalization, or is empty")
        self._choices: list[set[frozenset[int]]] = [{frozenset(), self._all(ops)} for ops in self.blocks.values()]

    def _all(self, ops: Sequence[int]) -> frozenset[int]:
        return frozenset(i for i, op in enumerate(ops) if op not in self._drawn)

    def learn(self, plan: Plan) -> None:
        """Enter what a plan saves of each block as a choice for every block of that form."""
        tagged = tags_of(self._step.graph, plan)
        nodes = {n for op in tagged for n in self._step.operations.ops[op].nodes}
        forms: dict[tuple[str, ...], set[frozenset[int]]] = defaultdict(set)
        for ops in self.blocks.values():
            kept = frozenset(i for i in self._all(ops) if self._fine.ops[ops[i]].nodes[0] not in nodes)
            forms[self._form(ops)].add(kept)
        for choices, ops in zip(self._choices, self.blocks.values(), strict=True):
            choices |= forms[self._form(ops)]

    def _form(self, ops: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(self._fine.ops[op].nodes[0].target) for op in ops if self._fine.ops[op].nodes)

    def plan(self, choice: Choice) -> Plan:
        """The step as checkpoints run it."""
        whole = [self._all(ops) for ops in self.blocks.values()]
        chunks = [ops for ops, kept, most in zip(self.blocks.values(), choice, whole, strict=True) if kept != most]
        saved = [ops[i] for ops, kept in zip(self.blocks.values(), choice, strict=True) for i in kept]
        return checkpointed_plan(self.graph, chunks, frozenset(saved))

    def evaluate(self, choice: Choice) -> tuple[int, int]:
        """The cost in ns and the peak in bytes; both beyond any budget where an op must not run again."""
        try:
            return verify(Problem(self.graph, 2**52), self.plan(choice))
        except InvalidPlan:
            return 2**52, 2**52

    def starts(self) -> Iterator[Choice]:
        """Nothing saved in the first so many blocks, all of it in the others."""
        whole = [self._all(ops) for ops in self.blocks.values()]
        for count in range(len(whole) + 1):
            yield tuple(frozenset() if i < count else kept for i, kept in enumerate(whole))

    def best(self, size: int) -> Choice | None:
        """The cheapest choice found within a size: from the best start, block by block, until no block gains."""
        end = time.monotonic() + _SEARCH_S
        fitting = [(cost, start) for start in self.starts() for cost, peak in [self.evaluate(start)] if peak <= size]
        if not fitting:
            return None
        cost, best = min(fitting, key=lambda pair: pair[0])
        gains = True
        while gains and time.monotonic() < end:
            gains = False
            for i, choices in enumerate(self._choices):
                for kept in sorted(choices, key=sorted):
                    other = (*best[:i], kept, *best[i + 1 :])
                    found, peak = self.evaluate(other)
                    if peak <= size and found < cost:
                        cost, best, gains = found, other, True
        return best

    def contexts(self, choice: Choice, answer: Answer) -> dict[str, CheckpointContexts | None]:
        """By the path of each block that is checkpointed, its contexts, or None where nothing is saved inside."""
        found: dict[str, CheckpointContexts | None] = {}
        for (path, ops), kept in zip(self.blocks.items(), choice, strict=True):
            if kept == self._all(ops):
                continue
            nodes = frozenset(n for i in kept for n in self._fine.ops[ops[i]].nodes)
            within = [
                node
                for node in self._step.operations.flow.joint.graph.nodes
                if isinstance(node.target, OpOverload) and _inside(module_path(node), path)
            ]
            again = sum(self.graph.op_cost_ns[op] for i, op in enumerate(ops) if i not in kept)
            held = sum(self.graph.value_bytes[v] for i in kept for v in self.graph.op_values[ops[i]])
            total = self.graph.total_cost_ns
            share = again / total if total else 0.0
            found[path] = CheckpointContexts(answer, _rows(within, nodes), held, share) if kept else None
        return found


def _inside(place: str, path: str) -> bool:
    return place == path or place.startswith(path + ".")


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
