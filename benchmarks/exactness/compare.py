"""One sample trained by stock `aot_eager` and by plans that recompute: equal bit for bit, or refused and why."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.models.behind import behind
from benchmarks.models.subject import Around
from remat import CaptureError
from remat.profiling import measure, timing
from remat.training.step import running_peak, training_step
from remat_ir import Graph, Plan, Problem, plan_of, verify
from remat_ir.greedy import least_memory

STEPS = 2
SMALL = 100
"""Ops of a graph up to which it trains by a random plan, too."""


class Sample(NamedTuple):
    """A module and one call of it; `name` is what its row is called, and samples of one name share a row."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


class Finding(NamedTuple):
    """What a sample came to.

    Attributes:
        ending: "bitwise", "as eager" (equal bit for bit to eager, from which `aot_eager` itself differs), "differs",
            "refused" by remat, "not by aot_eager", or "nothing to train".
        why: the message of a refusal or an error, or what differs.
        over_bytes: the most bytes by which a measured peak was above the predicted one.
    """

    name: str
    ending: str
    why: str = ""
    over_bytes: int = 0


class Loss(Around):
    """The sum of the mean squares of all that a module returns, as float32."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = [t for t in tensors(self.inner(*args, **kwargs)) if t.dtype.is_floating_point or t.dtype.is_complex]
        made = [(torch.view_as_real(t) if t.dtype.is_complex else t).float().square().mean() for t in found]
        return torch.stack(made).sum()


class Function(nn.Module):
    """An operator as a module whose parameters are its differentiable inputs, each scaled by one learned number."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = (
            [t * self.scale for t in first] if isinstance(first, (list, tuple)) else first * self.scale.to(first.dtype)
        )
        return self.function(scaled, *args, **kwargs)


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module takes or returns."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors(value)
    elif isinstance(thing, (tuple, list)):
        for value in thing:
            yield from tensors(value)


def quick_profiles() -> None:
    """Costs of one sample each: they decide nothing here, and kernels are measured all the same."""
    timing.ROUNDS = timing.SAMPLES = 1
    timing.LARGEST_CACHE_BYTES = 0


def compared(sample: Sample) -> Finding:
    """Train one sample by stock `aot_eager` and by its plans; never raises what a sample raises."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, args, kwargs = sample.make()
    module = Loss(made)
    if not any(t.requires_grad for t in (*module.parameters(), *tensors((args, kwargs)))):
        return Finding(sample.name, "nothing to train")
    stock = copy.deepcopy(module)
    try:
        compiled = torch.compile(stock, backend="aot_eager", dynamic=False)
        expected = trained(stock, compiled, args, kwargs)
    except Exception as error:
        return Finding(sample.name, "not by aot_eager", said(error))
    try:
        step = training_step(module, args, kwargs)
    except CaptureError as error:
        return Finding(sample.name, "refused", said(error))
    except Exception as error:
        return Finding(sample.name, "differs", f"raw error at planning: {said(error)}")
    over = 0
    gc.freeze()  # each measured peak collects garbage: what is there now is left out
    plans = [least_memory(step.graph)]
    if step.graph.ops <= SMALL:
        plans.append(random_plan(step.graph, 1))
    for plan in plans:
        verify(Problem(step.graph, 2**50), plan)
        planned = copy.deepcopy(module)
        call = behind(planned, step.compile(plan))
        try:
            found = trained(planned, call, args, kwargs)
            different = differences(expected, found)
        except Exception as error:
            return Finding(sample.name, "differs", f"raw error in training: {said(error)}")
        if different:
            eager = copy.deepcopy(module)
            alike = not differences(trained(eager, eager, args, kwargs), found)
            return Finding(sample.name, "as eager" if alike else "differs", ", ".join(different))
        over = max(over, peak(planned, call, args, kwargs, running_peak(step, plan) - step.graph.fixed_bytes))
    return Finding(sample.name, "bitwise", "", max(0, over))


def trained(
    module: nn.Module, call: Callable[..., torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor | None]:
    """What two accumulated steps leave behind, by name: losses, gradients, buffers, the generator's state."""
    torch.manual_seed(1)
    inputs = list(tensors((tuple(args), kwargs)))
    for tensor in inputs:
        tensor.grad = None
    found: dict[str, torch.Tensor | None] = {}
    for number in range(STEPS):
        loss = call(*args, **kwargs)
        loss.backward()
        found[f"loss {number}"] = loss.detach().clone()
    found |= {f"gradient {name}": p.grad for name, p in module.named_parameters()}
    found |= {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    found |= {f"gradient of input {i}": t.grad.clone() if t.grad is not None else None for i, t in enumerate(inputs)}
    found["generator"] = torch.get_rng_state()
    return found


def differences(one: Mapping[str, torch.Tensor | None], other: Mapping[str, torch.Tensor | None]) -> list[str]:
    """The names of what is not equal bit for bit."""
    return [name for name in sorted({*one, *other}) if not same(one.get(name), other.get(name))]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit; numbers that are none are equal to one another."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))


def peak(
    module: nn.Module,
    call: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    predicted_bytes: int,
) -> int:
    """By how many bytes the measured peak of a step from no gradients is above the predicted one."""
    found = 0
    for _ in range(2):  # libraries allocate once what they use ever after
        module.zero_grad()
        for tensor in tensors((tuple(args), kwargs)):
            tensor.grad = None
        found = measure.peak_memory(measure.forward_backward(call, tuple(args), kwargs)).peak_bytes - predicted_bytes
        if found <= 0:
            break
    return found


def random_plan(graph: Graph, seed: int) -> Plan:
    """A valid plan that recomputes whatever it likes, wherever it likes."""
    draw = random.Random(seed)
    free = [op for op, last in enumerate(graph.last_stage) if last == graph.ops]
    sequence: list[int] = []
    for op in range(graph.ops):
        sequence += [again for again in draw.sample(free, min(len(free), draw.choice((0, 0, 1, 3)))) if again < op]
        sequence.append(op)
    return plan_of(graph, sequence)


def said(error: Exception) -> str:
    """The first lines of an error, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:900]}"
