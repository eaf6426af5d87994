"""Certificates put together, and without what they do not need."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from remat_ir import Plan
from remat_ir.proof import Branch, Leaf, StageProof
from remat_ir.proof.rounding import KIND, Rounding
from remat_ir.read import LARGEST_INTEGER


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
    ours = [*range(len(first.rows))]
    nodes = [*_over(first, ours, denominator), *_over(second, place, denominator)]
    if any(y > LARGEST_INTEGER for node in nodes if isinstance(node, Leaf) for _, y in node.duals):
        return None
    return pruned(replace(first, rows=first.rows + second.rows, denominator=denominator, nodes=tuple(nodes)))


def _over(proof: StageProof, place: Sequence[int], denominator: int) -> Iterator[Branch | Leaf]:
    """The nodes of a certificate with other places of rows and a denominator that is a multiple of its own."""
    more = denominator // proof.denominator
    for node in proof.nodes:
        if isinstance(node, Leaf):
            node = node._replace(duals=tuple((place[r], more * y) for r, y in node.duals))
        yield node


def length(proof: StageProof | Plan) -> int:
    """Bytes of a certificate or a plan, deflated."""
    return len(zlib.compress(json.dumps(proof.to_json(), separators=(",", ":")).encode()))
