"""The check of a certificate: plain Python integers, no tolerance, no code of any solver.

A leaf has a multiplier y_r > 0 for some rows A_r x ≤ b_r that hold for every plan's point x. With x_j in [l_j, u_j],

    c x ≥ c x + Σ_r y_r (A_r x − b_r) ≥ − Σ_r y_r b_r + Σ_j min((c + Aᵀy)_j l_j, (c + Aᵀy)_j u_j)

so the right side is a bound on the cost of recomputation there, whatever y is. With c = 0 a right side above 0 says
that there is no such point. The leaves of a tree cover all points, since it splits them by columns that are 0 or 1. So
the least of their bounds holds for all plans; since costs are whole ns it may be rounded up. Rows may hold for plans
alone that are cheaper than they say (P11): the bound of a tree that refers to them is no greater than that. Of several
trees, one after the other, each proves its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..chain import Chain
from ..graph import Graph
from ..problem import Problem
from ..subject import Subject
from .certificate import Branch, Column, Leaf, Row, StageProof
from .rounding import KIND, Rounding, rounded
from .rows import Inequality, InvalidProof, Relaxation, least
from .transfers import LinkRelaxation

MOST_WORK = 50_000_000
"""Terms that all leaves together may add up."""


class Proved(NamedTuple):
    """What a certificate proves of every plan of the whole space: it costs at least `bound_ns`; None: there is none."""

    bound_ns: int | None


def certifiable(subject: Subject) -> bool:
    """Whether there are certificates about a subject: about a graph and, by its lift, a chain without a link."""
    return isinstance(subject, Graph) or (isinstance(subject, Chain) and subject.link is None)


def graph_of_subject(problem: Problem) -> Graph:
    """The graph whose plans a certificate speaks of.

    Raises:
        InvalidProof: there is none.
    """
    subject = problem.subject
    if not certifiable(subject):
        raise InvalidProof(f"certificates are for graphs, and for chains without a link, not for this {problem.kind}")
    return subject.to_graph() if isinstance(subject, Chain) else problem.graph


def relaxation_of(
    graph: Graph, capacity: int, cuts: tuple[int, ...], spans: tuple[tuple[int, int], ...] = ()
) -> Relaxation:
    """The relaxation of a graph, that with transfers where it has a link.

    Raises:
        InvalidProof: cuts or spans that are none.
    """
    kind = Relaxation if graph.link is None else LinkRelaxation
    return kind(graph, capacity, cuts, spans)


def prove_stages(graph: Graph, capacity: int, proof: StageProof, share: int = 1) -> Proved:
    """The greatest bound of a tree, of each the least of its leaves; for one of `share` such checks."""
    on = relaxation_of(graph, capacity, proof.cuts, proof.spans)
    on.most_terms //= share
    rows: list[Inequality] = []
    for row in proof.rows:
        rows.append(inequality(on, rows, row))
    if proof.denominator < 1:
        raise InvalidProof("the denominator must be positive")
    pending: list[dict[Column, int]] = [{}]
    trees: list[int | None] = []
    lowest: int | None = None
    extra: int | None = None
    work = 0
    for node in proof.nodes:
        box = pending.pop()
        work += len(box)
        if isinstance(node, Branch):
            if node.column in box or not on.is_column(node.column) or on.upper(node.column) != 1:
                raise InvalidProof(f"a branch needs a column that is 0 or 1 and not fixed, not {node.column}")
            pending += [{**box, node.column: 1}, {**box, node.column: 0}]
        else:
            work += sum(len(rows[r].terms) for r, _ in node.duals if 0 <= r < len(rows))
            bound = leaf_bound(on, rows, node, box, proof.denominator)
            extra = least((extra, *(rows[r].extra_ns for r, _ in node.duals)))
            if node.empty and bound <= 0:
                raise InvalidProof("a leaf without points is not proved to have none")
            if not node.empty:
                lowest = least((lowest, bound))
        if work > MOST_WORK // share:
            raise InvalidProof(f"the tree takes more than {MOST_WORK // share} steps to check")
        if not pending:
            trees.append(least((None if lowest is None else -(-lowest // proof.denominator), extra)))
            pending, lowest, extra = [{}], None, None
    if pending != [{}] or not trees:
        raise InvalidProof("the tree lacks leaves")
    known = [each for each in trees if each is not None]
    whole = graph.total_cost_ns + max(0, *known) if len(known) == len(trees) else None
    return Proved(on.limited(whole))


def inequality(on: Relaxation, rows: Sequence[Inequality], row: Row) -> Inequality:
    """A row written from the problem, or rounded from the rows before it.

    Raises:
        InvalidProof: there is no such row for this problem, or it does not hold.
    """
    return rounded(on, rows, Rounding.of(row)) if row[0] == KIND else on.inequality(row)


def leaf_bound(on: Relaxation, rows: Sequence[Inequality], leaf: Leaf, box: dict[Column, int], denominator: int) -> int:
    """The bound of a leaf over the denominator; of an empty one, that of costs that are 0."""
    reduced = {column: 0 for column, fixed in box.items() if fixed}
    total = 0
    for r, multiplier in leaf.duals:
        if not 0 <= r < len(rows):
            raise InvalidProof(f"a leaf refers to row {r} of {len(rows)}")
        if multiplier <= 0:
            raise InvalidProof(f"a multiplier must be positive, not {multiplier}")
        total -= multiplier * rows[r].most
        for column, coefficient in rows[r].terms.items():
            reduced[column] = reduced.get(column, 0) + multiplier * coefficient
    for column, weight in reduced.items():
        if not leaf.empty:
            weight += denominator * on.cost(column)
        fixed = box.get(column)
        total += min(0, weight * on.upper(column)) if fixed is None else fixed * weight
    return total
