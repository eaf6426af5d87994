"""The largest batch that trains on a device: two sizes are captured, the others follow by affine numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from remat_ir import Answer, Graph, Plan, Problem, plain_peak

from ..batch.largest import between, quick_look, within
from ..errors import CaptureError
from ..planning.greedy import same_structure
from ..planning.profiles import Profile
from ..profiling.timing import affine, same_kernels
from ..training.step import TrainingStep

MOST_BATCH = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The largest batch that was found to fit.

    Attributes:
        size: 0: not even one fits.
        overhead: of its plan, as a share of plain training's time.
    """

    size: int
    overhead: float


def figures_of(curve: Sequence[Answer], plain: int | None, planned: Batch | None) -> dict[str, object]:
    """A curve and the largest batches, as JSON has them."""
    return {
        "curve": [{"budget_bytes": answer.budget_bytes, "overhead": answer.overhead} for answer in curve],
        "largest_plain_batch": plain,
        "largest_planned_batch": None if planned is None else planned.size,
        "largest_planned_overhead": None if planned is None else planned.overhead,
    }


def largest(holds: Callable[[int], bool]) -> int:
    """The largest size that holds, by doubling and bisection; 0: none."""
    low, high = 0, 1
    while high <= MOST_BATCH and holds(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def largest_that(promised: Callable[[int], bool], overhead: Callable[[int], float | None], most: float) -> Batch:
    """The largest batch that is promised, and a little less where it does not come true.

    Args:
        overhead: of a plan for what is captured at a batch; None: there is none.
        most: that a plan may cost.
    """
    size = largest(promised)
    while size:
        found = overhead(size)
        if found is not None and found <= most:
            return Batch(size, found)
        size = min(size - 1, int(size * 0.95))
    return Batch(0, 0.0)


class Family(Generic[T]):
    """Something by batch: two are captured, those between and beyond them are fitted.

    Args:
        capture: makes one at a batch.
        fit: makes one from two of other batches.
        known: one that is there, and its batch.
    """

    def __init__(
        self,
        capture: Callable[[int], T],
        fit: Callable[[tuple[int, T], tuple[int, T], int], T],
        known: tuple[int, T] | None,
    ) -> None:
        self._capture, self._fit = capture, fit
        self._captured: dict[int, T] = {} if known is None else dict([known])
        first = known[0] if known is not None and known[0] > 1 else 2  # a batch of one has strides of its own
        self.pair = first, 2 * first
        for size in self.pair:
            self.captured(size)

    def captured(self, size: int) -> T:
        """The one at a batch, captured there."""
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def __getitem__(self, size: int) -> T:
        if size in self._captured:
            return self._captured[size]
        one, other = ((size, self._captured[size]) for size in self.pair)
        return self._fit(one, other, size)


def check_same(one: Graph, other: Graph, sizes: tuple[int, int]) -> None:
    """Refuse steps of two batches that are two programs.

    Raises:
        CaptureError: they are.
    """
    if not same_structure(one, other):
        raise CaptureError(
            f"the step is another program at a batch of {sizes[1]} than at one of {sizes[0]}; give batch= to ask about "
            "one size"
        )


def step_between(one: tuple[int, TrainingStep], other: tuple[int, TrainingStep], size: int) -> TrainingStep:
    """A training step at a batch, from those of two others: for predictions alone, since it is the larger one's code.

    Raises:
        CaptureError: they are not one program.
    """
    (low, small), (high, large) = sorted((one, other), key=lambda pair: pair[0])
    ours, theirs = large.operations.flow.kernels, small.operations.flow.kernels
    check_same(small.graph, large.graph, (low, high))
    if not same_kernels(ours, theirs) or len(small.operations.sizes) != len(large.operations.sizes):
        raise CaptureError(f"the step runs other kernels at a batch of {high} than at one of {low}")

    def fitted(a: int, b: int, measured: bool = False) -> int:
        return affine(a, b, low, high, size, measured or size < high)

    pairs = [(n, small.profiled.kernels[m], large.profiled.kernels[n]) for m, n in zip(theirs, ours, strict=True)]
    kernels = {
        node: Profile(fitted(a.cost_ns, b.cost_ns, True), fitted(a.workspace_bytes, b.workspace_bytes))
        for node, a, b in pairs
    }
    sizes = tuple(fitted(a, b) for a, b in zip(small.operations.sizes, large.operations.sizes, strict=True))
    return replace(
        large,
        operations=replace(large.operations, sizes=sizes),
        graph=between((low, small.graph), (high, large.graph), size),
        profiled=large.profiled._replace(kernels=kernels),
        fixed={name: fitted(small.fixed[name], value) for name, value in large.fixed.items()},
    )


class GraphBatches:
    """The graph of a step by batch, and plans of it that are good enough.

    Args:
        capture: makes one at a batch.
        known: one that is there, and its batch.
        memory: bytes for tensors.
        most: that a plan may cost more, as a share of plain training's time.
        ask: plans a problem.
        phase: called with what is done from now on.
    """

    def __init__(
        self,
        capture: Callable[[int], Graph],
        known: tuple[int, Graph] | None,
        memory: int,
        most: float,
        ask: Callable[[Problem], Answer],
        phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._capture, self._given, self._ask, self._phase = capture, known, ask, phase
        self._memory, self._most = memory, most
        self._plans: list[Plan] = []
        self._known = ""

    @cached_property
    def _graphs(self) -> Family[Graph]:
        graphs = Family(self._capture, between, self._given)
        low, high = graphs.pair
        check_same(graphs.captured(low), graphs.captured(high), graphs.pair)
        return graphs

    def plain(self) -> int:
        """The largest batch that trains without a plan.

        Raises:
            CaptureError: two batches are two programs.
        """
        found = largest(lambda size: plain_peak(self._graphs[size]) <= self._memory)
        self._known = f"{found} without a plan"
        return found

    def planned(self) -> Batch:
        """The largest batch for which a plan is found that costs no more than is asked for, captured and planned.

        Raises:
            CaptureError: two batches are two programs.
        """

        def overhead(size: int) -> float | None:
            self._phase(f"capturing and planning at a batch of {size}; {self._known}")
            return self._ask(Problem(self._graphs.captured(size), self._memory)).overhead

        return largest_that(self._promised, overhead, self._most)

    def _promised(self, size: int) -> bool:
        """Whether an earlier plan or a greedy one is good enough at a batch."""
        problem = Problem(self._graphs[size], self._memory)
        if any(within(problem, plan, self._most) for plan in reversed(self._plans)):
            return True
        self._phase(f"is there a plan at a batch of {size}? {self._known}".rstrip())
        found = quick_look(problem)
        if not isinstance(found.plan, Plan) or (found.overhead or 0.0) > self._most:
            return False
        self._plans.append(found.plan)
        self._known = ", ".join([*self._known.split(", ")[:1], f"{size} by a plan as fitted"])
        return True
