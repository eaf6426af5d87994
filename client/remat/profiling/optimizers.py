"""What an optimizer's step needs, found out by a dry run of the step itself, before it has ever run.

The step runs on fake tensors of the parameters' shapes. One that reads its numbers (LBFGS, kernels that torch cannot
trace) runs on small real parameters, and what those take is extended to the true number of elements.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from remat_ir import InvalidData, readable

from .. import _compat, generators
from ..capture.dataflow import tensors
from ..device import storage_bytes
from .fixed import distinct_bytes, here
from .measure import Allocations

log = logging.getLogger("remat")

READ_AS = (0.5, 1000.0)
"""What a number read from a fake tensor is taken for: both sides of `if step > …` are tried."""

ELEMENTS = (2**14, 2**15)
"""The most elements of a parameter in the two runs on small ones: above what 8-bit optimizers leave in 32 bits."""

ELEMENTS_WITH_CLOSURE = 2**16
"""The most elements of all parameters together, where the step keeps a history of them."""

MOST_STEPS = 100
SETTLED = 4
"""A state has its final size once so many steps in turn have left it as it was, up to a thousandth."""


class UpdateMemory(NamedTuple):
    """Bytes that an optimizer's step takes on the device of its parameters.

    Attributes:
        state_bytes: held from the first step on.
        temporaries_bytes: the most beyond parameters, gradients and state while the step runs, or the clipping before
            it.
        beside_passes_bytes: those of the temporaries that are there while the step runs forward and backward passes
            itself.
    """

    state_bytes: int = 0
    temporaries_bytes: int = 0
    beside_passes_bytes: int = 0

    @property
    def throughout_bytes(self) -> int:
        """What is there throughout training because of the optimizer."""
        return self.state_bytes + self.beside_passes_bytes


class UpdateBlocks(NamedTuple):
    """Sizes in bytes of what steps of an optimizer allocate: its state, if that is not there yet, and copies."""

    state: list[int]
    copies: list[int]


def update_blocks(optimizer: Optimizer | None, update: UpdateMemory) -> UpdateBlocks:
    """What steps of an optimizer allocate, which take `update`: blocks that are as large as parameters."""
    state = 0 if optimizer is None or optimizer.state else update.state_bytes
    return UpdateBlocks(spread(state, optimizer), spread(update.temporaries_bytes, optimizer))


def spread(size: int, optimizer: Optimizer | None) -> list[int]:
    """Bytes as copies of each parameter that is trained, one after the other, and what is left of them in one piece."""
    sizes = [] if optimizer is None else [storage_bytes(here(p)) for p in _trained(optimizer)]
    count, rest = divmod(size, sum(sizes)) if sizes else (0, size)
    return [size for size in sizes for _ in range(count)] + [rest] * (rest > 0)


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer; None is none at all.

    Raises:
        InvalidData: it lacks the parameter groups or the state of one.
    """
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise InvalidData(f"optimizer must be a torch.optim.Optimizer or None, not {optimizer!r}")


def update_memory(
    optimizer: Optimizer | None, clip: bool = False, settings: Mapping[str, Any] | None = None
) -> UpdateMemory:
    """What a step of an optimizer takes, by a dry run; the optimizer and its parameters stay as they are.

    Args:
        clip: whether `torch.nn.utils.clip_grad_norm_` runs before the step.
        settings: of all parameter groups, in the place of their own, such as {"foreach": False}.

    A step that cannot be run dry counts as the state that there is now, with a warning.
    """
    if optimizer is None:
        return UpdateMemory()
    optimizer = inner(optimizer)
    held = _bytes_of_state(optimizer.state)
    if not _trained(optimizer):
        return UpdateMemory(held)
    found: UpdateMemory | None = None
    if not takes_closure(optimizer):
        found = _on_fakes(optimizer, clip, settings or {})
    try:
        found = found or _on_small(optimizer, clip, settings or {})
    except Exception as error:  # noqa: BLE001 – an optimizer may raise anything
        log.warning(
            "what a step of %s takes could not be found out (%s: %s): it is counted as the %s of state that it has now",
            type(optimizer).__name__,
            type(error).__name__,
            str(error).partition("\n")[0][:200],
            readable(held),
        )
        return UpdateMemory(held)
    return found._replace(state_bytes=max(held, found.state_bytes))


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a wrapper such as accelerate's."""
    while isinstance(wrapped := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = wrapped
    return optimizer


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether a step must be given the function that computes the loss and the gradients."""
    parameters = list(inspect.signature(_step(optimizer)).parameters.values())[1:]
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def dry_twin(optimizer: Optimizer, copies: Mapping[int, torch.Tensor], settings: Mapping[str, Any]) -> Optimizer:
    """An optimizer with the same settings over copies of its parameters, by the identity of those."""

    def copied(thing: object) -> object:
        if isinstance(thing, torch.Tensor):
            return copies.get(id(thing), thing)
        if isinstance(thing, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in thing):
            return [copied(t) for t in thing if id(t) in copies]
        return thing

    made: Optimizer = _compat.stand_in(optimizer)
    made.__dict__.update({name: copied(value) for name, value in made.__dict__.items() if name != "param_groups"})
    made.param_groups = []
    for group in optimizer.param_groups:
        own = {name: copied(value) for name, value in group.items()}
        own["params"] = [copies[id(p)] for p in group["params"] if id(p) in copies]
        unsaid = group.get("foreach", 0) is None and not group.get("fused") and own["params"]
        if unsaid and _compat.chooses_foreach(group["params"], bool(group.get("differentiable"))):
            own["foreach"] = True  # it does not choose it for fake tensors
        own.update({name: value for name, value in settings.items() if name in own})
        made.param_groups.append(own)
    return made


def run_step(optimizer: Optimizer, closure: Callable[[], object] | None = None) -> None:
    """The step of an optimizer's class alone: no hooks, no scheduler that counts it."""
    with torch.no_grad():
        _step(optimizer)(optimizer, *([closure] if closure else []))


def _step(optimizer: Optimizer) -> Callable[..., Any]:
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    return step


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _kind(optimizer: Optimizer) -> str:
    """The kind of device that counts."""
    kind = here(_trained(optimizer)[0]).device.type
    return "cpu" if kind == "meta" else kind


def _on_fakes(optimizer: Optimizer, clip: bool, settings: Mapping[str, Any]) -> UpdateMemory | None:
    """By fake tensors of the true sizes; None where the step has to see real numbers.

    Where one parameter of each kind takes the same whatever number is read, so do all of them, and they step once.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    trained = [(i, p) for i, group in enumerate(groups) for p in group if p.requires_grad]
    kinds = {(i, here(p).shape, p.dtype, p.device): p for i, p in trained}
    numbers: Sequence[float] = READ_AS
    try:
        if len({_stepped_fakes(optimizer, list(kinds.values()), number, clip, settings) for number in READ_AS}) == 1:
            numbers = READ_AS[:1]
        found = [_stepped_fakes(optimizer, [p for _, p in trained], number, clip, settings) for number in numbers]
    except Exception as error:  # noqa: BLE001 – an optimizer may raise anything
        log.debug("%s does not step fake tensors: %s", type(optimizer).__name__, error)
        return None
    ended = [update for update in found if update is not None]
    return UpdateMemory(*map(max, zip(*ended, strict=True))) if ended else None


def _stepped_fakes(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor], number: float, clip: bool, settings: Mapping[str, Any]
) -> UpdateMemory | None:
    """Of some of its parameters, where each number that is read is this one; None: the step divides by zero by it."""
    with _compat.FakeTensorMode(), Allocations(_kind(optimizer), number) as live:
        copies = {}
        for parameter in parameters:
            local = here(parameter)
            like = {"dtype": local.dtype, "device": "cpu" if local.device.type == "meta" else local.device}
            made = [torch.empty_strided(local.shape, local.stride(), **like) for _ in range(2)]
            copies[id(parameter)] = made[0].requires_grad_()
            made[0].grad = made[1]
        try:
            return _watched(live, dry_twin(optimizer, copies, settings), list(copies.values()), clip, 2)
        except ArithmeticError:
            return None


def _on_small(optimizer: Optimizer, clip: bool, settings: Mapping[str, Any]) -> UpdateMemory:
    """By real parameters of two small sizes, extended to the true number of elements."""
    trained, closing = _trained(optimizer), takes_closure(optimizer)
    elements = sum(here(p).numel() for p in trained)
    sizes, found = [], []
    for most in ELEMENTS:
        if closing:
            most = max(16, most * ELEMENTS_WITH_CLOSURE // (ELEMENTS[-1] * len(trained)))
        with generators.Own(), Allocations(_kind(optimizer)) as live:
            copies = {id(p): _small(here(p), most) for p in trained}
            small = list(copies.values())
            sizes.append(sum(p.numel() for p in small))
            found.append(_watched(live, dry_twin(optimizer, copies, settings), small, clip, MOST_STEPS, closing))
    grown, more = sizes[1] - sizes[0], elements - sizes[1]
    if not grown:
        return found[1]
    return UpdateMemory(*(max(0, math.ceil(b + (b - a) * more / grown)) for a, b in zip(*found, strict=True)))


def _watched(
    live: Allocations,
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    clip: bool,
    steps: int,
    closing: bool = False,
) -> UpdateMemory:
    """Of an optimizer over parameters that have gradients, all of them made while watching."""
    before = live.now
    loss, beside = 0.0, 0

    def closure() -> float:
        nonlocal loss, beside
        loss, beside = loss - 1.0, max(beside, live.now - before)
        with torch.no_grad():
            for parameter in parameters:  # those of a bowl with noise: no step is the last one
                parameter.grad.normal_().add_(parameter)  # type: ignore[union-attr]
        return loss

    state, highest, settled = -1, 0, 0
    for _ in range(steps):
        highest = max(highest, live.most(lambda: run_step(optimizer, closure if closing else None)))
        held, state = state, live.now - before
        settled = settled + 1 if abs(state - held) <= state // 1000 else 0
        if settled >= SETTLED:
            break
    temporaries = highest - before - state
    if clip:
        temporaries = max(temporaries, live.most(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)) - live.now)
    return UpdateMemory(state, max(0, temporaries), max(0, beside - state))


def _small(parameter: torch.Tensor, most: int) -> torch.Tensor:
    """A parameter of as many dimensions with a gradient, and with at most so many elements, where the shape allows."""
    shape = list(parameter.shape)
    while math.prod(shape) > most and max(shape) > 1:
        longest = shape.index(max(shape))
        shape[longest] = (shape[longest] + 1) // 2
    made = drawn(parameter, shape)
    made.requires_grad_().grad = torch.randn_like(made)
    return made


def drawn(parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Random numbers in another shape where a parameter lies; on the CPU for one without numbers."""
    fake = isinstance(parameter, _compat.FakeTensor) or parameter.device.type == "meta"
    return torch.randn(shape, device="cpu" if fake else parameter.device).to(parameter.dtype)


def _bytes_of_state(state: Any) -> int:
    """Of all tensors in a state, those in lists and mappings too, next to the parameters that they are for."""
    return distinct_bytes(
        tensor
        for key, value in state.items()
        for tensor in map(here, tensors(value))
        if not isinstance(key, torch.Tensor) or tensor.device.type == key.device.type
    )
