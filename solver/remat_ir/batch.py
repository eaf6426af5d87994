"""A graph captured at one batch size, at any other: what grows, what stays, and the largest batch that a plan holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from .answer import Answer
from .errors import InvalidData, InvalidPlan
from .graph import Graph
from .plan import Plan
from .problem import Problem
from .proof import InvalidProof, Proof, certain_need
from .verify import verify
from .verify_answer import certificate_for

LARGEST_BATCH = 10**6
"""The largest batch that is looked at."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch found, and the largest that is not proved impossible.

    Attributes:
        batch: the largest batch with a verified plan, 0 if there is none.
        bound: no batch above it has a plan within the budget and the cost; equal to `batch` when that is optimal.
            `BatchFamily.impossible` shows it of the next one, and so of all above.
        most_cost_ns: the cost that a plan may have at the batch of the capture.
        answer: the plan at `batch`, verified on the graph scaled to it; None if there is none.
        seconds: what the search took.
        proof: the certificate that the batch above `bound` has none; None where none is needed, or there is none.
        claimed_by: who says so without one; None where it is certified.
    """

    batch: int
    bound: int
    most_cost_ns: int
    answer: Answer | None
    seconds: float
    proof: Proof | None = None
    claimed_by: str | None = None

    @property
    def proved(self) -> bool:
        """Whether no larger batch is possible."""
        return self.batch == self.bound


@dataclass(frozen=True)
class BatchFamily:
    """One problem for each batch size (Checkmate, equation 9): costs, workspaces and some values grow in proportion.

    Sizes are rounded up, so that a batch never needs less than a smaller one. Costs stay those of the capture, so that
    one limit on the cost is exact at every batch.

    Args:
        graph: as captured.
        budget_bytes: fixed bytes included.
        batch: that of the capture.
        values: the values that grow; None means all that are not kept to the end, as gradients of parameters are.
        batch_bytes: how many of the fixed bytes are the input batch, and grow.

    Raises:
        InvalidData: a batch below 1, a value that there is not, `batch_bytes` above the fixed bytes.

    >>> from remat_ir import graph_of
    >>> family = BatchFamily(graph_of([1, 2], [4, 6], [[], [0]], fixed_bytes=10), 40)
    >>> family.scaled(3).value_bytes, family.scaled(3).op_cost_ns, family.at(3).budget_bytes
    ((12, 18), (3, 6), 20)
    """

    graph: Graph
    budget_bytes: int
    batch: int = 1
    values: tuple[int, ...] | None = None
    batch_bytes: int = 0

    def __post_init__(self) -> None:
        if type(self.batch) is not int or not 1 <= self.batch <= LARGEST_BATCH:
            raise InvalidData(f"batch must be an integer from 1 to {LARGEST_BATCH}, not {self.batch!r}", "/batch")
        if not 0 <= self.batch_bytes <= self.graph.fixed_bytes:
            raise InvalidData(
                f"batch_bytes must be from 0 to the {self.graph.fixed_bytes} fixed bytes, not {self.batch_bytes}",
                "/batch_bytes",
            )
        for i, value in enumerate(self.values or ()):
            if not 0 <= value < self.graph.values:
                raise InvalidData(f"batch_values[{i}]: there is no value {value}", f"/batch_values/{i}")

    @cached_property
    def growing(self) -> frozenset[int]:
        """The values that grow."""
        if self.values is not None:
            return frozenset(self.values)
        return frozenset(range(self.graph.values)) - frozenset(self.graph.keep)

    @cached_property
    def uniform(self) -> bool:
        """Whether all but fixed bytes grows from a batch of 1: then a batch is the same graph in a smaller budget."""
        grows = self.growing
        return self.batch == 1 and all(not size or v in grows for v, size in enumerate(self.graph.value_bytes))

    def at(self, size: int) -> Problem:
        """The problem of a batch, with the costs of the capture.

        Raises:
            InvalidData: its bytes overflow.
        """
        if not self.uniform:
            return Problem(self._sized(size), self.budget_bytes)
        staying = self.graph.fixed_bytes - self.batch_bytes
        return Problem(self.graph, max(0, staying + (self.budget_bytes - staying) // size))

    def scaled(self, size: int) -> Graph:
        """The graph of a batch, its costs too, without names.

        Raises:
            InvalidData: its bytes or costs overflow.
        """
        return replace(self._sized(size), op_cost_ns=tuple(self._grown(cost, size) for cost in self.graph.op_cost_ns))

    def most_cost_ns(self) -> int:
        """The right side of equation 9: one additional forward pass, so the forward ops twice and the backward once.

        Raises:
            InvalidData: the graph does not say where its backward pass begins.
        """
        return one_forward_pass_more(self.graph)

    def largest(self, plan: Plan) -> int:
        """The largest batch at which a plan fits (equation 10), at most `LARGEST_BATCH` where not all grows."""
        if not self.uniform:
            return self._last(lambda problem: verify(problem, plan).peak_bytes <= problem.budget_bytes)
        peak = verify(Problem(self.graph, 2**53), plan).peak_bytes
        return self._quotient(peak)

    def ceiling(self, least: Callable[[Graph], int]) -> int:
        """The largest batch whose least need is within the budget; 0 where there is none.

        Args:
            least: bytes that every plan of a graph needs.

        Raises:
            InvalidData: nothing that is needed grows with the batch; or there is a link to the host. Its copies grow
                and ops do not at one limit on the cost, and the host's limit is one for every batch.
        """
        if self.graph.link is not None:
            raise InvalidData(
                "the largest batch is that of plans that move nothing to the host: leave link out", "/link"
            )
        if self.uniform:
            need = least(self.graph)
            if need - self.graph.fixed_bytes + self.batch_bytes <= 0:
                raise InvalidData("nothing in the graph grows with the batch, so there is no largest one")
            return self._quotient(need)
        found = self._last(lambda problem: least(problem.graph) <= problem.budget_bytes)
        if found == LARGEST_BATCH:
            raise InvalidData(f"nothing in the graph that every plan needs grows enough: a batch of {found} may fit")
        return found

    def impossible(self, size: int, most_cost_ns: int, proof: Proof | None = None) -> bool:
        """Whether it is certain that no plan at a batch fits and costs at most so much, and so at no larger one.

        By what each op once costs, by what one op alone needs, or by a certificate, checked here.
        """
        if most_cost_ns < self.graph.total_cost_ns:
            return True
        try:
            problem = self.at(size)
        except InvalidData:  # more bytes than can be counted, which is no proof
            return False
        if certain_need(problem.subject) > problem.budget_bytes:
            return True
        if proof is None:
            return False
        try:
            bound_ns = certificate_for(problem, proof).bound_ns
        except InvalidProof:
            return False
        return bound_ns is None or bound_ns > most_cost_ns

    def _quotient(self, peak: int) -> int:
        staying = self.graph.fixed_bytes - self.batch_bytes
        return max(0, (self.budget_bytes - staying) // (peak - staying))

    def _last(self, fits: Callable[[Problem], bool]) -> int:
        def exceeds(size: int) -> bool:
            try:
                return not fits(self.at(size))
            except (InvalidData, InvalidPlan):  # more bytes than any budget counts, or than this one
                return True

        return bisect_left(range(1, LARGEST_BATCH + 1), True, key=exceeds)

    def _grown(self, number: int, size: int) -> int:
        return -(-number * size // self.batch)

    def _sized(self, size: int) -> Graph:
        graph = self.graph
        return replace(
            graph,
            op_workspace_bytes=tuple(self._grown(number, size) for number in graph.op_workspace_bytes),
            value_bytes=tuple(
                self._grown(number, size) if value in self.growing else number
                for value, number in enumerate(graph.value_bytes)
            ),
            fixed_bytes=graph.fixed_bytes - self.batch_bytes + self._grown(self.batch_bytes, size),
            op_names=None,
            value_names=None,
        )


def one_forward_pass_more(graph: Graph) -> int:
    """The right side of equation 9 (Checkmate): twice the forward ops and once the backward ones, in ns.

    Raises:
        InvalidData: the graph does not say where its backward pass begins.

    >>> from remat_ir import graph_of
    >>> one_forward_pass_more(graph_of([3, 5], [1, 1], [[], [0]], backward_from=1))
    11
    """
    if graph.backward_from is None:
        raise InvalidData("the graph marks no backward pass, so one more forward pass has no cost", "/backward_from")
    return graph.total_cost_ns + sum(graph.op_cost_ns[: graph.backward_from])
