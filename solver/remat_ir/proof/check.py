"""The check of a certificate: plain Python integers, no tolerance, no code of any solver.

A leaf has a multiplier y_r > 0 for some rows A_r x ≤ b_r that hold for every plan's point x. With x_j in [l_j, u_j],

    c x ≥ c x + Σ_r y_r (A_r x − b_r) ≥ − Σ_r y_r b_r + Σ_j min((c + Aᵀy)_j l_j, (c + Aᵀy)_j u_j)

so the right side is a bound on the cost of recomputation there, whatever y is. With c = 0 a right side above 0 says
that there is no such point. The leaves of a tree cover all points, since it splits them by columns that are 0 or 1. So
the least of their bounds holds for all plans; since costs are whole ns it may be rounded up. Rows may hold for plans
alone that are cheaper than they say (P11): the bound of a tree that refers to them is no greater than that. Of several
trees, one after the other, each proves its bound.

Rows follow from earlier rows by rounding (P10), too: `("round", divisor, coarser, most, …)`. Every column of a plan's
point is a whole number from 0 on, and every row has whole numbers. So rows may be added up with whole multipliers,
columns that are 0 or 1 replaced by 1 − x, the sum divided, and its coefficients rounded: mixed-integer rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..chain import Chain
from ..graph import Graph
from ..problem import Problem, Subject
from .certificate import Branch, Column, Leaf, Row, StageProof
from .rows import Inequality, InvalidProof, Relaxation, least
from .transfers import LinkRelaxation

KIND = "round"
LARGEST = 2**64
"""No coefficient of a rounded row may be larger, so that rows from rows from rows keep to a few words."""


class Rounding(NamedTuple):
    """How a rounded row follows.

    Attributes:
        divisor: d ≥ 1.
        coarser: t ≥ 1, by which the row is divided and rounded down in the end.
        most: at least the right side of the sum of rows; it is taken in its place.
        complemented: which columns of the sum are taken as 1 − x, by their positions among them in order.
        added: rows and their multipliers > 0. taken: rows that are taken away, with theirs; their slacks count.
    """

    divisor: int
    coarser: int
    most: int
    complemented: tuple[int, ...]
    added: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, row: Row) -> Rounding:
        """Read a row of this kind.

        Raises:
            InvalidProof: it is none.
        """
        numbers = [int(number) for number in row[1:]]
        if len(numbers) < 5 or not 0 <= numbers[3] <= len(numbers) - 5:
            raise InvalidProof("a rounded row lists divisor, coarser, most, columns, and rows with multipliers")
        divisor, coarser, most, count = numbers[:4]
        pairs = numbers[5 + count :]
        added = numbers[4 + count]
        if len(pairs) % 2 or not 0 <= 2 * added <= len(pairs):
            raise InvalidProof("a rounded row lists rows and multipliers in turn")
        each = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        return cls(divisor, coarser, most, tuple(numbers[4 : 4 + count]), each[:added], each[added:])

    def row(self) -> Row:
        """The row as a certificate lists it."""
        pairs = (number for pair in (*self.added, *self.taken) for number in pair)
        numbers = (self.divisor, self.coarser, self.most, len(self.complemented), *self.complemented)
        return (KIND, *numbers, len(self.added), *pairs)

    def renumbered(self, place: Mapping[int, int]) -> Rounding | None:
        """The same with other numbers for the rows; None where one of them has none."""
        if any(r not in place for r, _ in (*self.added, *self.taken)):
            return None
        return self._replace(
            added=tuple((place[r], y) for r, y in self.added), taken=tuple((place[r], y) for r, y in self.taken)
        )


class Sum(NamedTuple):
    """Σ coefficient · column − (slacks of the rows taken away) ≤ most; `back` − Σ are these slacks."""

    terms: dict[Column, int]
    most: int
    slack_terms: dict[Column, int]
    slack_most: int

    def columns(self) -> list[Column]:
        """Those that there are, in order: what `complemented` counts."""
        return sorted(column for column, weight in self.terms.items() if weight)


def summed(on: Relaxation, rows: Sequence[Inequality], rounding: Rounding) -> Sum:
    """The sum of rows that a rounding starts from.

    Raises:
        InvalidProof: a row that is not before this one, or a multiplier that is not positive.
    """
    for r, multiplier in (*rounding.added, *rounding.taken):
        if not 0 <= r < len(rows):
            raise InvalidProof(f"a rounded row refers to row {r}, which is not before it")
        if multiplier <= 0:
            raise InvalidProof(f"a multiplier must be positive, not {multiplier}")
        on.count(len(rows[r].terms))
    terms, most = added_up(rows, rounding.added)
    slack_terms, slack_most = added_up(rows, rounding.taken)
    for column, weight in slack_terms.items():
        terms[column] = terms.get(column, 0) - weight
    return Sum(terms, most - slack_most, slack_terms, slack_most)


def added_up(rows: Sequence[Inequality], multiplied: Iterable[tuple[int, int]]) -> tuple[dict[Column, int], int]:
    """The terms and the right side of a sum of rows, each with its multiplier."""
    terms: dict[Column, int] = {}
    most = 0
    for r, multiplier in multiplied:
        most += multiplier * rows[r].most
        for column, coefficient in rows[r].terms.items():
            terms[column] = terms.get(column, 0) + multiplier * coefficient
    return terms, most


def rounded(on: Relaxation, rows: Sequence[Inequality], rounding: Rounding) -> Inequality:
    """P10, from earlier rows.

    With m_r the multipliers, s_r ≥ 0 the slacks, d the divisor, and after columns were complemented a_j = q_j d + f_j
    and b = q d + f: Σ ((d − f) q_j + max(0, f_j − f)) x_j − Σ_{r taken} |m_r| s_r ≤ (d − f) q.

    Raises:
        InvalidProof: it does not follow.
    """
    divisor, coarser = rounding.divisor, rounding.coarser
    if divisor < 1 or coarser < 1:
        raise InvalidProof("a rounded row divides by positive numbers")
    total = summed(on, rows, rounding)
    if total.most > rounding.most:
        raise InvalidProof(f"the sum of the rows allows {total.most}, more than the rounded row says")
    columns = total.columns()
    flipped = set(rounding.complemented)
    if len(flipped) != len(rounding.complemented) or not all(0 <= j < len(columns) for j in flipped):
        raise InvalidProof("a rounded row complements columns that are not there, or one twice")
    names = {columns[j] for j in flipped}
    if any(on.upper(column) != 1 for column in names):
        raise InvalidProof("a rounded row complements a column that may be more than 1")
    whole, f = divmod(rounding.most - sum(total.terms[column] for column in names), divisor)
    most = (divisor - f) * whole + total.slack_most
    terms = dict(total.slack_terms)
    for column in columns:
        sign = -1 if column in names else 1
        q, part = divmod(sign * total.terms[column], divisor)
        weight = (divisor - f) * q + max(0, part - f)
        if sign < 0:  # weight · (1 − x)
            most -= weight
        terms[column] = terms.get(column, 0) + sign * weight
    # x ≥ 0 is whole, so coefficients may be rounded down, and then the right side
    terms = {column: weight // coarser for column, weight in terms.items() if weight // coarser}
    made = Inequality(terms, most // coarser, least(rows[r].extra_ns for r, _ in rounding.added + rounding.taken))
    if max((abs(weight) for weight in terms.values()), default=0) > LARGEST or abs(made.most) > LARGEST:
        raise InvalidProof("a rounded row has numbers that are too large")
    return made


MOST_WORK = 50_000_000
"""Terms that all leaves together may add up."""


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


def prove_stages(graph: Graph, capacity: int, proof: StageProof, share: int = 1) -> int | None:
    """The greatest bound of a tree, of each the least of its leaves; None: no plan. For one of `share` such checks."""
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
    return on.limited(whole)


def inequality(on: Relaxation, rows: Sequence[Inequality], row: Row) -> Inequality:
    """A row written from the problem, or rounded from the rows before it.

    Raises:
        InvalidProof: there is no such row for this problem, or it does not hold.
    """
    return rounded(on, rows, Rounding.of(row)) if row[0] == KIND else on.inequality(row)


def leaf_bound(on: Relaxation, rows: Sequence[Inequality], leaf: Leaf, box: dict[Column, int], denominator: int) -> int:
    """The bound of a leaf over the denominator; of an empty one, that of costs that are 0."""
    for r, multiplier in leaf.duals:
        if not 0 <= r < len(rows):
            raise InvalidProof(f"a leaf refers to row {r} of {len(rows)}")
        if multiplier <= 0:
            raise InvalidProof(f"a multiplier must be positive, not {multiplier}")
    terms, most = added_up(rows, leaf.duals)
    reduced = {column: 0 for column, fixed in box.items() if fixed} | terms
    total = -most
    for column, weight in reduced.items():
        if not leaf.empty:
            weight += denominator * on.cost(column)
        fixed = box.get(column)
        total += min(0, weight * on.upper(column)) if fixed is None else fixed * weight
    return total
