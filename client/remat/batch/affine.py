"""The graph of a training step at a size that was never captured, from its graphs at two others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat_ir import Graph

from ..planning.greedy import same_structure
from ..profiling.timing import affine


def between(one: tuple[int, Graph], other: tuple[int, Graph], size: int) -> Graph:
    """The graph at a size (batch, sequence length), from two sizes and graphs of one structure, each number affine.

    Bytes and costs are rounded up. A number that shrinks with the size is taken as the larger of the two. One that
    grows faster than the size is taken as proportional below the larger size, which is never too little there; above
    it a cost is, too, since the difference of two small measurements is mostly noise.

    Raises:
        ValueError: the same size twice, or graphs of two structures.
    """
    (low, small), (high, large) = sorted((one, other), key=lambda pair: pair[0])
    if low == high or not same_structure(small, large):
        raise ValueError(f"sizes {low} and {high} do not span a family of graphs")

    def fitted(a: Sequence[int], b: Sequence[int], measured: bool = False) -> tuple[int, ...]:
        proportional = measured or size < high
        return tuple(affine(x, y, low, high, size, proportional) for x, y in zip(a, b, strict=True))

    return replace(
        large,
        op_cost_ns=fitted(small.op_cost_ns, large.op_cost_ns, measured=True),
        op_workspace_bytes=fitted(small.op_workspace_bytes, large.op_workspace_bytes),
        value_bytes=fitted(small.value_bytes, large.value_bytes),
        fixed_bytes=affine(small.fixed_bytes, large.fixed_bytes, low, high, size, size < high),
    )
