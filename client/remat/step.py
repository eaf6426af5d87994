"""One captured, profiled training step: the problem that it poses, and the function that a plan of it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from remat_ir import Graph, Plan

from . import _compat
from .capture import Capture, capture
from .codegen import boxed_function
from .dataflow import dataflow
from .group import groups, groups_like
from .lower import Lowered, lower
from .operations import Operations, operations, to_graph
from .peak import kernel_peak
from .profile import Profiled, Table, profile_kernels

Around: TypeAlias = Callable[[Callable[[list[Any]], Any], list[Any]], Any]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A module's training step for one kind of input.

    Attributes:
        graph: what is planned; its values stand for the storages `values`.
        profiled: what its kernels cost, and where that is known from.
        fixed: bytes that are there throughout, by what they are.
    """

    captured: Capture
    operations: Operations
    graph: Graph
    values: tuple[int, ...]
    profiled: Profiled
    fixed: dict[str, int] = field(default_factory=dict)

    def compile(self, plan: Plan, around: list[Around] | None = None) -> Callable[..., Any]:
        """The step by a plan, as a function of (parameters, buffers, arguments).

        The plan must have passed the judge on `graph`. What is put into `around` is called once in place of the next
        backward function, with that function and its arguments.
        """
        made: list[Lowered] = []

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[Any, Any]:
            made.append(lower(self.operations, plan))
            return made[0].forward, made[0].backward

        def backward(module: Any, _: Any) -> Callable[[list[Any]], Any]:
            function = boxed_function(module)
            if around is None:
                return function
            return _compat.boxed(lambda args: around.pop()(function, args) if around else function(args))

        return _compat.compile_joint(
            self.captured.descriptor, partition, lambda module, _: boxed_function(module), backward
        )


def training_step(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    table: Table | None = None,
    extra_fixed_bytes: int = 0,
    grouped: bool = True,
    like: TrainingStep | None = None,
) -> TrainingStep:
    """Capture and profile a module's training step; `grouped` merges cheap kernels into their neighbours.

    Args:
        like: a step of the same module at another size: where the kernels are the same ones, they are grouped as there,
            so that a plan of one step is a sequence of ops of the other.

    Raises:
        CaptureError: it cannot be captured as one graph.
    """
    captured = capture(module, args, kwargs)
    flow = dataflow(captured.joint, captured.forward_outputs)
    same = groups_like(flow, like.operations) if like is not None else None
    ops = operations(flow, same or (groups(flow) if grouped else None))
    profiled = profile_kernels(flow.kernels, table)
    fixed = resident(module, (args, kwargs), captured.constants)
    graph, values = to_graph(ops, profiled.kernels, sum(fixed.values()) + extra_fixed_bytes)
    return TrainingStep(captured, ops, graph, values, profiled, fixed)


def running_peak(step: TrainingStep, plan: Plan) -> int:
    """The peak of a plan kernel by kernel, in bytes, fixed ones included: what the lowered step really reaches.

    A group of kernels is one op to the judge, who holds all its inputs until it ends; the running step drops each
    after its last use.
    """
    return step.graph.fixed_bytes + kernel_peak(step.operations, plan, step.profiled.kernels)


def resident(module: nn.Module, inputs: Any, constants: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of parameters, buffers, inputs and constants on the device of the parameters, each storage once."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, group in (
        ("parameters", module.parameters()),
        ("buffers", module.buffers()),
        ("inputs", leaves(inputs)),
        ("constants", constants.values()),
    ):
        found[name] = 0
        for tensor in group:
            if tensor.device.type == device.type and _compat.storage_key(tensor) not in seen:
                seen.add(_compat.storage_key(tensor))
                size = int(tensor.untyped_storage().nbytes())
                found[name] += -(-size // 512) * 512 if device.type == "cuda" else size
    return found


def leaves(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors inside nested tuples, lists and mappings."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from leaves(value)
    elif isinstance(thing, (tuple, list)):
        for value in thing:
            yield from leaves(value)


def existing_gradients(module: nn.Module) -> int:
    """Bytes of gradients that are there before the step."""
    found: dict[int, int] = {}
    for parameter in module.parameters():
        if parameter.is_leaf and isinstance(parameter.grad, torch.Tensor):
            storage = parameter.grad.untyped_storage()
            found[_compat.storage_key(parameter.grad)] = int(storage.nbytes())
    return sum(found.values())
