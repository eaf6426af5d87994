"""What the stages of branches that meet in a head cost: measured stage by stage, as one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from remat_ir import Graph

from ..device import storage_bytes
from ..planning.coordinator import Coordinator
from .saved_state import saved_state_bytes
from .shared import shared_parameters
from .stage_profile import StageCost, stage_cost
from .stages import Stage


class ProfiledJoin(NamedTuple):
    """Branches that meet in a head, measured.

    Attributes:
        stages: those of the first branch, of the second, …, and the head; cuts 0 … k − 1 are the inputs, and stage n
            makes cut k + n.
        costs: what each costs.
        lengths: how many stages each branch has.
        input_bytes: of each input.
        beside_bytes: [stages] what is charged next to each stage: see `chain_of`.
    """

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    lengths: tuple[int, ...]
    input_bytes: tuple[int, ...]
    beside_bytes: tuple[int, ...]

    def graph(self, backward: Sequence[int]) -> Graph:
        """The training step as a graph, its backward steps by branch in the order of `backward`.

        As in a chain's lift: op n is stage n's forward step, with value 3n, what it gives, value 3n + 1, the part of
        its tape that makes up for the workspace of a run without one, and the optional value 3n + 2, the rest of its
        tape; then the `once` op of the incoming gradient; then the backward steps, the head's first, each making a
        gradient for each cut that its stage reads. Gradients of inputs are kept to the end.
        """
        count, branches = len(self.stages), len(self.lengths)
        order = backward_stages(self.lengths, backward)
        inputs: list[tuple[int, ...]] = [
            tuple(3 * (cut - branches) for cut in stage.reads if cut >= branches) for stage in self.stages
        ]
        value_op = [v // 3 for v in range(3 * count)] + [count]
        sizes: list[int] = []
        for c in self.costs:
            rest = c.tape_bytes - c.activation_bytes
            # no more than there is: ranks that differ in sizes are found out later
            part = min(rest, c.untaped_workspace_bytes - c.forward_workspace_bytes)
            sizes += (c.activation_bytes, part, rest - part)
        sizes.append(self.costs[-1].activation_bytes)
        gradient = {branches + count - 1: 3 * count}
        inputs.append(())
        keep: list[int] = []
        for position, n in enumerate(order):
            stage = self.stages[n]
            reads = (*inputs[n], *range(3 * n, 3 * n + 3), gradient[stage.makes])
            inputs.append(tuple(sorted(reads)))
            for cut, size in zip(stage.reads, self.costs[n].gradient_bytes, strict=True):
                gradient[cut] = len(value_op)
                keep.extend([len(value_op)] if cut < branches else [])
                value_op.append(count + 1 + position)
                sizes.append(size)
        return Graph(
            op_cost_ns=(*(c.forward_ns for c in self.costs), 0, *(self.costs[n].backward_ns for n in order)),
            op_workspace_bytes=(
                *(c.forward_workspace_bytes + b for c, b in zip(self.costs, self.beside_bytes, strict=True)),
                0,
                *(self.costs[n].backward_workspace_bytes + self.beside_bytes[n] for n in order),
            ),
            op_inputs=tuple(inputs),
            value_op=tuple(value_op),
            value_bytes=tuple(sizes),
            optional=tuple(range(2, 3 * count, 3)),
            once=tuple(range(count, 2 * count + 1)),
            keep=tuple(keep),
            backward_from=count,
            fixed_bytes=sum(self.input_bytes),
        )


def backward_stages(lengths: Sequence[int], backward: Sequence[int]) -> list[int]:
    """The stages in the order of their backward steps: the head, then the last one left of each branch named."""
    ends = [sum(lengths[: j + 1]) for j in range(len(lengths))]
    order = [sum(lengths)]
    for j in backward:
        ends[j] -= 1
        order.append(ends[j])
    return order


def join_of(branches: Sequence[Sequence[nn.Module]], head: nn.Module, inputs: Sequence[torch.Tensor]) -> ProfiledJoin:
    """Measure the stages of branches and the head that they meet in; each runs on a copy of its module.

    Needs the memory of the largest stage and of all activations between stages. Neither parameters, buffers, gradients
    nor torch's generators change; of Python's and numpy's see `chain_of`.

    Raises:
        CaptureError: a stage that the executor cannot run.
    """
    width = len(branches)
    stages: list[Stage] = []
    costs: list[StageCost] = []
    modules = [*(module for branch in branches for module in branch), head]
    shared = shared_parameters(modules)
    values = dict(enumerate(inputs))
    ends: list[int] = []

    def measure(module: nn.Module, reads: tuple[int, ...], name: str, last: bool) -> None:
        n = len(stages)
        given = [values[cut] for cut in reads]
        needs = [cut >= width or inputs[cut].requires_grad for cut in reads]
        cost, values[width + n] = stage_cost(module, name, given, needs, shared.of(n), last=last)
        costs.append(cost)
        stages.append(Stage(module, reads, width + n, costs[-1].needs_grad))

    for j, branch in enumerate(branches):
        cut = j
        for i, module in enumerate(branch):
            measure(module, (cut,), f"branch {j + 1}, stage {i + 1}", False)
            cut = stages[-1].makes
        ends.append(cut)
    measure(head, tuple(ends), "the head", True)
    noted = [saved_state_bytes(stage.module, inputs[0].device) for stage in stages]
    # parts of a shared gradient may come in any order, so each of its users may have left one
    waiting = sum(p.numel() * p.element_size() * len(users) for p, users in shared.users.items())
    # a stage that runs again works on copies of what was noted
    beside = [sum(noted) + own + waiting + costs[-1].activation_bytes for own in noted]
    beside[-1] = sum(noted) + noted[-1]
    return ProfiledJoin(
        tuple(stages),
        tuple(costs),
        tuple(map(len, branches)),
        tuple(storage_bytes(x) for x in inputs),
        tuple(beside),
    )


_MEASURED = (
    "forward_ns",
    "backward_ns",
    "forward_workspace_bytes",
    "untaped_workspace_bytes",
    "backward_workspace_bytes",
    "needs_grad",
)


def agreed_join(measured: ProfiledJoin, coordinator: Coordinator) -> ProfiledJoin:
    """Branches with the times and workspaces that all ranks go by; their sizes stay this rank's own."""
    heard = coordinator.costs({name: [int(getattr(cost, name)) for cost in measured.costs] for name in _MEASURED})
    costs = [
        cost._replace(**{name: type(getattr(cost, name))(heard[name][n]) for name in _MEASURED})
        for n, cost in enumerate(measured.costs)
    ]
    stages = [replace(stage, needs_grad=cost.needs_grad) for stage, cost in zip(measured.stages, costs, strict=True)]
    return measured._replace(stages=tuple(stages), costs=tuple(costs))
