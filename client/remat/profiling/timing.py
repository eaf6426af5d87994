"""What a kernel does, by its shapes, and how long it takes within a step: timed, or by itself at two other sizes."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .. import _compat
from ..capture.dataflow import tensors
from ..device import Accelerator, Device

log = logging.getLogger("remat")


VERSION = 4
"""Costs measured another way are not mixed with these."""

ROUNDS = 3
NOISY = 0.3
"""Half of the samples lie further apart than this share of the median, over all kernels: each is timed again."""

SAMPLES = 3
"""In each round, after one call that is not counted."""

LONGEST_NS = 60_000_000
"""Of one kernel in one round; a longer one is sampled less often."""

LARGEST_CACHE_BYTES = 64 * 2**20
"""Of larger ones, which many cores share, one step has no more."""

FILLS = 8
"""So often an accelerator fills its cache before a sample, which takes longer than the host needs for a launch."""


class Timed(NamedTuple):
    """Times in ns by name, and how far their samples lay apart (`spread_of`); None: there were none."""

    costs: dict[str, int]
    spread: float | None


def times(calls: Mapping[str, Callable[[], Callable[[], object]]], devices: Mapping[str, Device]) -> Timed:
    """The time of each kernel in ns, rounded.

    Within a step a kernel finds part of what it reads in the caches, and of what it writes nothing: between two calls
    half of the device's last cache is filled with something else. Kernels take turns, so that whatever else the machine
    does spoils few samples of each rather than all of one, and the median is taken. On the CPU with one thread the
    thread's own clock is read, to which other work on the machine adds nothing. Where samples lie far apart all the
    same, as many are taken again, and of all of them the lower quartile, since other work only ever adds time; the log
    says so.

    Args:
        calls: makes the kernel's inputs, and returns what runs it on them.
        devices: where each runs; its time is measured there.
    """
    samples: dict[str, list[float]] = {name: [] for name in sorted(calls)}
    crowds: dict[torch.device, torch.Tensor] = {}

    def take() -> float:
        """More samples of each; how far they lie apart."""
        for _ in range(ROUNDS):
            for name, found in samples.items():
                device = devices[name]
                if device.device not in crowds:
                    size = min(device.cache_bytes, LARGEST_CACHE_BYTES)
                    crowds[device.device] = torch.zeros(size // 2 // 4, device=device.device)
                with device.guard():
                    found.extend(_samples(calls[name](), device, crowds[device.device]))
        return spread_of(list(samples.values()))

    if not samples:
        return Timed({}, None)
    spread, part = take(), 2
    if spread > NOISY:
        again, part = take(), 4
        log.info(
            "times of kernels vary by %.0f %% between samples, and by %.0f %% with as many more: other work on this "
            "machine adds to them, and the quicker ones count (on a CPU one torch thread is timed by processor time)",
            100 * spread,
            100 * again,
        )
        spread = again
    return Timed({name: rounded(sorted(found)[len(found) // part]) for name, found in samples.items()}, spread)


def spread_of(samples: Sequence[Sequence[float]]) -> float:
    """How far the middle half of the samples lies apart, over all kernels, as a share of their medians.

    Example:
        >>> spread_of([[10.0, 10.0, 10.0, 10.0], [10.0, 20.0, 30.0, 40.0]])
        0.5
    """
    ordered = [sorted(found) for found in samples]
    apart = sum(found[3 * len(found) // 4] - found[len(found) // 4] for found in ordered)
    return apart / max(1.0, sum(found[len(found) // 2] for found in ordered))


def rounded(nanoseconds: float) -> int:
    """Two significant digits: what is measured twice should mostly come out the same."""
    value = max(1, round(nanoseconds))
    unit = 10 ** max(0, len(str(value)) - 2)
    return int(round(value / unit) * unit)


def _samples(call: Callable[[], object], device: Device, crowd: torch.Tensor) -> list[float]:
    if isinstance(device, Accelerator):  # short kernels vary more there

        def fill() -> None:
            for _ in range(FILLS):
                crowd.add_(1.0)

        for _ in range(3):
            call()
        return [statistics.median_high(device.elapsed_ns(call, fill) for _ in range(10))]
    call()
    found: list[float] = []
    begin = time.perf_counter_ns()
    while len(found) < SAMPLES and (not found or time.perf_counter_ns() - begin < LONGEST_NS):
        # what it makes is freed within the time, as it is in a step
        found.append(device.elapsed_ns(call, lambda: crowd.add_(1.0)))
    return found


WIDEST = 4
"""One that grows faster than its size is fitted only where the larger size is at most so many times the smaller."""

FASTER = 1.25
"""Growth beyond that of the size that may be noise."""


def affine(a: int, b: int, low: int, high: int, size: int, proportional: bool) -> int:
    """The number at a size, from `a` at `low` and `b` at `high`, rounded up.

    One that shrinks is taken as the larger of the two. One that grows faster than the size is taken as proportional to
    it if `proportional`, since the difference of two small measurements is mostly noise.
    """
    if b <= a:
        return max(a, b)
    at_zero = a * high - b * low  # times (high − low)
    if at_zero < 0 and proportional:
        return -(-b * size // high)
    return -(-(at_zero + (b - a) * size) // (high - low))


def fitted_cost(here: int, others: Sequence[tuple[int, int]]) -> int | None:
    """The cost in ns of a kernel of a size between two at which it was measured; None: it has to be measured.

    The size is that of all that it reads and writes, in elements. A cost that grows no faster is a straight line with
    little doubt: taken between any two sizes, and down to half the smallest. One that does is overestimated, between
    near sizes.

    Args:
        here: its size.
        others: the sizes of the same kernel of the step in other calls, with what it was measured to cost.
    """
    sizes = sorted(dict(others).items())
    above = [i for i, (size, _) in enumerate(sizes) if size > here]
    if len(sizes) < 2 or not above or any(size == here for size, _ in sizes):
        return None
    below = above[0] == 0
    (low, a), (high, b) = sizes[:2] if below else sizes[above[0] - 1 : above[0] + 1]
    straight = b * low <= FASTER * a * high
    if (below and (not straight or 2 * here < low)) or (not straight and high > WIDEST * low):
        return None
    return affine(a, b, low, high, here, proportional=True)


def elements(node: fx.Node) -> int:
    """The elements of the tensors that a kernel reads and writes."""
    return sum(int(t.numel()) for t in operands(node))


def same_kernels(kernels: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
    """Whether two steps run the same operators in the same order."""
    return [n.target for n in kernels] == [n.target for n in others]


FAR = 5.0
"""The factor by which a kernel may be off what others take for as much work; beyond it, it is looked at again."""

BALANCE = 8
"""Operations that take no longer than moving a byte does: a product of few operations is one that moves its bytes."""

SMALL = 100
"""Kernels below so small a part of the whole are not looked at: they are calls more than work."""


def operations_of(node: fx.Node) -> int:
    """Floating-point operations of a product, a convolution or an attention, by torch's own formulas; 0 for others."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    given: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    args, kwargs = given
    if node.target is torch.ops.aten.convolution_backward.default:
        return _operations_of_convolution_backward(*args)
    assert isinstance(node.target, _compat.OpOverload)
    if "scaled_dot_product" in _compat.operator_name(node.target):
        # torch 2.11 counts none with fewer heads of keys than of queries
        at = _compat.parameter_names(node.target).index("query")
        heads = args[at].shape[1]
        shared = [(t.shape[0], heads, *t.shape[2:]) for t in args[at + 1 : at + 3]]
        args = (*args[: at + 1], *shared, *args[at + 3 :])
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _operations_of_convolution_backward(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any) -> int:
    """Those of the convolution itself for each of its two gradients that is made.

    Torch up to 2.13 counts the weight's gradient as if each group read the channels of all groups.

    Args:
        how: the sizes of the bias, stride, padding, dilation, whether it is transposed, the padding of its output,
            groups, and which gradients are made: of the input, the weight and the bias.
    """
    *_, transposed, _, _, made = how
    places = math.prod((x if transposed else output).shape[2:])
    return 2 * int(x.shape[0]) * int(places) * int(weight.numel()) * sum(map(bool, made[:2]))


def bytes_of(tensor: torch.Tensor) -> int:
    """What of a tensor lies in memory: an expanded dimension is there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(size) if stride or size == 0 else 1
    return elements * tensor.element_size()


def operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a kernel reads, and those that it makes."""
    return [*read_by(node), *tensors(node.meta.get("val"))]


def read_by(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a kernel reads."""
    return [t for argument in node.all_input_nodes for t in tensors(argument.meta.get("val"))]


def outliers(costs: Mapping[str, int], nodes: Mapping[str, fx.Node]) -> list[str]:
    """The kernels that take far more or far less than a roofline of all of them suggests, what matters most first.

    No figure of the device is needed: what an operation and a byte take is the median over the kernels themselves, of
    products by their operations, of all others by their bytes.

    Args:
        costs: in ns, of each kind of kernel.
        nodes: a kernel of each kind.
    """
    least = sum(costs.values()) // SMALL
    work = {name: _work(nodes[name]) for name in sorted(costs)}
    rates: dict[bool, list[float]] = {}
    for name, (product, amount) in work.items():
        if costs[name] > least:
            rates.setdefault(product, []).append(costs[name] / amount)
    usual = {kind: statistics.median_low(found) for kind, found in rates.items()}
    found = {}
    for name, (product, amount) in work.items():
        expected = usual.get(product, 0.0) * amount
        low, high = sorted((costs[name], expected))
        if high > least and high > FAR * low:
            found[name] = high
    return sorted(found, key=lambda name: -found[name])


def _work(node: fx.Node) -> tuple[bool, int]:
    """Whether a kernel is a product, and its operations if it is, else its bytes."""
    operations, moved = operations_of(node), sum(map(bytes_of, operands(node)))
    return operations > 0, max(1, operations, BALANCE * moved) if operations else max(1, moved)
