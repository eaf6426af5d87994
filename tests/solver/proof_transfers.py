"""The point that a plan with transfers maps to, from its replay; and plans by random steps, with a link or without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from remat_ir import Compute, Free, Graph, Offload, Plan, Prefetch, Problem, Step, replay
from remat_ir.proof.certificate import Column
from remat_ir.proof.rows import Relaxation
from solver.transfer_brute import State, moves


def random_plan(problem: Problem, rng: random.Random) -> Plan | None:
    """A plan by random steps, useless ones among them, as the rules allow; None where it gets nowhere."""
    graph = problem.graph
    state, steps = State(), list[Step]()
    gone = {v: graph.users[v][-1] for v in graph.consumes}
    favour = rng.choice((1, 3, 10))
    for _ in range(40 * graph.ops):
        if state.done == graph.ops and not state.leaving and not state.returning:
            return Plan(tuple(steps))
        able = [
            each
            for each in moves(problem, state)
            if not isinstance(each[0], Compute)
            or all(gone.get(v, graph.ops) >= state.done for v in graph.op_inputs[each[0].op])
        ]
        if not able:
            return None
        weights = [favour if isinstance(step, Compute) and step.op == state.done else 1 for step, _, _ in able]
        step, _, state = rng.choices(able, weights)[0]
        steps.append(step)
    return None


class Excursion(NamedTuple):
    """When the copy out and the copy back of a value begin and end on the link."""

    value: int
    out: tuple[int, int]
    back: tuple[int, int]


class Moved:
    """What a plan does, by its replay, as the propositions have it: useful computations, and useful excursions."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.moments = graph, list(replay(graph, plan))
        self.computes = {i: step.op for i, step in enumerate(plan.steps) if isinstance(step, Compute)}
        self.first = {op: i for i, op in reversed(self.computes.items())}
        sources: dict[int, list[int]] = {}  # a computation -> those that made what it reads
        self.instance: list[dict[int, int]] = []  # after each step: value -> the computation that made it
        current: dict[int, int] = {}
        for i, step in enumerate(plan.steps):
            if isinstance(step, Compute):
                sources[i] = [current[v] for v in graph.op_inputs[step.op]]
                kept = graph.op_always[step.op] if step.kept is None else step.kept
                current = current | dict.fromkeys(kept, i)
            elif isinstance(step, Free):
                current = {v: made for v, made in current.items() if v != step.value}
            self.instance.append(current)
        self.useful = set(self.first.values())
        for i in sorted(sources, reverse=True):
            if i in self.useful:
                self.useful |= set(sources[i])
        self.last_read: dict[tuple[int, int], int] = {}  # (value, made) -> its last useful reading
        for i in sorted(self.useful):
            for value, made in zip(graph.op_inputs[self.computes[i]], sources[i], strict=True):
                self.last_read[value, made] = i
        self.excursions = list(self._excursions(plan))
        self.away = self._away(plan)

    def _excursions(self, plan: Plan) -> Iterator[Excursion]:
        out: dict[int, tuple[int, int]] = {}
        for i, step in enumerate(plan.steps):
            span = self.moments[i].copy_ns
            if isinstance(step, Offload) and span is not None:
                out[step.value] = span
            elif isinstance(step, Prefetch) and span is not None:
                made = self.instance[i][step.value]
                if self.last_read.get((step.value, made), -1) > i and self.graph.value_bytes[step.value]:
                    yield Excursion(step.value, out[step.value], span)

    def _away(self, plan: Plan) -> list[dict[int, int]]:
        """After each step: the values that have left, and when their copy back begins; never, as yet: far away."""
        found, away = [], dict[int, int]()
        for i, step in enumerate(plan.steps):
            name, span = type(step).__name__, self.moments[i].copy_ns
            if name == "Drop":
                away = away | {step.value: 2**60}
            elif isinstance(step, Prefetch) and span is not None:
                away = away | {step.value: span[0]}
            elif name == "Wait":
                away = {v: begin for v, begin in away.items() if v != step.value}
            found.append(away)
        return found

    def begins(self, on: Relaxation, c: int) -> tuple[int, int]:
        """The last step before coarse stage c, and the time then."""
        if c == 0:
            return -1, 0
        step = len(self.moments) - 1 if c == on.stages else self.first[on.cuts[c - 1]]
        return step, self.moments[step].cost_ns

    def runs(self, on: Relaxation, c: int, op: int) -> bool:
        """R."""
        begin, end = self.begins(on, c)[0], self.begins(on, c + 1)[0]
        return any(begin < i <= end and self.computes[i] == op for i in self.useful)

    def holds(self, on: Relaxation, c: int, value: int) -> bool:
        """S."""
        step, time = self.begins(on, c)
        made = self.instance[step].get(value)
        if made is None:
            return False
        if value in self.graph.keep:
            return True
        here = not self.graph.value_bytes[value] or self.away[step].get(value, -1) < time
        return here and self.last_read.get((value, made), -1) > step

    def begun(self, on: Relaxation, c: int, value: int, direction: int) -> int:
        """X or P."""
        begin, end = self.begins(on, c)[1], self.begins(on, c + 1)[1]
        return sum(begin <= each[1 + direction][0] < end for each in self.excursions if each.value == value)

    def lasts(self, on: Relaxation, c: int) -> int:
        """D."""
        return self.begins(on, c + 1)[1] - self.begins(on, c)[1]

    def at(self, on: Relaxation, column: Column) -> int:
        """What a column is for this plan."""
        kind, c, *rest = column[0], *(int(number) for number in column[1:])
        graph, time = self.graph, self.begins(on, c)[1]
        if kind == "run":
            return int(self.runs(on, c, rest[1]))
        if kind == "idle":
            once = sum(graph.op_cost_ns[on.first[c] : on.cuts[c] + 1])
            return (
                self.lasts(on, c) - once - sum(graph.op_cost_ns[op] * self.runs(on, c, op) for op in range(on.first[c]))
            )
        if kind == "running":
            copies = [each[1 + rest[0]] for each in self.excursions]
            return max((end - time for begin, end in copies if begin < time < end), default=0)
        value = rest[0]
        if kind == "host":
            return sum(each.out[0] < time <= each.back[0] for each in self.excursions if each.value == value)
        if kind in ("out", "back"):
            return self.begun(on, c, value, int(kind == "back"))
        if kind == "hold":
            return int(self.holds(on, c, value))
        assert kind == "through"
        brought = self.runs(on, c, graph.value_op[value]) or self.begun(on, c, value, 1)
        read = value in graph.op_inputs[on.cuts[c]]
        return int(not brought and (read or (c + 1 < on.stages and self.holds(on, c + 1, value))))
