"""What a certificate proves about its problem, and about one of another budget or other costs.

For those its rows are written anew for the problem at hand. For another budget nothing else changes: memory rows have
another right side, and a row whose premise fails (a cover that fits a larger budget) counts as absent. A smaller budget
never proves less, since only right sides fall. Rows that are rounded from others are taken as they were where that
holds, and also with the new right sides; the better counts.

For other costs the same multipliers prove nothing: at a tenth of the costs they would outweigh what there is to save.
So each leaf is scaled by a factor t ≥ 0 of its own. Its bound is concave and piecewise linear in t, hence its greatest
value is where the slope changes sign. t = min c′ / c is among the factors, so the result is at least the bound scaled
by it. Leaves without points stay so: costs play no part in them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from ..digest import problem_digest
from ..graph import Graph
from ..problem import Problem
from ..read import LARGEST_INTEGER
from .certificate import Branch, Column, Leaf, PairProof, Proof, Row, StageProof, WindowProof
from .check import (
    KIND,
    Rounding,
    added_up,
    graph_of_subject,
    inequality,
    leaf_bound,
    prove_stages,
    relaxation_of,
    summed,
)
from .pairs import PairCheck, check_pairs
from .rows import Inequality, InvalidProof, Relaxation
from .windows import Windows, prove_windows


class Certificate(NamedTuple):
    """A checked certificate of one problem: no plan costs less than `bound_ns`; None: none fits."""

    proof: Proof
    bound_ns: int | None


def prove(problem: Problem, proof: Proof) -> Certificate:
    """What a certificate proves about a problem: a graph, or a chain without a link, taken as its lift.

    Raises:
        InvalidProof: it is for another problem, or proves nothing; the message says why.
    """
    if proof.digest != problem_digest(problem):
        raise InvalidProof("the certificate is for another problem: its digest is not the problem's")
    graph = graph_of_subject(problem)
    capacity = problem.budget_bytes - graph.fixed_bytes
    if isinstance(proof, PairProof):
        check_pairs(PairCheck(graph, capacity, proof))
        return Certificate(proof, None)
    if isinstance(proof, WindowProof):
        return Certificate(proof, prove_windows(graph, capacity, proof))
    return Certificate(proof, prove_stages(graph, capacity, proof))


_FINEST = 2**20
"""Scaled multipliers are rounded down to this fraction of the denominator that they had, at the finest."""


def carried(proof: Proof, problem: Problem) -> Proof:
    """The certificate rewritten for a problem with the same structure; `prove` says what is left of it.

    Raises:
        InvalidProof: it cannot be one for this problem.
    """
    if isinstance(proof, PairProof):
        return replace(proof, digest=problem_digest(problem))
    graph = graph_of_subject(problem)
    capacity = problem.budget_bytes - graph.fixed_bytes
    digest = problem_digest(problem)
    if isinstance(proof, WindowProof):
        on = Windows(graph, capacity, proof.turn, proof.firsts, proof.laters, proof.small_bytes)
        parts = list(proof.parts)
        first = {part: window for *window, part in reversed(proof.windows) if 0 <= part < len(parts)}
        for part, window in first.items():
            parts[part] = _best_rewritten(on.window(*window), capacity, parts[part])
        return replace(proof, digest=digest, parts=tuple(replace(part, digest=digest) for part in parts))
    return replace(_best_rewritten(graph, capacity, proof), digest=digest)


def _best_rewritten(graph: Graph, capacity: int, proof: StageProof) -> StageProof:
    found = _rewritten(graph, capacity, proof, anew=False)
    if any(row[0] == KIND for row in proof.rows):
        other = _rewritten(graph, capacity, proof, anew=True)
        found = max(found, other, key=lambda each: _bound(graph, capacity, each))
    return found


def _bound(graph: Graph, capacity: int, proof: StageProof) -> float:
    """What a certificate proves; −1 where it proves nothing, infinity where there is no plan."""
    try:
        bound_ns = prove_stages(graph, capacity, proof)
    except InvalidProof:
        return -1.0
    return math.inf if bound_ns is None else bound_ns


def _rewritten(graph: Graph, capacity: int, proof: StageProof, *, anew: bool) -> StageProof:
    """The certificate with all rows that hold, each leaf scaled; `anew` rounds rows from the new right sides."""
    on = relaxation_of(graph, capacity, proof.cuts, proof.spans)
    place: dict[int, int] = {}
    rows: list[Inequality] = []
    kept: list[Row] = []
    for r, row in enumerate(proof.rows):
        with contextlib.suppress(InvalidProof):
            row = _here(on, rows, row, place, anew)
            rows.append(inequality(on, rows, row))
            kept.append(row)
            place[r] = len(rows) - 1
    each = iter(boxes(proof))
    nodes: list[Branch | Leaf] = []
    for node in proof.nodes:
        if isinstance(node, Leaf):
            left = node._replace(duals=tuple((place[r], y) for r, y in node.duals if r in place))
            node = _best(on, rows, left, next(each), proof.denominator)
        nodes.append(node)
    return replace(proof, rows=tuple(kept), nodes=tuple(nodes))


def _here(on: Relaxation, rows: Sequence[Inequality], row: Row, place: dict[int, int], anew: bool) -> Row:
    """A row with the numbers that the rows before it have now; a rounded one with a right side that holds here.

    Raises:
        InvalidProof: one of the rows before it is absent.
    """
    if row[0] != KIND:
        return row
    rounding = Rounding.of(row).renumbered(place)
    if rounding is None:
        raise InvalidProof("a row that this one is rounded from is absent")
    most = summed(on, rows, rounding).most
    most = most if anew else max(most, rounding.most)
    if abs(most) > LARGEST_INTEGER:
        raise InvalidProof("the right side of a rounded row is too large for the format")
    return rounding._replace(most=most).row()


def boxes(proof: StageProof) -> list[dict[Column, int]]:
    """What each leaf fixes, in the order of the leaves."""
    pending: list[dict[Column, int]] = [{}]
    found: list[dict[Column, int]] = []
    for node in proof.nodes:
        box = pending.pop() if pending else {}
        if isinstance(node, Leaf):
            found.append(box)
        else:
            pending += [{**box, node.column: 1}, {**box, node.column: 0}]
    return found


def _best(on: Relaxation, rows: Sequence[Inequality], leaf: Leaf, box: dict[Column, int], denominator: int) -> Leaf:
    """The leaf scaled to its greatest bound: the slope falls at t_j = D c_j / −a_j for each column j with a_j < 0."""
    if leaf.empty:
        return leaf
    activity, most = added_up(rows, leaf.duals)
    slope = -most
    kinks: list[tuple[Fraction, int]] = []
    for column, weight in activity.items():
        fixed = box.get(column)
        if fixed is not None:
            slope += fixed * weight
        elif weight < 0:
            # u min(0, D c + t a): 0 until t = D c / −a, then it falls by u a
            kinks.append((Fraction(denominator * on.cost(column), -weight), weight * on.upper(column)))
    factor = Fraction(0)
    for at, weight in sorted(kinks):
        if slope <= 0:
            break
        factor, slope = at, slope + weight
    if slope > 0:  # the bound grows without end: there is no point here, or none that is not too expensive
        return leaf._replace(empty=True)
    if factor == 1:
        return leaf
    factor = Fraction(int(factor * _FINEST), _FINEST)
    duals = tuple((r, int(y * factor)) for r, y in leaf.duals)
    scaled = leaf._replace(duals=tuple((r, y) for r, y in duals if y > 0))
    # rounding must not make a bound at another budget weaker than the multipliers as they were
    return max(scaled, leaf, key=lambda each: leaf_bound(on, rows, each, box, denominator))
