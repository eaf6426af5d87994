"""From the floating-point duals of a round's program to a certificate in whole numbers, checked at once.

Duals belong to the scaled program that the engine was given; multipliers belong to the rows in ns and bytes that the
checker writes. Rounding them keeps every certificate valid and makes it weaker, so the denominator grows until what is
lost no longer counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat_ir import Problem, problem_digest
from remat_ir.proof import Branch, InvalidProof, Leaf, StageProof
from remat_ir.proof.certificate import MOST_NODES, MOST_ROWS, Column, Row
from remat_ir.proof.check import prove_stages

from ..backends import Tree
from ..program import Floats, Program
from ..staged.rows import Round
from ..staged.scale import Scale, balance_of, row_factors

_IN_BYTES = ("memory", "rerun")
_DENOMINATORS = (2**20, 2**30, 2**40)
"""Tried in turn; where costs are so large that multipliers would exceed 2^53, smaller ones."""
LOSS = 1e-6
"""What rounding may lose of a bound, as a share of the cost of all ops once."""


class Certified(NamedTuple):
    """A certificate and what it proves: a bound in ns, or None, that no plan fits."""

    proof: StageProof
    bound_ns: int | None


@dataclass(frozen=True, eq=False)
class FloatLeaf:
    """A leaf as an engine leaves it: duals of the balanced program, or of its infeasibility, by row."""

    rows: Sequence[int]
    duals: Floats
    empty: bool = False


class Certifier:
    """Writes certificates for one graph problem."""

    def __init__(self, problem: Problem) -> None:
        self._graph = problem.graph
        self._capacity = problem.budget_bytes - self._graph.fixed_bytes
        self._digest = problem_digest(problem)

    def of_linear(self, round_: Round, scale: Scale, row_dual: Floats, bound_ns: float) -> Certified | None:
        """The certificate of one linear program; `bound_ns` is what it proves in floating point."""
        rows = np.flatnonzero(row_dual)
        return self._certificate(round_, scale, (FloatLeaf(rows.tolist(), row_dual[rows]),), bound_ns)

    def of_tree(self, round_: Round, scale: Scale, tree: Tree, bound_ns: float) -> Certified | None:
        """The certificate of a tree of linear programs; None where rounding lost it."""
        nodes: list[int | FloatLeaf] = []
        leaves = 0
        for column in tree.column.tolist():
            if column >= 0:
                nodes.append(column)
                continue
            start, end = tree.leaf_start[leaves : leaves + 2]
            empty = bool(tree.leaf_empty[leaves])
            nodes.append(FloatLeaf(tree.leaf_row[start:end].tolist(), tree.leaf_dual[start:end], empty))
            leaves += 1
        return self._certificate(round_, scale, nodes, bound_ns)

    def _certificate(
        self, round_: Round, scale: Scale, nodes: Sequence[int | FloatLeaf], bound_ns: float
    ) -> Certified | None:
        multiply = multipliers(round_, scale)
        best: Certified | None = None
        leaves = [node for node in nodes if isinstance(node, FloatLeaf)]
        if len(nodes) > MOST_NODES:
            return None
        weights = [self._weights(leaf, multiply) for leaf in leaves]
        most = 1 << max(0, 52 - math.frexp(max((float(w.max(initial=0.0)) for w in weights), default=0.0))[1])
        tried = _DENOMINATORS if len(leaves) == 1 else _DENOMINATORS[1:]
        for denominator in sorted({min(denominator, most) for denominator in tried}):
            proof = self._write(round_, nodes, weights, denominator)
            try:
                proved = prove_stages(self._graph, self._capacity, proof).bound_ns
            except InvalidProof:
                continue  # an empty leaf that rounding has spoilt: finer multipliers keep it
            if proved is None:
                return Certified(proof, None)
            if len(proof.rows) <= MOST_ROWS and (best is None or best.bound_ns is None or proved > best.bound_ns):
                best = Certified(proof, proved)
            if proved >= bound_ns - LOSS * self._graph.total_cost_ns - 1:
                break
        return best

    def _weights(self, leaf: FloatLeaf, multiply: Floats) -> Floats:
        """The multipliers of a leaf; those that show that there is no point have no unit: only their ratios count."""
        weights = np.abs(leaf.duals) * multiply[leaf.rows]
        if leaf.empty:
            weights *= float(self._graph.total_cost_ns or 1) / max(float(weights.max(initial=0.0)), 1e-300)
        return weights

    def _write(
        self, round_: Round, nodes: Sequence[int | FloatLeaf], weights: Sequence[Floats], denominator: int
    ) -> StageProof:
        each = iter(weights)
        names = columns_of(round_)
        place: dict[int, int] = {}
        rows: list[Row] = []
        made: list[Branch | Leaf] = []
        for node in nodes:
            if not isinstance(node, FloatLeaf):
                made.append(Branch(names[node]))
                continue
            duals = []
            whole = np.rint(next(each) * denominator).astype(np.int64).tolist()
            for row, multiplier in zip(node.rows, whole, strict=True):
                if multiplier > 0:
                    if row not in place:
                        place[row] = len(rows)
                        rows.append(round_.names.of(row))
                    duals.append((place[row], multiplier))
            made.append(Leaf(tuple(duals), node.empty))
        starts = {cut: c + 1 for c, cut in enumerate(round_.columns.cuts)}
        spans = tuple((starts[begin], round_.columns.stage_of(end)) for begin, end in round_.spans)
        wide = tuple(sorted({(a, b) for a, b in spans if a < b}))
        return StageProof(self._digest, round_.columns.cuts, wide, tuple(rows), denominator, tuple(made))


def multipliers(round_: Round, scale: Scale) -> Floats:
    """[rows] what a dual of the balanced program is multiplied by to count ns per unit of the checker's row."""
    program: Program = round_.program
    factor = row_factors(program) * (scale.cost_ns / balance_of(program))
    for (first, (kind, *_)), end in zip(
        round_.names.blocks, [*(first for first, _ in round_.names.blocks[1:]), program.rows], strict=True
    ):
        if kind in _IN_BYTES:
            factor[first:end] /= scale.bytes
    return factor


def columns_of(round_: Round) -> dict[int, Column]:
    """What the columns of R and S are called in a certificate."""
    found: dict[int, Column] = {}
    columns = round_.columns
    for c in range(1, columns.stages):
        run, hold = columns.runs[c], columns.holds[c]
        found |= {int(run[op]): ("run", c, c, op) for op in np.flatnonzero(run >= 0).tolist()}
        found |= {int(hold[value]): ("hold", c, value) for value in np.flatnonzero(hold >= 0).tolist()}
    return found
