"""What stages cost in time and bytes: copies of their modules run forward and backward on the real inputs.

One stage (`stage_cost`), the stages of a chain (`chain_of`), and those of branches that meet in a head (`join_of`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from remat_ir import Chain, Graph

from .. import generators
from .._compat import version_counter
from ..capture.dataflow import tensors
from ..device import Interval, of, storage_bytes
from ..errors import CaptureError
from ..planning.coordinator import Coordinator
from ..profiling.collectives import no_collectives
from ..profiling.measure import Window
from ..profiling.timing import rounded
from .hooks import copied_apart
from .saved_state import SavedState, attributes_of, saved_state_bytes
from .stages import SharedParameters, Stage, differentiable
from .tape import Tape, record

log = logging.getLogger("remat")

REPETITIONS = 3

CACHE_SHARE = 16
"""The part of a device's last cache that something else uses before each step that is timed: between two steps of one
stage many others run, so that what is nearest to a core holds theirs.
"""


class Timing(NamedTuple):
    """How often a stage is timed, and by what clock, in ns."""

    repetitions: int = REPETITIONS
    clock: Callable[[], int] = time.perf_counter_ns


class StageCost(NamedTuple):
    """What a stage costs.

    Attributes:
        forward_ns, backward_ns: times. A forward step's is the mean of the two that a stage has in most plans which run
            it again: the first, which keeps no tape but notes what a later one has to see, and a later one, which sees
            that and keeps a tape. A plan that runs a stage once takes less.
        forward_workspace_bytes, untaped_workspace_bytes, backward_workspace_bytes: bytes that live only while the step
            runs: next to its tape, next to its activation where no tape is kept, and backward. A parameter's new
            gradient counts as workspace of the backward step: it is added to one that exists, which is fixed.
        activation_bytes, tape_bytes: what the stage makes, without and with its tape.
        gradient_bytes: of each input's gradient.
        needs_grad: whether it computes other bits without grad than with it, as LSTM's kernels do.
    """

    forward_ns: int
    backward_ns: int
    forward_workspace_bytes: int
    untaped_workspace_bytes: int
    backward_workspace_bytes: int
    activation_bytes: int
    tape_bytes: int
    gradient_bytes: tuple[int, ...]
    needs_grad: bool


def stage_cost(
    module: nn.Module,
    name: str,
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    shared: Mapping[str, Any],
    *,
    last: bool,
    timing: Timing | None = None,
) -> tuple[StageCost, torch.Tensor]:
    """Measure a stage, and say what it gives; neither parameters, buffers nor gradients of the module change.

    Args:
        name: what a message calls the stage.
        needs: for each input, whether it has a gradient.
        shared: names of parameters that other stages use, too.
        last: whether the caller holds what the stage gives.

    Raises:
        CaptureError: the executor cannot run it.
    """
    what = f"{name} ({type(module).__name__})"
    try:
        stage = copied_apart(module)
    except (RuntimeError, TypeError) as error:
        raise CaptureError(f"{what} is measured on a copy, and cannot be copied: {error}") from error
    needs = [need and differentiable(x) for need, x in zip(needs, inputs, strict=True)]
    given = [x.detach() for x in inputs]
    own = generators.Own()
    with no_collectives(what), own:
        needs_grad = _differs(module, inputs)
        y = _output(stage, given, what)
        named = dict(stage.named_parameters())
        runs = _Runs(stage, given, needs, {key: named[key] for key in shared}, torch.ones_like(y), last, needs_grad)
        for _ in range(2):  # makes the gradients that the measured passes add to
            runs.backward(runs.forward())
        _warn_of_graphs(stage, what)
    with own if own.drew else nullcontext():  # it takes some µs for each operator
        forward_ns, backward_ns = _times(runs, inputs[0].device, timing or Timing())
        forward, backward, without_tape = _bytes(runs, inputs[0].device)
        gradients, _ = runs.backward(runs.forward())
    made = storage_bytes(y)
    tape = max(made, forward.left_bytes)
    taped, untaped = max(0, forward.peak_bytes - tape), max(0, without_tape.peak_bytes - made)
    # a stage that runs with grad where its tape is not kept makes and drops one; others need no more than that, and no
    # less than next to a tape, but where kernels differ without grad: then the larger counts for both
    untaped = taped + tape - made if needs_grad else max(taped, untaped)
    taped = max(taped, untaped - (tape - made))
    # an expanded gradient is made whole by the stage before, whose own measurement has a whole one to start from
    into = tuple(
        max(storage_bytes(found[0]), storage_bytes(x)) if found else 0
        for found, x in zip(gradients, given, strict=True)
    )
    cost = StageCost(
        rounded(forward_ns),
        rounded(backward_ns),
        taped,
        untaped,
        max(0, backward.peak_bytes - sum(into)),
        made,
        tape,
        into,
        needs_grad,
    )
    return cost, y.detach()


def _warn_of_graphs(stage: nn.Module, what: str) -> None:
    """Log a warning where a stage that has run keeps a tensor through which a loss might want gradients."""
    for part in stage.modules():
        for name, value in attributes_of(part).items():
            if any(t.grad_fn is not None for t in tensors(value)):
                log.warning(
                    "%s keeps a tensor with a graph in %s: by a plan no gradient flows through it; give what the loss "
                    "reads as a part of what the stages give",
                    what,
                    name,
                )


def _output(stage: nn.Module, given: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """What a stage gives, run once without grad.

    Raises:
        CaptureError: not one tensor, or its input is not what it was.
    """
    versions = [version_counter(x) for x in given]
    with torch.no_grad():
        y: torch.Tensor = stage(*given)
    if not isinstance(y, torch.Tensor):
        raise CaptureError(f"{what} gives {type(y).__name__}, not one tensor")
    if [version_counter(x) for x in given] != versions:
        raise CaptureError(f"{what} overwrites its input: use inplace=False")
    return y


class _Runs(NamedTuple):
    """A stage's forward and backward steps as a pass by a plan runs them."""

    stage: nn.Module
    given: Sequence[torch.Tensor]
    needs: Sequence[bool]
    shared: Mapping[str, nn.Parameter]
    gradient: torch.Tensor
    last: bool
    needs_grad: bool

    def first(self) -> SavedState:
        """The first forward step of a stage that runs again: its tape is not kept, and what it sees is noted."""
        with torch.no_grad():
            saved = SavedState(self.stage, self.gradient.device, measured=True)
        if self.needs_grad:
            self.forward()
        else:
            self.untaped()
        return saved

    def again(self, saved: SavedState) -> list[Any]:
        """A later one: what the stage gives, and its tape."""
        with torch.no_grad(), saved.restored(last=True):
            return self.forward()

    def forward(self) -> list[Any]:
        """What the stage gives, and its tape."""
        return list(record(self.stage, self.given, self.needs, self.shared))

    def untaped(self) -> None:
        """A forward step whose tape is not kept: what its kernels make meets in memory, though nothing of it stays."""
        with torch.no_grad():
            self.stage(*self.given)

    def backward(self, made: list[Any]) -> tuple[Any, Any]:
        """Gradients of the inputs and of the shared parameters, from what `forward` gave, which is emptied."""
        tape: Tape = made.pop()
        if not self.last:
            made.clear()  # as in a pass, where nobody else holds what the stage gave
        tape.backward(self.gradient)
        return tape.inputs, tape.parameters


def _differs(stage: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a stage gives other bits under no_grad; a copy of it runs each time, from the same random numbers."""
    found = []
    for grad in (False, True):
        with generators.Own(), torch.set_grad_enabled(grad):
            found.append(copied_apart(stage)(*(x.detach().clone() for x in inputs)))
    one, other = found
    return isinstance(one, torch.Tensor) and not torch.equal(one, other.detach())


def _times(runs: _Runs, device: torch.device, timing: Timing) -> tuple[float, float]:
    """Medians of the forward and of the backward steps, each of which finds its caches used by something else."""
    elsewhere = torch.zeros(of(device).cache_bytes // CACHE_SHARE // 4, device=device)
    saved: list[SavedState] = []
    tape: list[Any] = []
    forwards, backwards = [], []

    def elapsed(run: Callable[[], object]) -> int:
        elsewhere.add_(1)
        of(device).synchronize()
        start = timing.clock()
        run()
        of(device).synchronize()
        return timing.clock() - start

    for _ in range(timing.repetitions):
        first = elapsed(lambda: saved.append(runs.first()))
        again = elapsed(lambda: tape.extend(runs.again(saved.pop())))
        forwards.append((first + again) / 2)
        backwards.append(elapsed(lambda: runs.backward(tape)))
        tape.clear()
    return statistics.median(forwards), statistics.median(backwards)


def _bytes(runs: _Runs, device: torch.device) -> tuple[Interval, Interval, Interval]:
    """What a forward step and a backward step take, and a forward step whose tape is not kept."""
    window = Window(device)
    window.open()
    tape = runs.forward()
    forward = window.close()
    window.open()
    kept = runs.backward(tape)
    backward = window.close()
    del kept, tape
    window.open()
    runs.untaped()
    return forward, backward, window.close()


_MEASURED = (
    "forward_ns",
    "backward_ns",
    "forward_workspace_bytes",
    "untaped_workspace_bytes",
    "backward_workspace_bytes",
    "needs_grad",
)


def _costs(
    stages: Sequence[Stage],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    shared: SharedParameters,
    coordinator: Coordinator | None,
    timing: Timing | None = None,
) -> list[StageCost]:
    """What stages cost, one after the other, each with what those before it gave; the caller holds the last result.

    Args:
        inputs: of the first cuts.
    """
    values = dict(enumerate(inputs))
    costs: list[StageCost] = []
    for n, (stage, name) in enumerate(zip(stages, names, strict=True)):
        given = [values.pop(cut) for cut in stage.reads]
        needs = [cut >= len(inputs) or inputs[cut].requires_grad for cut in stage.reads]
        last = n + 1 == len(stages)
        cost, y = stage_cost(stage.module, name, given, needs, shared.of(n), last=last, timing=timing)
        values[stage.makes] = y
        costs.append(cost)
    return _agreed(costs, coordinator or Coordinator())


def _agreed(costs: Sequence[StageCost], coordinator: Coordinator) -> list[StageCost]:
    """The costs of stages with the times and workspaces that all ranks go by; their sizes stay this rank's own."""
    heard = coordinator.costs({name: [int(getattr(cost, name)) for cost in costs] for name in _MEASURED})
    found = []
    for n, cost in enumerate(costs):
        own = cost._replace(**{name: type(getattr(cost, name))(heard[name][n]) for name in _MEASURED})
        # a rank whose tapes are smaller has another problem, which is found out when it is asked
        most = own.forward_workspace_bytes + own.tape_bytes - own.activation_bytes
        found.append(own._replace(untaped_workspace_bytes=min(own.untaped_workspace_bytes, most)))
    return found


class ProfiledChain(NamedTuple):
    """The chain, and the stages (from 1) that compute other bits without grad than with it: LSTM's kernels do."""

    chain: Chain
    needs_grad: frozenset[int]


def chain_of(
    stages: Sequence[nn.Module],
    x: torch.Tensor,
    *,
    link_bytes_per_s: int | None = None,
    host_bytes: int | None = None,
    repetitions: int = REPETITIONS,
    clock: Callable[[], int] = time.perf_counter_ns,
    coordinator: Coordinator | None = None,
) -> ProfiledChain:
    """Rotor's chain of a list of stages: one stage at a time runs, forward and backward, on a copy of its module.

    Needs the memory of the largest stage and of all activations between stages. Neither parameters, buffers, gradients
    nor torch's generators change. Numbers of Python's and numpy's that the stages' code draws are not put back, since
    other threads draw from these generators, too. Gradients of parameters that several stages use are held until the
    last of these stages has run backward; they are charged from the first to the last of them. What the last stage
    gives is charged to the end, since the caller may hold it: the loss is best made the last stage. So are the random
    states and buffers that are noted for stages which may run again.

    Args:
        link_bytes_per_s, host_bytes: as in `Chain`.
        repetitions, clock: how often each stage is timed, and by what, in ns; the median counts.
        coordinator: of the ranks, which go by the same times and workspaces.

    Raises:
        CaptureError: a stage that the executor cannot run.
    """
    shared = SharedParameters(stages)
    chained = [Stage(module, (n,), n + 1) for n, module in enumerate(stages)]
    names = [f"stage {n}" for n in range(1, len(stages) + 1)]
    costs = _costs(chained, names, [x], shared, coordinator, Timing(repetitions, clock))
    noted = [saved_state_bytes(stage, x.device) for stage in stages]
    # a stage that runs again works on copies of what was noted
    charged = [sum(noted) + own + costs[-1].activation_bytes for own in noted]
    beside = [held + size for held, size in zip(waiting_bytes(costs, shared), charged, strict=True)]
    beside[-1] -= costs[-1].activation_bytes
    chain = Chain(
        forward_ns=tuple(cost.forward_ns for cost in costs),
        backward_ns=tuple(cost.backward_ns for cost in costs),
        forward_workspace_bytes=tuple(c.forward_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        untaped_workspace_bytes=tuple(c.untaped_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        backward_workspace_bytes=tuple(c.backward_workspace_bytes + b for c, b in zip(costs, beside, strict=True)),
        tape_bytes=tuple(cost.tape_bytes for cost in costs),
        activation_bytes=(storage_bytes(x), *(cost.activation_bytes for cost in costs)),
        gradient_bytes=(*(cost.gradient_bytes[0] for cost in costs), costs[-1].activation_bytes),
        link_bytes_per_s=link_bytes_per_s,
        host_bytes=host_bytes,
    )
    return ProfiledChain(chain, frozenset(n for n, cost in enumerate(costs, 1) if cost.needs_grad))


def waiting_bytes(costs: Sequence[StageCost], shared: SharedParameters) -> list[int]:
    """[stages] what gradients of shared parameters may take while each stage runs in the backward phase.

    Parts are added up in order from the last stage; each user but the one that runs may have left one.
    """
    waiting = [0] * len(costs)
    for parameter, users in shared.users.items():
        size = parameter.numel() * parameter.element_size()
        for n in range(min(users), max(users)):
            waiting[n] += size
        waiting[users[1]] += size  # the first two parts are added up out of place
    return waiting


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


def join_of(
    branches: Sequence[Sequence[nn.Module]],
    head: nn.Module,
    inputs: Sequence[torch.Tensor],
    coordinator: Coordinator | None = None,
) -> ProfiledJoin:
    """Measure the stages of branches and the head that they meet in; each runs on a copy of its module.

    Needs the memory of the largest stage and of all activations between stages. Neither parameters, buffers, gradients
    nor torch's generators change; of Python's and numpy's see `chain_of`.

    Args:
        coordinator: as for `chain_of`.

    Raises:
        CaptureError: a stage that the executor cannot run.
    """
    width = len(branches)
    stages: list[Stage] = []
    names: list[str] = []
    ends: list[int] = []
    for j, branch in enumerate(branches):
        cut = j
        for i, module in enumerate(branch):
            stages.append(Stage(module, (cut,), width + len(stages)))
            names.append(f"branch {j + 1}, stage {i + 1}")
            cut = stages[-1].makes
        ends.append(cut)
    stages.append(Stage(head, tuple(ends), width + len(stages)))
    shared = SharedParameters([stage.module for stage in stages])
    costs = _costs(stages, [*names, "the head"], inputs, shared, coordinator)
    stages = [replace(stage, needs_grad=cost.needs_grad) for stage, cost in zip(stages, costs, strict=True)]
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
