"""The cheapest tags as a staged program in which an op is computed again once at most, and bounds of that space.

The backward pass is cut into coarse stages. A column says of an op whether it is computed again at all, others whether
it has been by the end of a stage: as soon as something that runs there needs it, which is where torch puts it. Memory
counts at the ops that end stages, at some forward ops, and while some ops are computed again. All of this holds for
every set of tags, so that the optimum of the program is a bound for all of them. Where the memory of its solution is
exceeded, a stage is cut there and a row is added, until the solution fits: then it is the optimum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from remat_ir import Graph, InvalidPlan, plan_of
from remat_ir.replay import replay
from remat_ir.restrictions import TAGS
from remat_ir.tags import tagged_order, tagged_plan

from ..backends.engine import Engine
from ..deadline import TimeUp, never
from ..incumbent import Incumbent
from ..program import Builder, Floats, Program, Term
from .search import TagSearch

_FIRST_CUTS = 6
_UNITS = 1 << 20
"""The budget and the cost of a step in units of the program: what is rounded off only ever relaxes it."""
_TURN_S = 2.0
"""CPU seconds of a round's first solve; each further round may take half as long again."""
_MOST_OPS = 2000
"""Ops that may be computed again beyond which no engine gets anywhere."""
ZERO = -1


class TagProgram:
    """The program of a graph and a budget with the rows found so far.

    Attributes:
        cuts: backward ops that end stages. forward: forward ops at which memory counts. recomputations: (op, backward
            op before which it is computed again) at which it does. wrong: sets of tags that do not fit, whatever the
            rows say.
    """

    def __init__(self, graph: Graph, budget_bytes: int, free: Iterable[int]) -> None:
        assert graph.backward_from is not None
        self.graph, self.budget, self.boundary = graph, budget_bytes, graph.backward_from
        self.free = {int(op): i for i, op in enumerate(free)}
        self.cost_unit = max(1, sum(graph.op_cost_ns[op] for op in self.free) // _UNITS)
        self.byte_unit = max(1, budget_bytes // _UNITS)
        count = graph.ops - self.boundary
        steps = np.linspace(0, count - 1, min(_FIRST_CUTS, count))
        self.cuts = {self.boundary + int(step) for step in steps} | {graph.ops - 1}
        self.forward: set[int] = set()
        self.recomputations: set[tuple[int, int]] = set()
        self.wrong: list[frozenset[int]] = []
        users = graph.users
        self.readers = [[q for q in users[v] if q in self.free] for v in range(graph.values)]
        backward = [[user for user in row if user >= self.boundary] for row in users]
        self.last_use = [max(row, default=ZERO) for row in backward]
        self.last_forward = [max((user for user in row if user < self.boundary), default=ZERO) for row in users]
        self.first_use = [min(sum((backward[v] for v in graph.op_values[op]), [graph.ops])) for op in self.free]

    def write(self, stop: Callable[[], bool] = never) -> Program:
        """The program; its objective is the cost of what is computed again, in units."""
        builder = Builder(stop)
        ends = sorted(self.cuts)
        direct = np.asarray([bisect_left(ends, use) for use in self.first_use])
        cost = np.asarray([self.graph.op_cost_ns[op] // self.cost_unit for op in self.free], np.float64)
        again = builder.variables(len(self.free), cost=np.where(direct < len(ends), cost, 0.0))
        done = np.full((len(self.free), len(ends)), ZERO, np.int64)
        earliest = direct.copy()
        chains = {
            o: sorted({self.free[q] for v in self.graph.op_values[o] for q in self.readers[v]}) for o in self.free
        }
        for op, i in reversed(self.free.items()):
            earliest[i] = min([earliest[i], *(earliest[q] for q in chains[op])])
            last = builder.variables(max(0, min(direct[i], len(ends)) - earliest[i]))
            done[i, earliest[i] : earliest[i] + len(last)] = last
            done[i, direct[i] :] = again[i]
        for op, i in self.free.items():
            columns = done[i, earliest[i] : direct[i] + 1]
            builder.add_implied(columns[:-1], columns[1:])
            if direct[i] >= len(ends) and done[i, -1] != ZERO:
                builder.add_implied(done[i, -1:], again[i : i + 1])
            for q in chains[op]:
                stages = [c for c in range(min(int(direct[i]), len(ends))) if done[q, c] != ZERO]
                rows = np.arange(len(stages))
                parts = [Term(rows, done[q, stages]), Term(rows, again[i]), Term(rows, done[i, stages], -1)]
                builder.add_rows(len(stages), parts, upper=1.0)
        self._again, self._done, self._builder = again, done, builder
        for stage, op in enumerate(ends):
            self._memory_at(op, stage)
        for op in sorted(self.forward):
            self._memory_at(op, ZERO)
        for op, reader in sorted(self.recomputations):
            self._memory_at(reader, bisect_left(ends, reader), again=op)
        for tags in self.wrong:
            signs = np.asarray([-1.0 if op in tags else 1.0 for op in self.free])
            builder.add_rows(1, [Term(0, again, signs)], lower=1.0 - len(tags))
        program = builder.program()
        ordered = [i for i in range(len(self.free)) if direct[i] >= len(ends) and done[i, -1] != ZERO]
        program.cost[done[ordered, -1]] = cost[ordered]
        return program

    def _memory_at(self, op: int, stage: int, again: int = ZERO) -> None:
        """That an op fits when it runs first, at the end of a stage; or an earlier one, computed again for it."""
        graph, runs = self.graph, op if again == ZERO else again
        fixed = graph.fixed_bytes + graph.op_workspace_bytes[runs]
        fixed += sum(graph.value_bytes[v] for v in graph.op_values[runs] if v not in graph.optional)
        terms: list[tuple[int, float]] = []
        inputs = frozenset(graph.op_inputs[runs])
        for value in range(graph.values):
            maker, size = graph.value_op[value], graph.value_bytes[value]
            if not size or maker >= op or maker == runs:
                continue
            later = self.last_use[value] >= op if op >= self.boundary else self.last_use[value] != ZERO
            if (
                value in graph.keep
                or value in inputs
                or (op < self.boundary and self.last_forward[value] >= op)
                or (later and maker not in self.free)
            ):
                fixed += size
            elif later:
                i = self.free[maker]
                # ops after `again` have been computed again by the end of the stage before, if at all
                there = self._column(i, stage if maker < runs else stage - 1)
                fixed += size
                if there != self._again[i]:
                    terms.append((int(self._again[i]), -size))
                    terms += [(there, size)] if there != ZERO else []
            elif again == ZERO and maker < self.boundary:
                terms.append((self._held_for(value, stage), size))
        room = self.budget - fixed
        weight = self.byte_unit
        # rounded so that no set of tags that fits is lost: what adds memory down, what takes some away up
        columns = np.asarray([c for c, _ in terms], np.int64)
        values = np.asarray([math.floor(size / weight) for _, size in terms], np.float64)
        most = float(math.floor(room / weight))
        if again == ZERO:
            self._builder.add_rows(1, [Term(0, columns, values)], upper=most)
            return
        i = self.free[again]
        big = float(values[values > 0].sum()) - min(0.0, most)
        ran = Term(0, self._column(i, stage), big), Term(0, self._column(i, stage - 1), -big)
        self._builder.add_rows(1, [Term(0, columns, values), *ran], upper=most + big)

    def _column(self, i: int, stage: int) -> int:
        return ZERO if stage < 0 else int(self._done[i, stage])

    def _held_for(self, value: int, stage: int) -> int:
        """A column that is 1 where a value is there only for ops that are still to be computed again, or `ZERO`."""
        readers = [self.free[q] for q in self.readers[value] if self._done[self.free[q], -1] != ZERO]
        if not readers:
            return ZERO
        maker = self.free.get(self.graph.value_op[value])
        held = int(self._builder.variables(1, integer=False)[0])
        for q in readers:
            to_come = [(int(self._done[q, -1]), 1.0), (self._column(q, stage), -1.0), (held, -1.0)]
            if maker is not None:
                to_come += [(int(self._again[maker]), -1.0), (self._column(maker, stage), 1.0)]
            self._builder.add_rows(1, [Term(0, column, value) for column, value in to_come], upper=0.0)
        return held

    def tags(self, x: Floats) -> frozenset[int]:
        """The ops that a solution computes again."""
        return frozenset(op for op, i in self.free.items() if x[self._again[i]] > 0.5)

    def bound_ns(self, bound: float) -> int:
        """A bound on the objective as one on the cost of a step."""
        if not math.isfinite(bound):
            return 0
        return self.graph.total_cost_ns + self.cost_unit * max(0, math.ceil(bound - 1e-6 * max(1.0, abs(bound))))

    def refine(self, tags: frozenset[int]) -> None:
        """Add rows where a set of tags exceeds the memory; where all are there, leave the set itself out."""
        before = len(self.cuts) + len(self.forward) + len(self.recomputations)
        order = tagged_order(self.graph, tags)
        try:
            moments = [m for m in replay(self.graph, plan_of(self.graph, order)) if m.op is not None]
        except InvalidPlan:
            self.wrong.append(tags)
            return
        over: dict[int, tuple[int, int]] = {}  # by backward op, the worst moment before it: bytes and op
        readers, later = [0] * len(order), 0  # the backward op for which each op runs
        for place in range(len(order) - 1, -1, -1):
            later = readers[place] = order[place] if order[place] >= self.boundary else later
        for place, moment in enumerate(moments):
            assert moment.op is not None
            key = moment.op if place < self.boundary else readers[place]
            if moment.peak_bytes > self.budget and moment.peak_bytes > over.get(key, (0, 0))[0]:
                over[key] = moment.peak_bytes, moment.op
        for key, (_, op) in sorted(over.items(), key=lambda pair: -pair[1][0])[:4]:
            if key < self.boundary:
                self.forward.add(key)
                continue
            self.cuts.add(key)
            if op != key:
                self.cuts.add(max(self.boundary, key - 1))
                self.recomputations.add((op, key))
        if len(self.cuts) + len(self.forward) + len(self.recomputations) == before:
            self.wrong.append(tags)


def prove(incumbent: Incumbent, search: TagSearch, stopped: Callable[[], bool]) -> bool:
    """Raise the bound of the space round by round, and offer the plans of solutions that fit.

    Returns whether the engine says that there is none, in floating point.
    """
    if stopped() or len(search.free) > _MOST_OPS:
        return False
    program = TagProgram(incumbent.problem.graph, incumbent.problem.budget_bytes, search.free.tolist())
    turn = _TURN_S
    with Engine("highs") as engine, suppress(TimeUp):
        while not stopped():
            outcome = engine.run(
                program.write(stopped), deadline=incumbent.deadline, stopped=stopped, relative_gap=1e-9, turn_s=turn
            )
            bound = program.bound_ns(outcome.bound)
            if bound > incumbent.problem.graph.total_cost_ns:
                incumbent.raise_bound(bound, "tags", (TAGS,))
            if outcome.x is None:
                return outcome.status == "infeasible"
            tags = program.tags(outcome.x)
            if search.fits(tags):
                incumbent.offer(tagged_plan(program.graph, tags), "tags")
                if outcome.status == "optimal":
                    return False
                turn *= 2
            else:
                program.refine(tags)
            turn *= 1.5
    return False
