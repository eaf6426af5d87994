"""One captured, profiled training step: the problem that it poses, and with its plan the function that runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from remat_ir import Answer, Graph, Plan

from .. import _compat
from ..capture.backward import in_halves, with_updates
from ..capture.dataflow import Dataflow, dataflow, tensors
from ..capture.group import groups, groups_like
from ..capture.operations import Operations, operations, returned_gradients, to_graph
from ..compile.alone import capture
from ..compile.calls import noting_end
from ..compile.plans import Traced
from ..errors import CaptureError
from ..lowering.allocator import Bytes
from ..lowering.codegen import boxed_function, checked_function
from ..lowering.lower import Lowered, lower
from ..lowering.peak import kernel_peak
from ..planning.options import LONGEST_NAME
from ..planning.profiles import ProfileTable
from ..planning.quick import Better
from ..profiling.collectives import with_collectives_once
from ..profiling.fixed import here, resident
from ..profiling.optimizers import UpdateMemory
from ..profiling.profile import Profiled, profile_kernels
from ..settings import settings
from .backward import Delivery, Halves, Release
from .job import VIEWED, Job

Around: TypeAlias = Callable[[Callable[[list[Any]], Any], list[Any]], Any]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

BUSY = threading.RLock()
"""Torch captures and compiles one step at a time: it changes its own settings meanwhile."""


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A module's training step for one kind of input.

    Attributes:
        captured: both passes as one graph; without the call's tensors.
        names: of the tensors that it takes, in order.
        parameters: the positions of those that are parameters of the module.
        graph: what is planned; its values stand for the storages `values`.
        profiled: what its kernels cost, and where that is known from.
        fixed: bytes that are there throughout, by what they are.
        release: what takes gradients inside the backward pass, if something does.
        halves: what runs the second halves of backward passes, where these are in halves.
        split: the positions of the module's tensors that are split over ranks (DTensor).
    """

    captured: Traced
    names: tuple[str, ...]
    parameters: frozenset[int]
    operations: Operations
    graph: Graph
    values: tuple[int, ...]
    profiled: Profiled
    fixed: Mapping[str, int]
    release: Release | Delivery | None = None
    halves: Halves | None = None
    split: frozenset[int] = frozenset()

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all gradients that the step returns."""
        return sum(self.operations.sizes[s] for s in returned_gradients(self.operations))

    def update_peak_bytes(self, update: UpdateMemory) -> int:
        """The predicted peak of the optimizer's step after this one, fixed bytes included.

        There are then all gradients, what the module returned, and the step's own temporaries; no activations.
        """
        temporaries = update.temporaries_bytes - update.beside_passes_bytes
        if self.operations.updates and not self.gradient_bytes:
            temporaries = 0  # every parameter has been updated by then
        left = self.graph.fixed_bytes + sum(self.operations.sizes[s] for s in self.operations.keep)
        there = self.fixed.get("gradients", 0) + self.fixed.get(VIEWED, 0)
        added = min(there, self.gradient_bytes)  # to gradients that stay or to their buckets, and gone
        return left - added + temporaries

    def compile(self, plan: Plan, now: bool = False) -> StepFunction:
        """The step by a plan, which must have passed the verifier on `graph`.

        It is compiled in its first call, in that call's thread: AOTAutograd decides by the thread's state how the step
        runs, such as whether autocast is off meanwhile, and the capture's guards have seen that call's state alone.

        Args:
            now: it is compiled now: this thread is in the state of the capture.
        """
        function = self.captured.carried_out(self.operations, plan, partial(self._function, plan))
        if now:
            function.compile()
        return function

    def _function(self, plan: Plan) -> StepFunction:
        made: list[Lowered] = []
        release = self.release if self.operations.updates else None

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[Any, Any]:
            made.append(lower(self.operations, plan, None if release is None else release.update))
            return made[0].forward, made[0].backward

        flow = self.operations.flow
        updated = {n: flow.primals.index(p) for n, p in enumerate(flow.given) if p in self.operations.updates}
        function: StepFunction

        def compiled() -> Callable[..., Any]:
            with _compat.traced_alone(), _compat.only_real_tensors():
                forward = _compat.compile_joint(
                    self.captured.descriptor, partition, checked_function, function.compile_backward
                )
            function.reread = tuple(n for n, primal in enumerate(flow.given) if primal in made[0].reread)
            late = [n for n, primal in enumerate(flow.given) if primal in made[0].read_late]
            function.unseen = tuple(n for n in late if n in self.split)
            return forward

        function = StepFunction(compiled, self.names, release, updated, self.halves, self.operations)
        return function


@dataclass(eq=False, repr=False)
class StepFunction:
    """A step by a plan: the forward pass when it is called, the backward pass when autograd comes to it.

    Args:
        compiled: makes the forward pass, when it is first called or `compile` is.
        names: of the module's tensors that it takes.
        release, updated: what takes the gradients of those at these positions in the backward pass, which stand at
            these places of its results.
        halves, step: what keeps the second half of a backward pass of this step.

    Attributes:
        reread: the positions of those from which the backward pass computes something again.
        unseen: the positions of those that the backward pass reads and autograd does not watch: it is given the local
            shard, whose version counter a write to the DTensor leaves as it is.
    """

    _compiled: Callable[[], Callable[..., Any]]
    names: Sequence[str]
    _release: Release | Delivery | None
    _updated: Mapping[int, int]
    _halves: Halves | None
    _step: Operations
    reread: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    _forward: Callable[..., Any] | None = None
    _backward: Callable[[list[Any]], Any] | None = None
    _around: Around | None = None

    def __post_init__(self) -> None:
        self._sum: Callable[[torch.Tensor], int] = _checksum if settings().check_writes else lambda _: 0

    def compile(self) -> Callable[..., Any]:
        """The forward pass, compiled now if it has not been."""
        with BUSY:
            if self._forward is None:
                self._forward = self._compiled()
                del self._compiled  # it holds the graphs
        return self._forward

    def compile_backward(self, module: Any, _: Any) -> Callable[[list[Any]], Any]:
        """The backward graph as what AOTAutograd calls."""
        function = boxed_function(module)
        if self._halves is None:
            function = noting_end(function)
        else:
            function = self._halves.first(function, self._step.early, len(self._step.flow.backward_results))

        def backward(args: list[Any]) -> Any:
            around, self._around = self._around, None
            if self._release is not None:
                self._release.begin(list(self._updated))
            results = function(args) if around is None else around(function, args)
            return results if self._release is None else self._release.end(results, self._updated)

        self._backward = _compat.boxed(backward)
        return self._backward

    def __call__(self, inputs: Sequence[Any], around: Around | None = None) -> Any:
        """What the graph returns.

        Args:
            inputs: the tensors and numbers that it takes.
            around: is called in place of the backward function of this call, with that function and its arguments.
        """
        forward = self._forward or self.compile()
        state = [held for held in inputs if isinstance(held, torch.Tensor)]
        if self._release is not None:
            self._release.before_forward([state[n] for n in self._updated])
        if self._halves is not None:
            early = frozenset(self._step.early)
            self._halves.parameters = [None if n in early else held for n, held in enumerate(inputs)]
        output = forward(*inputs)
        if around is None and not self.reread and not self.unseen and self._release is None:
            return output
        assert self._backward is not None
        node = _compat.backward_node(tensors(output), self._backward)
        if node is not None and self._release is not None:
            leaves = {n for n, held in enumerate(state) if held.is_leaf and held.requires_grad}
            kept = [held if n in leaves or n in self._updated else None for n, held in enumerate(state)]
            self._release.after_forward(node, kept)
        if node is not None and (around is not None or self.reread or self.unseen):
            # the storage itself: once it is gone another one may have its number
            read = [(n, state[n], state[n].untyped_storage(), self._sum(state[n])) for n in self.reread]
            versions = [(n, state[n], _compat.version_counter(state[n])) for n in self.unseen]
            node.register_prehook(lambda _: self._begin_backward(around, read, versions))
        return output

    def _begin_backward(
        self,
        around: Around | None,
        read: list[tuple[int, torch.Tensor, torch.UntypedStorage, int]],
        versions: list[tuple[int, torch.Tensor, int]],
    ) -> None:
        """Before the backward pass of a call; what it computes again must be what the forward pass computed.

        Autograd sees writes in place, but no storage that is put in another's place, and no write through `.data`.

        Args:
            read, versions: emptied where no other pass comes: the caller may keep the loss, and with it this hook.
        """
        for n, tensor, storage, total in read:
            if tensor.untyped_storage() is not storage:
                raise CaptureError(
                    f"{self.names[n]} was given another storage between the forward and the backward pass, which "
                    "computes from it again: set p.data after backward()"
                )
            if self._sum(tensor) != total:
                raise CaptureError(
                    f"{self.names[n]} was written to through .data between the forward and the backward pass, which "
                    "computes from it again: write to p.data after backward()"
                )
        for n, tensor, version in versions:
            if _compat.version_counter(tensor) != version:
                raise RuntimeError(
                    f"{self.names[n]}, which the backward pass reads, has been modified by an inplace operation since "
                    "the forward pass: step the optimizer after backward()"
                )
        if not _compat.keeps_graph():
            read.clear()
            versions.clear()
        self._around = around


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits of its numbers, as integers: the same in any order of addition."""
    flat = here(tensor).detach().reshape(-1)
    whole = _INTEGERS.get(flat.element_size(), torch.uint8)
    return int(flat.view(whole).sum(dtype=torch.int64))


def training_step(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    phase: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> TrainingStep:
    """Capture and profile a module's training step, to plan it alone: nothing runs.

    Args:
        phase, how: as for `traced_step`.

    Raises:
        CaptureError: it cannot be captured as one graph.
    """
    phase("capturing")
    traced = capture(module, args, kwargs)
    return traced_step(traced, module, given=(args, kwargs), phase=phase, **how)


def traced_step(
    traced: Traced,
    module: nn.Module,
    *,
    given: Any = None,
    extra: Mapping[str, int] | None = None,
    table: ProfileTable | None = None,
    grouped: bool = True,
    like: TrainingStep | None = None,
    sizes: Sequence[Profiled] = (),
    one_plan: bool = False,
    collectives_again: bool | None = None,
    functional: Collection[str] = (),
    price: Callable[[Sequence[fx.Node]], Profiled] | None = None,
    phase: Callable[[str], None] = lambda _: None,
    release: Release | Delivery | None = None,
    halves: Halves | None = None,
) -> TrainingStep:
    """The step of a graph of Dynamo's, whose inputs are the tensors of a module and others, with its kernels' costs.

    Args:
        given: the tensors of the call; None: the graph's.
        extra: fixed bytes besides those of the module and the inputs, by name.
        grouped: whether cheap kernels are merged into their neighbours.
        like: a step of the same module at another size: where the kernels are the same ones, they are grouped as there,
            so that a plan of one step is a sequence of ops of the other.
        sizes: of other sizes, as for `profile_kernels`.
        one_plan, functional: as for `operations`.
        collectives_again: as for `with_collectives_once`.
        price: gives the costs of the kernels in place of a measurement here.
        phase: called with what is done from now on.
        release: what takes the gradients of its parameters inside the backward pass.
        halves: keeps the second half of each backward pass, that of the parameters' gradients, until it is asked for.

    Raises:
        CaptureError: it cannot be lowered, or its gradients cannot be released.
    """
    own = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    found = list(tensors(tuple(traced.inputs)))
    names = tuple(own.get(id(tensor), f"tensor {n} of the graph") for n, tensor in enumerate(found))
    parameters = frozenset(n for n, tensor in enumerate(found) if id(tensor) in own)
    constants = dict(enumerate(found))
    fixed = {**resident(module, found if given is None else given, constants), **(extra or {})}
    flow = dataflow(traced.joint, traced.forward_outputs)
    same = groups_like(flow, like.operations) if like is not None else None
    ops = operations(flow, same or (groups(flow) if grouped else None), one_plan=one_plan, functional=functional)
    split = frozenset(n for n, tensor in enumerate(found) if here(tensor) is not tensor)
    if release is not None:
        ops = _released(ops, names, {n: found[n] for n in sorted(parameters)}, split, release)
    if halves is not None:
        of_parameters = {primal for n, primal in enumerate(flow.given) if n in parameters}
        ops = in_halves(ops, [n for n, primal in enumerate(flow.primals) if primal not in of_parameters])
    phase("pricing" if price else "profiling")
    real = _real_inputs(flow, found)
    profiled = price(flow.kernels) if price else profile_kernels(flow.kernels, table, sizes, real, functional)
    ops = with_collectives_once(ops, profiled.kernels, collectives_again)
    graph, values = to_graph(ops, profiled.kernels, sum(fixed.values()))
    traced, ops, profiled = traced.priced(ops, profiled)
    return TrainingStep(traced, names, parameters, ops, graph, values, profiled, fixed, release, halves, split)


def _released(
    ops: Operations,
    names: Sequence[str],
    parameters: Mapping[int, torch.Tensor],
    split: Collection[int],
    release: Release | Delivery,
) -> Operations:
    """The operations with the updates that take the gradients of parameters inside the backward pass.

    Raises:
        CaptureError: a parameter is split over ranks and steps by itself.
    """
    split = parameters.keys() & split
    if split and not release.together:
        name = names[min(split)]
        raise CaptureError(f"release_gradients=True, and {name} is split over ranks (DTensor): leave it out")
    given = ops.flow.given
    named = [(given[n], tensor) for n, tensor in parameters.items() if n < len(given)]
    sizes_of = {p: size for p, t in named if (size := release.workspace(t)) is not None}
    if not release.together or (not split and len(sizes_of) == sum(t.requires_grad for _, t in named)):
        return with_updates(ops, sizes_of, release.together)
    return ops


def _real_inputs(flow: Dataflow, found: Sequence[torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """The tensors of the call by the inputs of the graph that they are, if they are real and all are seen to fit."""
    inputs, found = flow.given, [here(t) for t in found]
    fits = len(inputs) == len(found) and all(p.meta["val"].shape == t.shape for p, t in zip(inputs, found, strict=True))
    fake = any(isinstance(t, _compat.FakeTensor) or t.device.type == "meta" for t in found)
    return dict(zip(inputs, (t.detach() for t in found), strict=True)) if fits and not fake else {}


def running_peak(step: TrainingStep, plan: Plan) -> int:
    """The peak of a plan kernel by kernel, in bytes, fixed ones included: what the lowered step really reaches.

    A group of kernels is one op to the verifier, who holds all its inputs until it ends; the running step drops each
    after its last use.
    """
    return step.graph.fixed_bytes + kernel_peak(step.operations, plan, step.profiled.kernels)


def name_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The class of a module and the shape of the first tensor of its call.

    Example:
        >>> import torch
        >>> name_of(nn.Linear(8, 2), (torch.ones(4, 8),), {})
        'Linear 4×8'
    """
    first = next(tensors((tuple(args), kwargs)), None)
    shape = () if first is None else first.shape
    return " ".join(filter(None, (type(module).__name__, "×".join(map(str, shape)))))[:LONGEST_NAME]


@dataclass(frozen=True, eq=False)
class Planned:
    """One kind of training step that has its plan.

    Attributes:
        step: what was captured and profiled.
        answer: the planner's answer, verified on `step.graph`.
        run: the step by the plan: see `StepFunction`.
        predicted_bytes: the peak of the running step as lowered, fixed bytes included; at most the plan's peak.
        memory: the peaks of training by the plan on its accelerator, with all that this process has there, as a model
            of the allocator predicts them; None on the CPU, and for a unit of a model.
        better: the plan that is still being looked for, where training started on a quick one.
        job: what is there next to the step, and steps the parameters.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> planned = remat.plans_of(remat.optimize(model, x, budget="100%", planner="greedy")).plans[0]
        >>> planned.answer.overhead, planned.predicted_bytes <= planned.answer.budget_bytes
        (0.0, True)
    """

    step: TrainingStep = field(repr=False)
    answer: Answer
    run: Callable[..., Any] = field(repr=False)
    predicted_bytes: int
    memory: Bytes | None = None
    better: Better[Planned] | None = field(default=None, repr=False)
    job: Job = field(default_factory=Job, repr=False)

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.step.graph.fixed_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients that the step returns."""
        return self.step.gradient_bytes

    @property
    def update_peak_bytes(self) -> int:
        """The predicted peak of the optimizer's step after it: see `TrainingStep.update_peak_bytes`."""
        return self.step.update_peak_bytes(self.job.update())
