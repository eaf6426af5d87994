"""A backward pass in two halves, as zero-bubble schedules run it: first what the gradients of the inputs need.

Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: the gradient of a stage's input is what another stage waits for;
the gradients of its parameters may come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from .dataflow import is_check, is_random, is_unknown
from .operations import Kind, Op, Operations


def in_halves(step: Operations, early: Sequence[int]) -> Operations:
    """The step with an op HALFWAY in its backward pass, before which is all that some of its results need.

    What draws random numbers, raises, or runs once comes before it too, so that its order stays. Kernels and their
    results are the same ones.

    Args:
        early: positions in the backward results, those of the inputs; the others are complete at the end.
    """
    flow, after = step.flow, step.turn + 1
    results = [r for r in (flow.backward_results[i] for i in early) if isinstance(r, fx.Node)]
    own = {s for r in results for s in flow.storages_of[r]}
    copies = {s for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in results for s in op.makes}
    wanted = own | copies
    first: list[Op] = []
    second: list[Op] = []
    for op in reversed(step.ops[after:]):
        fixed = any(node in step.once or is_random(node) or is_check(node) or is_unknown(node) for node in op.nodes)
        if fixed or wanted & set(op.makes):
            wanted.update(op.reads)
            first.append(op)
        else:
            second.append(op)
    head = (*step.ops[:after], *reversed(first))
    made = {s for op in head for s in op.makes}
    cut = Op(Kind.HALFWAY, (), tuple(sorted((own | copies) & made)))
    given = frozenset((own | copies) & step.keep & made)
    return replace(
        step, ops=(*head, cut, *reversed(second)), halfway=len(head), early=tuple(sorted(early)), given=given
    )
