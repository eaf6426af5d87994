"""The certificate that no plan fits, by pairs of values: those of the table of pairs that the conclusion rests on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from remat_ir import Problem, problem_digest
from remat_ir.proof import InvalidProof, PairProof, graph_of_subject, prove
from remat_ir.proof.pairs import PairCheck
from remat_ir.working_set import working_set

from ..bounds import known_budget
from ..incumbent import Incumbent
from ..pairs import MOST_VALUES, pair_need, pair_table


def pair_proof(problem: Problem, known: NDArray[np.int64] | None = None) -> PairProof | None:
    """That no plan of a graph, or of a chain without a link, fits, checked; None where pairs do not show it.

    `known` is the graph's `pair_table`, where it is known already.
    """
    graph, budget_bytes = graph_of_subject(problem), problem.budget_bytes
    capacity = budget_bytes - graph.fixed_bytes
    proof = PairProof(problem_digest(problem), working_set(graph).op, ())
    if working_set(graph).least_bytes <= budget_bytes:
        if graph.values > MOST_VALUES or graph.link is not None:
            return None
        table = (pair_table(graph) if known is None else known).tolist()
        for op, inputs in enumerate(graph.op_inputs):
            both = ((u, v) for i, u in enumerate(inputs) for v in inputs[i:])
            pair = max(both, key=lambda pair: table[pair[0]][pair[1]], default=None)
            if pair is not None and table[pair[0]][pair[1]] > capacity:
                proof = replace(proof, op=op, pairs=_closed(PairCheck(graph, capacity, proof), table, pair))
                break
    try:
        prove(problem, proof)
    except InvalidProof:
        return None
    return proof


def prove_by_pairs(incumbent: Incumbent) -> None:
    """Record the bound, and that the budget is too small where it is."""
    problem, graph = incumbent.problem, incumbent.problem.graph
    table = pair_table(graph, incumbent.stopped) if graph.values <= MOST_VALUES else None
    least = pair_need(graph, table)
    more = incumbent.certifies and least.least_bytes > working_set(graph).least_bytes
    proof = pair_proof(Problem(graph, least.least_bytes - 1), table) if more else None
    incumbent.needs_at_least(least.least_bytes, proof)
    if least.least_bytes > problem.budget_bytes:
        incumbent.suffices(known_budget(graph, incumbent.stopped))
        who = graph.op_label(least.op)
        incumbent.prove_infeasible(
            f"No plan fits: to hold two of the values that {who} reads takes {least.least_bytes} bytes on the way, and "
            f"the budget is {problem.budget_bytes}.",
            proof=proof,
        )


def _closed(check: PairCheck, table: list[list[int]], pair: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """A pair, and for either of it as the last one made, a pair that had to be there before, and so on."""
    graph, found, waiting = check.graph, {pair}, [pair]
    while waiting:
        u, v = waiting.pop()
        for last, other in {(u, v), (v, u)}:
            if check.need_to_make(last, other) > check.capacity:
                continue
            inputs = graph.op_inputs[graph.value_op[last]]
            before = [(a, b) for i, a in enumerate(inputs) for b in inputs[i:]]
            if graph.value_op[other] != graph.value_op[last]:
                before += [(min(a, other), max(a, other)) for a in (other, *inputs)]
            known = next((p for p in before if p in found), None)
            worst = known or max(before, key=lambda p: table[p[0]][p[1]])
            if worst not in found:
                found.add(worst)
                waiting.append(worst)
    return tuple(sorted(found))
