"""What one stage costs in time and bytes: a copy of its module runs forward and backward on the real inputs."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import generators
from .._compat import version_counter
from ..capture.dataflow import tensors
from ..device import of, storage_bytes
from ..errors import CaptureError
from ..profiling.collectives import no_collectives
from ..profiling.measure import Window
from ..profiling.timing import rounded
from .hooks import copied_apart
from .saved_state import SavedState, attributes_of
from .stages import differentiable
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
    stage = _copy(module, what)
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
        sizes = _bytes(runs, inputs[0].device)
        gradients, _ = runs.backward(runs.forward())
    made = storage_bytes(y)
    tape = max(made, sizes["tape"])
    taped, untaped = max(0, sizes["forward_peak"] - tape), max(0, sizes["untaped_peak"] - made)
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
        max(0, sizes["backward_peak"] - sum(into)),
        made,
        tape,
        into,
        needs_grad,
    )
    return cost, y.detach()


def _copy(module: nn.Module, what: str) -> nn.Module:
    """A copy of a stage.

    Raises:
        CaptureError: it cannot be copied.
    """
    try:
        return copied_apart(module)
    except (RuntimeError, TypeError) as error:
        raise CaptureError(f"{what} is measured on a copy, and cannot be copied: {error}") from error


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
        start = _now(device, timing)
        run()
        return _now(device, timing) - start

    for _ in range(timing.repetitions):
        first = elapsed(lambda: saved.append(runs.first()))
        again = elapsed(lambda: tape.extend(runs.again(saved.pop())))
        forwards.append((first + again) / 2)
        backwards.append(elapsed(lambda: runs.backward(tape)))
        tape.clear()
    return statistics.median(forwards), statistics.median(backwards)


def _now(device: torch.device, timing: Timing) -> int:
    of(device).synchronize()
    return timing.clock()


def _bytes(runs: _Runs, device: torch.device) -> dict[str, int]:
    window = Window(device)
    window.open()
    tape = runs.forward()
    first = window.close()
    window.open()
    kept = runs.backward(tape)
    second = window.close()
    del kept, tape
    window.open()
    runs.untaped()
    third = window.close()
    return {
        "untaped_peak": third.peak_bytes,
        "forward_peak": first.peak_bytes,
        "tape": first.left_bytes,
        "backward_peak": second.peak_bytes,
    }
