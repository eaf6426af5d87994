"""What each stage of a chain costs in time and bytes: measured stage by stage, on the real input."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from remat_ir import Chain

from . import _compat
from .chain import check_stage
from .profile import rounded

REPETITIONS = 3
COLUMNS = (
    "forward_ns",
    "backward_ns",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "tape_bytes",
    "activation_bytes",
    "gradient_bytes",
)


class ProfiledChain(NamedTuple):
    """The chain, and the stages (from 1) that compute other bits without grad than with it: LSTM's kernels do."""

    chain: Chain
    graded: frozenset[int]


def chain_of(stages: Sequence[nn.Module], x: torch.Tensor) -> ProfiledChain:
    """Rotor's chain of a list of stages: one stage at a time runs, forward and backward, on a copy of its module.

    Needs the memory of the largest stage and of all activations between stages. Neither parameters, buffers, gradients
    nor generators change. A parameter's new gradient counts as workspace of its stage's backward step: it is added to
    one that exists, which is fixed.

    Raises:
        CaptureError: a stage that the executor cannot run.
    """
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    columns["activation_bytes"].append(_size(x))
    columns["gradient_bytes"].append(_size(x) if x.requires_grad else 0)
    graded: set[int] = set()
    try:
        for position, stage in enumerate(stages, 1):
            if _differs(stage, x):
                graded.add(position)
            x = _measure(copy.deepcopy(stage), position, x, columns, position in graded)
    finally:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state_all(states[1:])
    arrays = {name: tuple(columns[name]) for name in COLUMNS}
    return ProfiledChain(Chain(**arrays), frozenset(graded))  # type: ignore[arg-type]


def _differs(stage: nn.Module, x: torch.Tensor) -> bool:
    """Whether a stage gives other bits under no_grad; a copy of it runs each time, from the same random numbers."""
    found = []
    with torch.random.fork_rng():
        for grad in (False, True):
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                found.append(copy.deepcopy(stage)(x.detach().clone()))
    one, other = found
    return isinstance(one, torch.Tensor) and not torch.equal(one, other.detach())


def _measure(
    stage: nn.Module, position: int, x: torch.Tensor, columns: dict[str, list[int]], graded: bool
) -> torch.Tensor:
    needs = x.is_floating_point() and (position > 1 or x.requires_grad)
    given = x.detach()
    version = given._version
    with torch.no_grad():
        y: torch.Tensor = stage(given)
    check_stage(stage, position, given, y, version)
    gradient = torch.ones_like(y)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = given.detach().requires_grad_(needs)
        return leaf, stage(leaf)

    def backward(tape: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | None:
        if tape[1].requires_grad:
            torch.autograd.backward(tape[1], gradient)
        return tape[0].grad

    for _ in range(2):  # makes the gradients that the measured passes add to
        backward(forward())
    forward_ns, backward_ns = _times(forward, backward, given.device)
    sizes = _bytes(forward, backward, given.device)
    made = _size(y)
    columns["forward_ns"].append(rounded(forward_ns))
    columns["backward_ns"].append(rounded(backward_ns))
    columns["activation_bytes"].append(made)
    columns["gradient_bytes"].append(made)
    columns["tape_bytes"].append(max(made, sizes["tape"]))
    # a stage that runs with grad where its tape is not kept makes and drops one
    kept = made if graded else max(made, sizes["tape"])
    columns["forward_workspace_bytes"].append(max(0, sizes["forward_peak"] - kept))
    into = _size(x) if needs else 0
    columns["backward_workspace_bytes"].append(max(0, sizes["backward_peak"] - into))
    return y


def _times(forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device) -> tuple[float, float]:
    forwards, backwards = [], []
    for _ in range(REPETITIONS):
        marks = [_now(device)]
        tape = forward()
        marks.append(_now(device))
        backward(tape)
        marks.append(_now(device))
        forwards.append(marks[1] - marks[0])
        backwards.append(marks[2] - marks[1])
    return min(forwards), min(backwards)


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def _bytes(forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        return _bytes_cuda(forward, backward, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("remat:forward"):
            tape = forward()
        with record_function("remat:backward"):
            kept = backward(tape)
        del kept, tape
    found = {}
    for begin, end, name in _compat.spans(profiler, "remat:"):
        now = worst = 0
        for when, size in _compat.memory_events(profiler):
            if begin <= when <= end:
                now += size
                worst = max(worst, now)
        found[f"{name}_peak"] = worst
        if name == "forward":
            found["tape"] = now
    return found


def _bytes_cuda(forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device) -> dict[str, int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tape = forward()
    torch.cuda.synchronize(device)
    found = {"forward_peak": torch.cuda.max_memory_allocated(device) - before}
    between = torch.cuda.memory_allocated(device)
    found["tape"] = between - before
    torch.cuda.reset_peak_memory_stats(device)
    backward(tape)
    torch.cuda.synchronize(device)
    found["backward_peak"] = torch.cuda.max_memory_allocated(device) - between
    return found


def _size(tensor: torch.Tensor) -> int:
    size = int(tensor.untyped_storage().nbytes())
    return -(-size // 512) * 512 if tensor.device.type == "cuda" else size
