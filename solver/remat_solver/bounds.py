"""Bounds on budgets: one that every plan needs, with its certificate, and one for which a plan is known.

How much memory it takes to hold two values at once is a bound, too. Let P(u, v) be the least peak of any plan up to a
moment at which u and v are both resident. One of them was made last, while the other was held, so with o the op that
makes u

    P(u, v) ≥ min over which is last, say u, of max(need(o) + M_v, P(i, v) for inputs i of o, P(i, j) for two of them)

where M_v counts if o neither reads nor makes v, and need(o) is inputs, non-optional outputs and workspace. Whenever a
value exists, all ops up to its maker have run for the first time, so kept values made before are resident and count
too. The largest P that satisfies this with equality, reached from above by sweeps over the ops, is at most the true
one, and every op needs the P of all pairs among its inputs. This is the critical-path heuristic h² of planning (Haslum
and Geffner, 2000), with memory in the place of time; h¹ is the working set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from remat_ir import Chain, Graph, Join, Problem, Subject, plain_peak, problem_digest, readable
from remat_ir.graph import WorkingSet, working_set
from remat_ir.greedy import least_memory, peak_of
from remat_ir.proof import InvalidProof, PairProof, graph_of_subject, prove
from remat_ir.proof.pairs import PairCheck

from .chain.table import Least
from .deadline import Deadline, TimeUp, never
from .incumbent import Incumbent
from .kernels import loaded
from .search.local import least_plan

_SECONDS = 0.5


def least_need(subject: Subject) -> tuple[int, str]:
    """A lower bound on every budget that suffices, in bytes, and what it is that needs them."""
    if isinstance(subject, Join):
        slots = least_slots(subject.lengths, subject.stays)
        return slots * subject.slot_bytes, f"keeping the start and the end of every branch in {slots} slots"
    if not isinstance(subject, Chain):
        least = working_set(subject)
        return least.least_bytes, subject.op_label(least.op)
    count, least = subject.stages, working_set(replace(subject.to_graph(), fixed_bytes=subject.staying_bytes))
    if least.least_bytes < subject.fixed_bytes:
        return subject.fixed_bytes, "the input"
    who = f"forward stage {least.op + 1}" if least.op < count else f"backward stage {2 * count + 1 - least.op}"
    return least.least_bytes, who if least.op != count else "the first gradient"


def least_slots(lengths: Sequence[int], kept: Sequence[bool] = ()) -> int:
    """c_min, the fewest slots in which a join can be executed (RR-9273, Lemma 4).

    `kept` is b: whether the last gradient of each branch stays in memory; none does by default.
    """
    kept = kept or (False,) * len(lengths)
    if not any(lengths):
        return len(lengths)
    least = len(lengths) + sum(length != 0 for length in lengths)
    spared = 1 in lengths or any(length == 0 and not stays for length, stays in zip(lengths, kept, strict=True))
    return least if spared else least + 1


def known_budget(subject: Subject, stopped: Callable[[], bool] = never) -> int:
    """A budget in bytes for which a plan is known: of a chain, the least for a persistent schedule (RR-9302); of a
    join, its least slots (RR-9273, Lemma 4); of a graph, the least peak that a greedy plan and a quick search reach.
    """
    if isinstance(subject, Chain):
        try:
            return Least(subject, stop=stopped).budget_bytes
        except TimeUp:
            return plain_peak(subject)
    if isinstance(subject, Join):
        return least_slots(subject.lengths, subject.stays) * subject.slot_bytes
    watch = Deadline(_SECONDS)
    plan = least_memory(subject, stop=lambda: watch.passed() or stopped())
    if loaded() and not stopped():
        plan = least_plan(subject, least_need(subject)[0], plan, Deadline(_SECONDS), stopped)
    return peak_of(subject, plan)


MOST_VALUES = 2500
"""Beyond this the table of pairs takes more than 50 MB."""
_NEVER = 1 << 62
_SWEEPS = 200
_POLL = 64
"""Ops of a sweep between two looks at the clock."""


def pair_need(graph: Graph, table: NDArray[np.int64] | None = None) -> WorkingSet:
    """The op that needs the most bytes when all pairs of its inputs are made with as little memory as pairs can be.

    At least the working set, and a bound on every budget that suffices; the working set alone above `MOST_VALUES`, and
    with a link, over which a value may come back without the memory that it takes to make it.
    `table` is `pair_table`, where it is known already.
    Sweeps of O(edges · values) numpy work: 0.01 to 0.6 s on training graphs of 100 to 1,000 ops.
    """
    least = working_set(graph)
    if graph.values > MOST_VALUES or graph.link is not None:
        return least
    table = pair_table(graph) if table is None else table
    for op, inputs in enumerate(graph.op_inputs):
        if inputs:
            need = graph.fixed_bytes + int(table[np.ix_(inputs, inputs)].max())
            if need > least.least_bytes:
                least = WorkingSet(op, need)
    return least


def pair_table(graph: Graph, stopped: Callable[[], bool] = never) -> NDArray[np.int64]:
    """[m, m] the bound P, fixed bytes left out; zeros where it was stopped before, since it comes from above."""
    m = graph.values
    size, maker = np.array(graph.value_bytes, np.int64), np.array(graph.value_op, np.int64)
    kept = np.zeros(m, bool)
    kept[list(graph.keep)] = True
    made = np.bincount(maker[kept], size[kept], minlength=graph.ops).astype(np.int64)
    kept_before = np.cumsum(made) - made
    extra = np.where(kept, 0, size)  # of a value that is held; kept ones are in `kept_before`, of their own op apart
    optional = frozenset(graph.optional)
    needs: list[NDArray[np.int64]] = []
    for op, inputs in enumerate(graph.op_inputs):
        need = graph.op_workspace_bytes[op]
        need += sum(graph.value_bytes[v] for v in inputs if not kept[v])
        need += sum(graph.value_bytes[v] for v in graph.op_values[op] if v not in optional)
        beside = extra.copy()
        beside[list(inputs)] = 0
        beside[list(graph.op_values[op])] = 0
        # kept values of ops before the later of the two; what this op makes may be kept, and is in `need`
        needs.append(
            need + beside + np.where(maker > op, kept_before[np.maximum(maker, op)] - made[op], kept_before[op])
        )
    table = np.full((m, m), _NEVER, np.int64)
    for _ in range(_SWEEPS):
        changed = False
        for op, inputs in enumerate(graph.op_inputs):
            if not op % _POLL and stopped():
                return np.zeros((m, m), np.int64)
            outputs = graph.op_values[op]
            if not outputs:
                continue
            before = table[list(inputs)].max(axis=0) if inputs else table.diagonal().copy()
            before[list(outputs)] = 0  # made in the same run
            if inputs:
                np.maximum(before, int(table[np.ix_(inputs, inputs)].max()), out=before)
            for value in outputs:
                now = needs[op] + (graph.value_bytes[value] if value in optional else 0)
                reach = np.maximum(before, now)
                if (reach < table[value]).any():
                    changed = True
                    better = np.minimum(reach, table[value])
                    table[value] = better
                    table[:, value] = better
        if not changed:
            break
    else:
        return np.zeros((m, m), np.int64)
    return table


def pair_proof(problem: Problem, known: NDArray[np.int64] | None = None) -> PairProof | None:
    """That no plan of a graph, or of a chain without a link, fits, checked; None where pairs do not show it.

    `known` is the graph's `pair_table`, where it is known already.
    """
    graph, budget_bytes = graph_of_subject(problem), problem.budget_bytes
    capacity = budget_bytes - graph.fixed_bytes
    alone = working_set(graph)
    proof = PairProof(problem_digest(problem), alone.op, ())
    if alone.least_bytes <= budget_bytes:
        if graph.values > MOST_VALUES or graph.link is not None:
            return None
        table = (pair_table(graph) if known is None else known).tolist()
        for op, inputs in enumerate(graph.op_inputs):
            both = combinations_with_replacement(inputs, 2)
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
            f"No plan fits: to hold two of the values that {who} reads takes {readable(least.least_bytes)} on the way; "
            f"the budget is {readable(problem.budget_bytes)}.",
            least.least_bytes,
            proof,
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
            before = list(combinations_with_replacement(inputs, 2))
            if graph.value_op[other] != graph.value_op[last]:
                before += [(min(a, other), max(a, other)) for a in (other, *inputs)]
            known = next((p for p in before if p in found), None)
            worst = known or max(before, key=lambda p: table[p[0]][p[1]])
            if worst not in found:
                found.add(worst)
                waiting.append(worst)
    return tuple(sorted(found))
