"""`remat.check`: one step without plans and one by them, and the largest difference between the two."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat_ir import InvalidData

from .. import _compat, generators
from ..capture.call import example_call
from ..capture.dataflow import tensors
from ..profiling.fixed import here
from ..switch import planned_calls, without_plans


@dataclass(frozen=True)
class Comparison:
    """A step by plans next to the same step without them.

    Attributes:
        differences: what differs, by name: the largest difference of its numbers, relative to the largest number of the
            plain step's; infinite where one of the steps has nothing there, or something of another shape or dtype.
        compared: how many outputs, gradients, buffers and generators were compared.
        planned_calls: how many calls ran by a plan in the step that was to run by plans: of the model, of each planned
            part of it, or of each graph of torch.compile's. With 0, two plain steps were compared.

    Example:
        >>> print(Comparison({"gradient of 0.weight": 0.005, "output 0": 0.001}, 7, 1))
        2 of 7 differ; most, by 0.005 of its largest number: gradient of 0.weight (planned calls: 1)
    """

    differences: Mapping[str, float]
    compared: int
    planned_calls: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs, bit for bit but for the sign of zero."""
        return not self.differences

    @property
    def largest(self) -> str | None:
        """What differs most; None: nothing does."""
        return max(self.differences, key=lambda name: self.differences[name], default=None)

    def __str__(self) -> str:
        name, ran = self.largest, f"planned calls: {self.planned_calls or 'none, no plan was compared'}"
        if name is None:
            return f"all {self.compared} outputs, gradients, buffers and generators are equal ({ran})"
        most = f"most, by {self.differences[name]:.2g} of its largest number: {name}"
        return f"{len(self.differences)} of {self.compared} differ; {most} ({ran})"


def check(
    model: Callable[..., Any],
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    module: nn.Module | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Comparison:
    """Compare a step by plans with the same step without: all outputs, gradients, buffers and generators.

    Both steps are run here, from the same random state and under the state of torch that the call finds, such as
    autocast. Gradients, buffers and generators are then put back; hooks, counters and other state of Python see two
    steps. The plain step must fit: take a small batch. It is eager PyTorch, from which a plan may differ by rounding,
    as torch's own `aot_eager` does: see `docs/exactness.md`.

    Args:
        model: whatever trains by plans: a module that `enable`, `optimize` or `optimize_chain` made, one with planned
            parts, `torch.compile(model, backend=remat.backend(…))`, or a function that calls such.
        example_args, example_kwargs: one call of it, as for `optimize`.
        module: whose parameters are named and whose buffers are compared and put back, where `model` is a function.
        loss: makes a scalar of the output; None: all tensors in the output get random gradients.

    Raises:
        InvalidData: no output has a gradient; or the step writes to a parameter.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> found = remat.check(remat.enable(model, budget="100%", planner="greedy"), x)
        >>> found.equal, found.largest, found.planned_calls
        (True, None, 1)
    """
    args, kwargs = example_call(example_args, example_kwargs)
    owners = (module, model, getattr(model, "__self__", None))
    module = next((owner for owner in owners if isinstance(owner, nn.Module)), nn.Module())
    named: dict[str, torch.Tensor] = {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}
    named |= {f"input {i}": t for i, t in enumerate(tensors((args, kwargs))) if t.requires_grad and t.is_leaf}
    with without_plans(), torch.compiler.set_stance("force_eager"):
        plain = _outcome(model, module, named, args, kwargs, loss)
    with planned_calls() as calls:
        planned = _outcome(model, module, named, args, kwargs, loss)
    found = {name: _difference(plain.get(name), planned.get(name)) for name in {**plain, **planned}}
    return Comparison({name: most for name, most in found.items() if most}, len(found), calls.number)


def _outcome(
    model: Callable[..., Any],
    module: nn.Module,
    named: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> dict[str, Any]:
    """What a step gives, on the host, by name; everything is as before afterwards.

    Leaves that the model does not name are added to `named` as they are found.

    Raises:
        InvalidData: as for `check`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(undisturbed(module, named.values()))
        output = model(*args, **kwargs)
        ends = [t for t in tensors(output if loss is None else loss(output)) if t.requires_grad]
        if not ends:
            raise InvalidData("remat.check compares gradients, and no tensor in the output has one: give loss=")
        known = {id(p) for p in named.values()}
        more = [p for p in _leaves(ends) if id(p) not in known]
        named |= {f"leaf {len(named) + i} of shape {tuple(p.shape)}": p for i, p in enumerate(more)}
        stack.enter_context(undisturbed(nn.Module(), more))
        versions = {name: _compat.version_counter(p) for name, p in named.items()}
        torch.autograd.backward(ends, [_tangent(t) for t in ends])
        written = [name for name, p in named.items() if _compat.version_counter(p) != versions[name]]
        if written:
            raise InvalidData(
                f"the step writes to {written[0]}, so that two of them cannot be compared: check without "
                "release_gradients=True and without hooks that step an optimizer, and before training"
            )
        found = {f"output {i}": _on_host(t) for i, t in enumerate(tensors(output))}
        found |= {f"gradient of {name}": _on_host(p.grad) for name, p in named.items() if p.grad is not None}
        found |= {f"buffer {name.replace('_orig_mod.', '')}": _on_host(b) for name, b in module.named_buffers()}
        drawn = generators.noted()
        found |= {f"generator of {device.device}": state for device, state in drawn.states}
        others = {"generator of Python": drawn.python, "generator of numpy": drawn.numpy}
        return {**found, **{name: json.dumps(state, default=lambda a: a.tolist()) for name, state in others.items()}}


@contextlib.contextmanager
def undisturbed(model: nn.Module, leaves: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Buffers, gradients and random states are as they were, afterwards; inside there are no gradients."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in (*model.parameters(), *leaves)]
    for parameter, _ in gradients:
        parameter.grad = None
    with generators.kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _leaves(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward pass gives gradients to, in the order in which it is found."""
    stack, seen = [t.grad_fn for t in ends], set()
    found: dict[int, torch.Tensor] = {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        stack += [following for following, _ in node.next_functions]
    return list(found.values())


def _tangent(tensor: torch.Tensor) -> torch.Tensor:
    """The same gradient in both steps: random where a sum's would hide what a softmax or a norm makes of it."""
    if not tensor.dim() or here(tensor) is not tensor:
        return torch.ones_like(tensor)
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = here(tensor).detach().to("cpu", copy=True)
    return found


def _difference(one: Any, other: Any) -> float:
    """0.0: they are equal."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other) or not one.numel():
        return 0.0
    one, other = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other))
    if torch.equal(one.isnan(), other.isnan()):
        one, other = one.nan_to_num(), other.nan_to_num()
    off, size = (one - other).abs().nan_to_num(float("inf")).max(), one.abs().max()
    return float(off / size) if size else float(off)
