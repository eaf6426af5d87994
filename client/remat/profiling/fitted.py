"""What a kernel costs at a size at which it was not timed: from the same kernel of the same step at two others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..capture.dataflow import tensors

WIDEST = 4
"""The larger of the two sizes may be so many times the smaller: a straight line is no good over more."""


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


def between_sizes(node: fx.Node, others: Sequence[tuple[fx.Node, int]]) -> int | None:
    """The cost in ns of a kernel of a size between two at which it was measured; None: between no two near ones.

    The size is that of all that it reads and writes. What grows faster than that is overestimated.

    Args:
        others: the same kernel of the step at other sizes, with what it was measured to cost.
    """
    here = elements(node)
    sizes = [(elements(other), cost) for other, cost in others]
    low = max((pair for pair in sizes if pair[0] < here), default=None)
    high = min((pair for pair in sizes if pair[0] > here), default=None)
    if low is None or high is None or high[0] > WIDEST * low[0]:
        return None
    return affine(low[1], high[1], low[0], high[0], here, proportional=True)


def elements(node: fx.Node) -> int:
    """The elements of the tensors that a kernel reads and writes."""
    read = (t for argument in node.all_input_nodes for t in tensors(argument.meta.get("val")))
    return sum(int(t.numel()) for t in (*read, *tensors(node.meta.get("val"))))


def same_kernels(kernels: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
    """Whether two steps run the same operators in the same order."""
    return [n.target for n in kernels] == [n.target for n in others]


Costs = Mapping[fx.Node, int]
"""What the kernels of a step were measured to cost, in ns, in the order in which they run."""
