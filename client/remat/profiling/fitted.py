"""What a kernel costs at a size at which it was not timed: from the same kernel of the same step at two others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..capture.dataflow import tensors

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


def fitted_cost(node: fx.Node, others: Sequence[tuple[fx.Node, int]]) -> int | None:
    """The cost in ns of a kernel of a size between two at which it was measured; None: it has to be measured.

    The size is that of all that it reads and writes. A cost that grows no faster is a straight line with little doubt:
    taken between any two sizes, and down to half the smallest. One that does is overestimated, between near sizes.

    Args:
        others: the same kernel of the step at other sizes, with what it was measured to cost.
    """
    here = elements(node)
    sizes = sorted({elements(other): cost for other, cost in others}.items())
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
    read = (t for argument in node.all_input_nodes for t in tensors(argument.meta.get("val")))
    return sum(int(t.numel()) for t in (*read, *tensors(node.meta.get("val"))))


def same_kernels(kernels: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
    """Whether two steps run the same operators in the same order."""
    return [n.target for n in kernels] == [n.target for n in others]


Costs = Mapping[fx.Node, int]
"""What the kernels of a step were measured to cost, in ns, in the order in which they run."""
