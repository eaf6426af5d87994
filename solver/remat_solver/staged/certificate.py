"""From the floating-point duals of a round's program to a certificate in whole numbers, checked at once.

Duals belong to the scaled program that the engine was given; multipliers belong to the rows in ns and bytes that the
checker writes. Rounding them keeps every certificate valid and makes it weaker, so the denominator grows until what is
lost no longer counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from remat_ir import Plan, Problem, problem_digest
from remat_ir.proof import Branch, InvalidProof, Leaf, StageProof
from remat_ir.proof.certificate import MOST_NODES, MOST_ROWS, Row
from remat_ir.proof.check import KIND, Rounding, inequality, prove_stages, relaxation_of, summed
from remat_ir.proof.rows import CHEAPER, Inequality, Relaxation
from remat_ir.read import LARGEST_INTEGER

from ..array_view import Ids
from ..backends.outcome import CoverRow, Cutting, DerivedRow, Tree
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..program import Booleans, Floats, Program
from .rows import Round
from .scale import Scale, balance_of, row_factors
from .shorten import Solve, shortened

_IN_BYTES = ("memory", "rerun")
"""Kinds of rows that are divided by the unit of memory."""
_DENOMINATORS = (10**6, 10**9, 10**12)
"""Tried in turn; where costs are so large that multipliers would exceed 2^53, smaller ones."""
_NODE_S, _TIMED = 5e-4, 100
"""What a node is taken to need, in seconds, until a tree of so many has been written."""
_SHORTENING = 0.05
"""The share of the gap asked for that a certificate may lose in being shortened."""
_ROUGHER = 0.01
"""The share that what is kept for other costs and budgets may lose of what is proved beyond all ops once."""
LOSS = 1e-6
"""What rounding may lose of a bound, as a share of the cost of all ops once."""


class Certified(NamedTuple):
    """A certificate and what it proves: a bound in ns, or None, that no plan fits."""

    proof: StageProof
    bound_ns: int | None


@dataclass(frozen=True, eq=False)
class FloatLeaf:
    """A leaf as an engine leaves it, with duals of the balanced program or of its infeasibility; later multipliers."""

    rows: Ids
    duals: Floats
    empty: bool = False


class Certifier:
    """Writes certificates for one graph problem."""

    def __init__(self, problem: Problem) -> None:
        self._graph = problem.graph
        self._capacity = problem.budget_bytes - self._graph.fixed_bytes
        self._digest = problem_digest(problem)
        self._denominator = 0
        """What the last tree was enough with."""
        self.node_s = _NODE_S
        """Seconds that a node of the last large tree took to be written and checked."""

    def of_linear(
        self, round_: Round, scale: Scale, row_dual: Floats, bound_ns: float, wanted_ns: float
    ) -> Certified | None:
        """The certificate of one linear program; `bound_ns` is what it proves in floating point.

        `wanted_ns` is a bound that is as good as any greater one: certificates are rounded down to it.
        """
        rows = np.flatnonzero(row_dual)
        return self._certificate(round_, scale, (FloatLeaf(rows, row_dual[rows]),), (), bound_ns, wanted_ns)

    def of_tree(
        self,
        round_: Round,
        scale: Scale,
        tree: Tree,
        bound_ns: float,
        wanted_ns: float,
        shorter: tuple[Solve, Deadline],
    ) -> Certified | None:
        """The certificate of a tree of linear programs; None where rounding lost it.

        `shorter` are what solves the linear programs that shorten it, and for how long they may.
        """
        leaves = (
            FloatLeaf(tree.leaf_row[start:end], tree.leaf_dual[start:end], bool(empty))
            for (start, end), empty in zip(pairwise(tree.leaf_start.tolist()), tree.leaf_empty, strict=True)
        )
        nodes: list[int | FloatLeaf] = [column if column >= 0 else next(leaves) for column in tree.column.tolist()]
        found = self._certificate(round_, scale, nodes, tree.cuts, bound_ns, wanted_ns)
        if found is None or found.bound_ns is None or found.bound_ns < wanted_ns:
            return found
        found = self._with_less(found, wanted_ns, *shorter)
        depends = any(row[0] == CHEAPER for row in found.proof.rows)
        if not depends or tree.plain_row is None or tree.plain_dual is None:
            return found
        plain = (FloatLeaf(tree.plain_row, tree.plain_dual),)
        exact = self._certificate(round_, scale, plain, (), math.inf, math.inf)
        if exact is None or exact.bound_ns is None:
            return found
        # other costs and budgets may need what holds whatever is to be proved
        rough = exact.bound_ns - _ROUGHER * (bound_ns - self._graph.total_cost_ns)
        carries = self._certificate(round_, scale, plain, (), exact.bound_ns, rough)
        both = None if carries is None else joined(found.proof, carries.proof)
        return (None if both is None else self.check(both)) or found

    def spared(self, found: Certified, wanted_ns: float, plan: Plan, shorter: tuple[Solve, Deadline]) -> Certified:
        """A certificate that is longer than a plan made shorter, for as long as it proves what is wanted."""
        if found.bound_ns is None or found.bound_ns < wanted_ns or length(found.proof) <= length(plan):
            return found
        return self._with_less(found, wanted_ns, *shorter)

    def _certificate(
        self,
        round_: Round,
        scale: Scale,
        nodes: Sequence[int | FloatLeaf],
        cuts: Sequence[Cutting],
        bound_ns: float,
        wanted_ns: float,
    ) -> Certified | None:
        if len(nodes) > MOST_NODES:
            return None
        multiply, cheaper = multipliers(round_, scale, cuts), _cheaper(round_, cuts)
        total = self._graph.total_cost_ns
        nodes = [_multiplied(leaf, multiply, cheaper, total) if isinstance(leaf, FloatLeaf) else leaf for leaf in nodes]
        written = _Writer(self, round_, cuts)
        best: Certified | None = None
        proved = -1
        # with little to spare nothing may be lost
        spare = LOSS * total
        enough = bound_ns if wanted_ns > bound_ns - 2 * spare else bound_ns - spare
        largest = max(
            (float(leaf.duals.max(initial=0.0)) for leaf in nodes if isinstance(leaf, FloatLeaf)), default=0.0
        )
        finest = 1 << max(0, 52 - math.frexp(largest)[1])
        # a later tree's multipliers need as many digits
        coarsest = self._denominator if len(nodes) > 1 else 0
        tried = {min(denominator, finest) for denominator in _DENOMINATORS if denominator >= coarsest}
        for denominator in sorted(tried):
            began = time.monotonic()
            found = written.certified(nodes, denominator)
            if len(nodes) >= _TIMED:
                self.node_s = (time.monotonic() - began) / len(nodes)
            if found is not None and found.bound_ns is None:
                return found
            if found is not None and found.bound_ns is not None and found.bound_ns > proved:
                best, proved = found, found.bound_ns
            if proved >= enough:
                if len(nodes) > 1:
                    self._denominator = denominator
                break
        return None if best is None or len(best.proof.rows) > MOST_ROWS else best

    def _with_less(self, found: Certified, wanted_ns: float, solve: Solve, watch: Deadline) -> Certified:
        """A certificate of the same tree whose leaves prove no more than is wanted, where that is shorter."""
        proof, total = found.proof, self._graph.total_cost_ns
        on = relaxation_of(self._graph, self._capacity, proof.cuts, proof.spans)
        less = self.check(pruned(shortened(on, proof, math.ceil(wanted_ns), total, solve, watch)))
        if less is None or less.bound_ns is None or less.bound_ns < wanted_ns:
            return found
        return less if length(less.proof) < length(proof) else found

    def begin(self, round_: Round) -> tuple[Relaxation, StageProof]:
        """The checker's relaxation for a round, and a certificate without rows and leaves."""
        on = relaxation_of(self._graph, self._capacity, round_.columns.cuts, round_.spans)
        return on, StageProof(self._digest, round_.columns.cuts, round_.spans, (), 1, ())

    def check(self, proof: StageProof) -> Certified | None:
        """What a certificate proves; None where rounding has spoilt it: finer multipliers may keep it."""
        try:
            return Certified(proof, prove_stages(self._graph, self._capacity, proof))
        except InvalidProof:
            return None


class _Writer:
    """Writes certificates: rows in the order in which leaves, and rows that are rounded from them, need them."""

    def __init__(self, certifier: Certifier, round_: Round, cuts: Sequence[Cutting]) -> None:
        self._certifier, self._round, self._cuts = certifier, round_, cuts
        self._on, self._blank = certifier.begin(round_)
        self._place: dict[int, int | None] = {}
        self._rows: list[Row] = []
        self._made: list[Inequality] = []

    def certified(self, nodes: Sequence[int | FloatLeaf], denominator: int) -> Certified | None:
        """The certificate with whole multipliers."""
        made: list[Branch | Leaf] = []
        for node in nodes:
            if not isinstance(node, FloatLeaf):
                made.append(Branch(self._round.column_names.of(node)))
                continue
            duals, wholes = [], np.rint(node.duals * denominator)
            needed = wholes > 0
            for row, whole in zip(node.rows[needed].tolist(), wholes[needed].tolist(), strict=True):
                place = self._row(row)
                if place is not None:
                    duals.append((place, int(whole)))
            made.append(Leaf(tuple(duals), node.empty))
        proof = replace(self._blank, rows=tuple(self._rows), denominator=denominator, nodes=tuple(made))
        return self._certifier.check(pruned(proof))

    def _row(self, row: int) -> int | None:
        """The place of a row or cut in the certificate; None where the checker does not accept it."""
        if row not in self._place:
            self._place[row] = None
            with contextlib.suppress(InvalidProof):
                cut = row - self._round.program.rows
                name = self._round.names.of(row) if cut < 0 else self._derived(self._cuts[cut])
                self._made.append(inequality(self._on, self._made, name))
                self._rows.append(name)
                self._place[row] = len(self._rows) - 1
        return self._place[row]

    def _derived(self, cut: Cutting) -> Row:
        return self._cover(cut) if isinstance(cut, CoverRow) else self._rounded(cut)

    def _cover(self, cut: CoverRow) -> Row:
        """A lifted cover of what is resident at a cut, by values in the place of columns."""
        kind, *stage = self._round.names.of(cut.row)
        if kind != "memory":
            raise InvalidProof("a cover is of the memory at a cut")
        named = ((self._round.column_names.of(column)[-1], weight) for column, weight in cut.weights)
        return ("cover", *stage, cut.most, *(number for pair in named for number in pair))

    def _rounded(self, cut: DerivedRow) -> Row:
        """A cut as the certificate says it: what is complemented counts among the columns of the sum, in order."""
        pairs = {row: (self._row(row), multiplier) for row, multiplier in cut.multipliers}
        placed = [(place, multiplier) for place, multiplier in pairs.values() if place is not None]
        if len(placed) < len(pairs):
            raise InvalidProof("a row of the sum is not accepted")
        added = tuple((place, multiplier) for place, multiplier in placed if multiplier > 0)
        taken = tuple((place, -multiplier) for place, multiplier in placed if multiplier < 0)
        rounding = Rounding(cut.divisor, cut.coarser, 0, (), added, taken)
        total = summed(self._on, self._made, rounding)
        at = {column: j for j, column in enumerate(total.columns())}
        high = [self._round.column_names.of(column) for column in cut.complemented]
        row = rounding._replace(most=total.most, complemented=tuple(sorted(at[c] for c in high if c in at))).row()
        if any(abs(int(number)) > LARGEST_INTEGER for number in row[1:]):
            raise InvalidProof("a number of the row is too large for the format")
        return row


def wanted_ns(incumbent: Incumbent, bound_ns: int) -> float:
    """What a certificate should prove of a bound: enough for the gap, and nearly all of it."""
    cost = incumbent.cost_ns
    if cost is None:
        return math.inf
    allowed = incumbent.max_gap * cost
    return max(cost - allowed, bound_ns - _SHORTENING * allowed)


def _multiplied(leaf: FloatLeaf, multiply: Floats, cheaper: Booleans, total_ns: int) -> FloatLeaf:
    """A leaf with multipliers in the place of its duals.

    One without points cheap enough becomes one with a bound: the row that says what is cheap (`cheaper`, [rows]) stands
    for costs. What shows that there is no point whatever it costs has no unit: only ratios count.
    """
    each = multiply[leaf.rows]
    cheap = np.flatnonzero(cheaper[leaf.rows])
    weight = float(abs(leaf.duals[cheap[0]]) * each[cheap[0]]) if leaf.empty and len(cheap) else 0.0
    if weight > 0:
        bounding = np.abs(leaf.duals / weight) * each
        bounding[cheap] = 0.0
        return replace(leaf, duals=bounding, empty=False)
    weights = np.abs(leaf.duals) * each
    if leaf.empty:
        weights *= float(total_ns or 1) / max(float(weights.max(initial=0.0)), 1e-300)
    return replace(leaf, duals=weights)


def _cheaper(round_: Round, cuts: Sequence[Cutting]) -> Booleans:
    """[rows and cuts] which row says what is cheap: the last one of the program, if any."""
    found, last = np.zeros(round_.program.rows + len(cuts), np.bool_), round_.program.rows - 1
    found[last] = round_.names.of(last)[0] == CHEAPER
    return found


def multipliers(round_: Round, scale: Scale, cuts: Sequence[Cutting] = ()) -> Floats:
    """[rows] what a dual of the balanced program is multiplied by to count ns per unit of the checker's row.

    Those of cuts, which are made of rows in whole bytes alone, come last.
    """
    program: Program = round_.program
    unit = scale.cost_ns / balance_of(program)
    factor = row_factors(program) * unit
    for (first, (kind, *_)), (end, _) in pairwise((*round_.names.blocks, (program.rows, ("",)))):
        if kind in _IN_BYTES:
            factor[first:end] /= scale.bytes
    return np.concatenate([factor, np.array([cut.scale * unit for cut in cuts])])


def pruned(proof: StageProof) -> StageProof:
    """Without the rows that no leaf needs, directly or through a rounded one."""
    needed = {r for node in proof.nodes if isinstance(node, Leaf) for r, _ in node.duals}
    for r in range(len(proof.rows) - 1, -1, -1):
        if r in needed and proof.rows[r][0] == KIND:
            rounding = Rounding.of(proof.rows[r])
            needed |= {earlier for earlier, _ in (*rounding.added, *rounding.taken)}
    place = {r: at for at, r in enumerate(sorted(needed))}
    rows = []
    for r in place:
        row = proof.rows[r]
        moved = Rounding.of(row).renumbered(place) if row[0] == KIND else None
        rows.append(row if moved is None else moved.row())
    nodes = tuple(
        node._replace(duals=tuple(sorted((place[r], y) for r, y in node.duals))) if isinstance(node, Leaf) else node
        for node in proof.nodes
    )
    return replace(proof, rows=tuple(rows), nodes=nodes)


def joined(first: StageProof, second: StageProof) -> StageProof | None:
    """The trees of two certificates over the same coarse stages and spans; None where the format cannot say it.

    The second has no rounded rows.
    """
    at = {row: r for r, row in reversed(list(enumerate(first.rows)))}
    place = [at.get(row, len(first.rows) + r) for r, row in enumerate(second.rows)]
    denominator = math.lcm(first.denominator, second.denominator)
    nodes: list[Branch | Leaf] = []
    for proof, places in ((first, range(len(first.rows))), (second, place)):
        more = denominator // proof.denominator
        for node in proof.nodes:
            if isinstance(node, Leaf):
                node = node._replace(duals=tuple((places[r], more * y) for r, y in node.duals))
            nodes.append(node)
    if any(y > LARGEST_INTEGER for node in nodes if isinstance(node, Leaf) for _, y in node.duals):
        return None
    return pruned(replace(first, rows=first.rows + second.rows, denominator=denominator, nodes=tuple(nodes)))


def length(proof: StageProof | Plan) -> int:
    """Bytes of a certificate or a plan, deflated."""
    return len(zlib.compress(json.dumps(proof.to_json(), separators=(",", ":")).encode()))
