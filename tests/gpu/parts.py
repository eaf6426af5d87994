"""What each case measures: raw samples only. What they show is decided by `remat.cli.doctor`, from them alone."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from gpu.subjects import Subject
from remat import device_flags
from remat.device import of
from remat.lowering import lower
from remat.lowering.link import StreamLink, UnderWay
from remat.profiling import measure
from remat_ir import Answer
from remat_ir.greedy import checkpointed

Samples = dict[str, Any]
ROUNDS, STEPS, SEEDS = 10, 20, 5


class Everything:
    """A planner that keeps nothing that can be computed again."""

    def plan(self, problem: Any, options: Any, *, on_progress: Any = None) -> Answer:
        """The plan."""
        return Answer.of_plan(problem, checkpointed(problem.subject), method="given")


def planned(model: nn.Module, args: tuple[Any, ...], **options: Any) -> Any:
    """The model by a plan that computes everything again, unless options say otherwise."""
    return remat.optimize(remat.disable(model), args, **{"budget": 2**50, "planner": Everything(), **options})


def compiled(model: nn.Module) -> Any:
    """The same step as torch's own machinery runs it."""
    torch._dynamo.reset()
    return torch.compile(remat.disable(model), backend="aot_eager")


def digests(outcome: measure.Outcome) -> dict[str, str]:
    """A hash of the bits of everything that a step leaves behind, both generators included."""
    tensors = {"loss": outcome.loss, **outcome.gradients, **{f"buffer {n}": b for n, b in outcome.buffers.items()}}
    tensors |= {f"generator {device.device}": state for device, state in outcome.generators.states}
    return {name: "none" if t is None else digest(t) for name, t in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def step_of(make: Callable[[nn.Module], Any], subject: Subject, seed: int = 0) -> measure.Outcome:
    """What one step leaves behind, from the same parameters each time."""
    model = copy.deepcopy(subject[0])
    return measure.outcome(model, measure.forward_backward(make(model), subject[1]), seed)


@contextmanager
def replay_broken() -> Iterator[None]:
    """What is computed again draws other random numbers."""
    kept = lower.replay

    def drawn_anew(state: torch.Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    lower.replay = drawn_anew
    try:
        yield
    finally:
        lower.replay = kept


def bits(subject: Subject) -> Samples:
    """Plain twice, by the plan, and by the plan with a broken replay."""
    args = subject[1]
    plain = [digests(step_of(compiled, subject)) for _ in range(2)]
    plan = digests(step_of(lambda model: planned(model, args), subject))
    with replay_broken():
        broken = digests(step_of(lambda model: planned(model, args), subject))
    return {"plain": plain, "plan": plan, "broken": broken}


def spread(subject: Subject) -> Samples:
    """Without deterministic kernels: how far plain is from plain, and the plan from plain, for some seeds."""

    def gradients(make: Callable[[nn.Module], Any], seed: int) -> torch.Tensor:
        found = step_of(make, subject, seed).gradients.values()
        return torch.cat([g.double().flatten().cpu() for g in found if g is not None])

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / one.norm())

    plain, plan = [], []
    for seed in range(SEEDS):
        first = gradients(compiled, seed)
        plain.append(distance(first, gradients(compiled, seed)))
        plan.append(distance(first, gradients(lambda model: planned(model, subject[1]), seed)))
    return {"plain": plain, "plan": plan}


def memory(subject: Subject) -> Samples:
    """The peak of a step by a plan: predicted, asked for, allocated, reserved, and what the device says."""
    model, args = subject
    device: Any = of(args[0].device)
    trained = planned(model, args, budget="50%", planner="greedy")
    (plan,) = remat.plans_of(trained).plans
    run = measure.forward_backward(trained, args)
    for _ in range(2):  # libraries take their workspaces
        run()
        model.zero_grad(set_to_none=True)
    found = measure.peak_memory(run, device.device)
    free, total = device.free_and_total()
    return {
        "predicted": plan.activation_bytes,
        "requested": found.peak_bytes,
        "allocated": found.allocated_bytes,
        "reserved": device.memory().peak_reserved,
        "device": total - free,
    }


def limit(subject: Subject) -> Samples:
    """Steps with an optimizer and a gradient scaler on a device that has no more than the budget; plain has to fail."""
    model, args = subject
    device: Any = of(args[0].device)
    plain = remat.disable(copy.deepcopy(model))

    def steps(trained: Any, parameters: Any, count: int) -> int:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler(device.device.type)
        for step in range(count):
            try:
                scaler.scale(trained(*args)).backward()
                scaler.step(optimizer)
            except torch.OutOfMemoryError:
                optimizer.zero_grad(set_to_none=True)
                return step
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return count

    def emptied() -> None:
        gc.collect()
        device.synchronize()
        device.module.empty_cache()
        device.reset_peaks()

    emptied()
    steps(plain, plain.parameters(), 2)
    needed = device.memory().peak_reserved
    emptied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def by(budget: Any) -> Any:
        trained = planned(model, args, budget=budget, planner="greedy", optimizer=optimizer)
        return trained, next(iter(remat.plans_of(trained).plans)).memory.reserved

    aim = by("50%")[1]
    emptied()
    outside = device.outside_bytes()
    trained, predicted = by(aim + outside)
    total = device.free_and_total()[1]
    emptied()
    device.module.set_per_process_memory_fraction(min(1.0, aim / total), device.device)
    ended = steps(trained, model.parameters(), STEPS)
    reserved = device.memory().peak_reserved
    emptied()
    return {
        "budget": aim + outside,
        "outside": outside,
        "predicted_reserved": predicted,
        "reserved": reserved,
        "plain_reserved": needed,
        "plan": ended,
        "plain": steps(plain, plain.parameters(), STEPS),
    }


def seconds(subject: Subject) -> Samples:
    """Interleaved rounds of plain and planned steps, and what was predicted."""
    model, args = subject
    trained = planned(model, args, budget="50%", planner="greedy")
    (plan,) = remat.plans_of(trained).plans
    runs = {
        "plain": measure.forward_backward(compiled(copy.deepcopy(model)), args),
        "plan": measure.forward_backward(trained, args),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 3):
        for name, run in runs.items():
            taken = measure.seconds(run, args[0].device)
            if round_ >= 3:
                found[name].append(taken)
    predicted = {"plain": plan.step.graph.total_cost_ns, "plan": plan.answer.cost_ns}
    return {"predicted_ns": predicted, "seconds": found}


def transfers(device: torch.device, elements: int, side: int) -> Samples:
    """Storages that travel to the host and back while their memory is used again, over slow streams; then unawaited."""

    def journey() -> list[str]:
        there: Any = of(device)
        link: Any = StreamLink(there)
        busy = torch.randn(side, side, device=device)
        torch.manual_seed(2)
        values = [torch.randn(elements, device=device) for _ in range(4)]
        made = []
        for value in values:
            _delay(there, 0, busy)
            copies, token = link.out([value.untyped_storage()])
            link.wait(token)
            made.append(copies)
        del value, values
        again = [torch.full((elements,), float("nan"), device=device) for _ in range(4)]
        del again
        found = []
        for copies in made:
            _delay(there, 1, busy)
            (storage,), token = link.back(copies)
            link.wait(token)
            found.append(digest(torch.empty(0, device=device).set_(storage) + 0))
        there.synchronize()
        return found

    torch.manual_seed(2)
    sent = [digest(torch.randn(elements, device=device)) for _ in range(4)]
    back = journey()
    kept = StreamLink.wait, UnderWay.__del__
    StreamLink.wait, UnderWay.__del__ = lambda *_: None, lambda *_: None
    try:
        broken = journey()
    finally:
        StreamLink.wait, UnderWay.__del__ = kept
    return {"sent": sent, "back": back, "broken": broken}


def _delay(device: Any, which: int, busy: torch.Tensor) -> None:
    """Keeps a side stream at work for some milliseconds."""
    stream = device.side_streams()[which]
    stream.wait_stream(device.computing_stream())
    with device.inside(stream):
        for _ in range(8):
            busy @ busy


def inductor(subject: Subject) -> Samples:
    """Under Inductor, with its own partition and with a plan; there is no replay of remat's to break."""

    def by(backend: Any) -> dict[str, str]:
        torch._dynamo.reset()
        return digests(step_of(lambda model: torch.compile(model, backend=backend), subject))

    plan = by(remat.backend(budget="60%", inner="inductor", planner="greedy"))
    return {"plain": [by("inductor") for _ in range(2)], "plan": plan}


def record(root: Path) -> Samples:
    """On what all of this was measured."""
    there: Any = of("cuda:0")
    properties = there.properties
    asked = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory", "mig.mode.current", "memory.total")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": properties.name,
        "devices": there.module.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "bytes": properties.total_memory,
        "driver": {what: device_flags.driver_says(f"GPU-{properties.uuid}", what) or "unknown" for what in asked},
        "flags": device_flags.flags(),
        "allocator": {name: os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")},
    }
