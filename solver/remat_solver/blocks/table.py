"""A chain program over blocks: how best to pass, tape and reverse the segments of a graph, for every memory limit.

What it must know of a block is a menu of a few choices, found by search. Its inner loops are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph, Problem
from remat_ir.graph import working_set
from remat_ir.greedy import greedy_plan

from .._numba import inner, int32, kernel
from ..array_view import Ids, trace, view_of
from ..deadline import look, never
from ..search.local import Search
from .segments import Block, Segments

_LEVELS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
"""How much of what could be kept over the forward/backward boundary is, in most of the choices."""
_PEAKS = (0.0, 0.2, 0.5)
"""Where the peaks of the other choices lie between the least and that of keeping all."""
_MOVES_PER_OP, _MOST_MOVES = 200, 8192


class Choice(NamedTuple):
    """One way to run a block's two parts, ranked by its numbers.

    Attributes:
        extra_ns: the cost of the recomputations.
        tape_bytes: what stays between the parts, the joint included.
        backward_bytes, forward_bytes: the peaks of the parts besides what comes from earlier segments.
        backward: the block's ops of the backward part in the order in which they run, recomputations included.
    """

    extra_ns: int
    tape_bytes: int
    backward_bytes: int
    forward_bytes: int
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Menu:
    """What a chain program must know of a block: its choices, and how it runs forward without a tape.

    `passing_bytes` is the peak of that, besides what comes from earlier segments, and `forward_ns` its cost.
    """

    choices: tuple[Choice, ...]
    passing_bytes: int
    forward_ns: int


def menu_of(block: Block, *, stopped: Callable[[], bool] = never) -> Menu:
    """The choices of a block: keep all, keep less and recompute in the backward part, with as much memory as is there
    or with less; none that another one beats in everything. Deterministic.
    """
    graph, turn, view = block.graph, block.turn, view_of(Problem(block.graph, 0))
    plain = tuple(range(graph.ops))
    turned = int(trace(view, plain).memory[turn])
    # nothing but the joint stays of a part that runs forward alone
    passing_bytes = int(trace(view, range(turn + 1)).memory[1:turn].max()) - block.outside_bytes
    all_kept = choice_of(block, plain)
    found = {all_kept}
    joint_bytes = sum(graph.value_bytes[v] for v in block.joint)
    spare = all_kept.tape_bytes - joint_bytes
    peak = block.outside_bytes + max(all_kept.forward_bytes, all_kept.backward_bytes)
    best = plain
    for share in sorted(_LEVELS, reverse=True):
        if spare <= 0 or stopped():
            break
        # at the turn everything but the tape, as wide as is allowed, counts as workspace
        workspace = list(graph.op_workspace_bytes)
        workspace[turn] = max(0, peak - (turned - int((1.0 - share) * spare)))
        order = _cheap(replace(graph, op_workspace_bytes=tuple(workspace)), peak, best)
        if order is None:
            break
        best = order
        found.add(choice_of(block, order))
    least = working_set(graph).least_bytes
    for share in _PEAKS:
        if stopped() or least >= peak:
            break
        order = _cheap(graph, least + int(share * (peak - least)), plain)
        if order is not None:
            found.add(choice_of(block, order))
    return Menu(tuple(_undominated(found)), passing_bytes, sum(graph.op_cost_ns[:turn]))


def choice_of(block: Block, order: tuple[int, ...]) -> Choice:
    """The choice that runs the forward part once and the backward part as `order` does."""
    graph, turn = block.graph, block.turn
    backward = order[order.index(turn) + 1 :]
    run = trace(view_of(Problem(graph, 0)), (*range(turn + 1), *backward))
    after = run.instance_value[(run.made < turn) & (run.last > turn)]
    held = {int(v) for v in after if graph.value_op[v] != 0} | set(block.joint)
    return Choice(
        sum(graph.op_cost_ns[op] for op in backward) - sum(graph.op_cost_ns[turn + 1 :]),
        sum(graph.value_bytes[v] for v in held),
        int(run.memory[turn:].max()) - block.outside_bytes,
        int(run.memory[1 : turn + 1].max()) - block.outside_bytes,
        backward,
    )


def _cheap(graph: Graph, budget: int, start: tuple[int, ...]) -> tuple[int, ...] | None:
    """A cheap sequence within the budget, from the greedy plan or from `start`, or None."""
    search = Search(graph, budget)
    plan = greedy_plan(graph, budget, tries=2)
    search.adopt(start if plan is None else plan.computes)
    moves = min(_MOST_MOVES, _MOVES_PER_OP * graph.ops)
    search.cycle(moves, 0.3, never)
    return search.sequence()


def _undominated(choices: set[Choice]) -> list[Choice]:
    kept: list[Choice] = []
    for choice in sorted(choices):
        if not any(all(a <= b for a, b in zip(other[:4], choice[:4], strict=True)) for other in kept):
            kept.append(choice)
    return kept


NEVER = 1 << 29
"""Stands for infinity; two of them and the costs of one pass still fit an int32."""

Array = Any  # numpy arrays, which numba types for itself


def row_of(s: int, t: int, count: int) -> int:
    """The row of the table that holds C(s, t, ·), 0 ≤ s ≤ t < count."""
    return s * count - (s * (s - 1)) // 2 + t - s


_row_of = inner(row_of)


@kernel(nogil=True)
def fill(
    s: int, count: int, forward: Array, joint: Array, need_pass: Array, first_choice: Array, tape: Array, paid: Array,
    need_forward: Array, need_backward: Array, held: Array, base: Array, table: Array,
) -> None:  # fmt: skip
    """Fill the rows C(s, ·, ·) of the table [rows, slots] from those of all later segments; see `BlockTable`.

    In units of cost: `forward` [L + 1], the prefix sum of forward costs, and `paid`, a choice's two parts. In slots:
    `joint` [L], what a checkpoint behind each segment takes; `need_pass` [L, L], what passing s … t − 1 takes; `tape`,
    `need_forward` and `need_backward` of each choice; `held` [L] while ops before the backward part of the next segment
    run; `base` [L] while the backward part of s runs. The choices of s are first_choice[s] … first_choice[s + 1] − 1.
    """
    slots = table.shape[1]
    best = np.empty(slots, np.int32)
    for t in range(s, count):
        best[:] = NEVER
        low = need_pass[s, t]
        for k in range(s + 1, t + 1):
            saved = joint[k - 1]
            start = max(low, saved)
            if start >= slots:
                continue
            ahead = int32(forward[k] - forward[s])
            right, left = table[_row_of(k, t, count)], table[_row_of(s, k - 1, count)]
            for m in range(start, slots):
                best[m] = min(best[m], int32(right[m - saved] + left[m] + ahead))
        for c in range(first_choice[s], first_choice[s + 1]):
            low = max(held[t] + need_forward[c], base[s] + need_backward[c])
            if s == t:
                for m in range(low, slots):
                    best[m] = min(best[m], paid[c])
            else:
                after = table[_row_of(s + 1, t, count)]
                for m in range(max(low, tape[c]), slots):
                    best[m] = min(best[m], int32(after[m - tape[c]] + paid[c]))
        row = table[_row_of(s, t, count)]
        for m in range(slots):
            row[m] = min(best[m], NEVER)


class Item(NamedTuple):
    """Segment `segment` is passed without a tape, taped by a choice, or reversed by it; `what` says which."""

    what: str
    segment: int
    choice: int = -1


class BlockTable:
    """C(s, t, m): the least cost of running segments s … t forward and backward in m slots besides their input.

    The recursion is that of RR-9302, Theorem 1, over segments, except that a segment can be taped in several ways
    (Zhao et al., Rockmate, 2023, do this with menus for the blocks of transformers). With a_s the joint behind s, and

        checkpoint  Σ_{s ≤ i < k} u_i + C(k, t, m − a_{k−1}) + C(s, k − 1, m)       for s < k ≤ t
        tape        u_s + b_s + extra_c + C(s + 1, t, m − tape_c)                    for each choice c of s

    C is the smallest of these for which the single steps fit into m. It is a program for plans: sizes are rounded to
    slots and the graph may not be a chain altogether, so what comes out is measured before it is believed.

    Attributes:
        slots: memory limits 0 … slots − 1. slot_bytes: of each.

    Raises:
        TimeUp: `stop` said so before the table was full.
    """

    def __init__(
        self,
        segments: Segments,
        menus: list[Menu],
        available_bytes: int,
        slots: int,
        stop: Callable[[], bool] = never,
    ) -> None:
        count = segments.count
        self.segments, self.menus, self.slots = segments, menus, slots
        self.slot_bytes = max(1, -(-available_bytes // (slots - 1)))
        graph = segments.graph
        joint = np.array([sum(graph.value_bytes[v] for v in values) for values in segments.joints], np.int64)
        before, base = _gradients(segments)
        backward = [sum(graph.op_cost_ns[op] for op in segments.backward(i)) for i in range(count)]
        choices = [choice for menu in menus for choice in menu.choices]
        first = np.cumsum([0] + [len(menu.choices) for menu in menus])
        owner = np.repeat(np.arange(count), np.diff(first))
        worth = sum(menu.forward_ns for menu in menus) * count + sum(backward)
        worth += sum(max((c.extra_ns for c in menu.choices), default=0) for menu in menus)
        self.unit_ns = max(1, -(-worth // (NEVER - 1)))
        run = np.array([0] + [menu.forward_ns for menu in menus], np.int64)
        paid = [menus[i].forward_ns + backward[i] + c.extra_ns for i, c in zip(owner, choices, strict=True)]
        self._forward = np.cumsum(run // self.unit_ns).astype(np.int32)
        self._paid = (np.array(paid, np.int64) // self.unit_ns).astype(np.int32)
        self._first = first.astype(np.int64)
        self._joint = self._near(joint)
        self._tape = self._near(np.array([c.tape_bytes for c in choices], np.int64))
        self._held, self._base = self._near(before), self._near(base)
        self._need_forward = self._near(np.array([c.forward_bytes for c in choices], np.int64))
        self._need_backward = self._near(np.array([c.backward_bytes for c in choices], np.int64))
        self._need_pass = self._near(self._passing(joint, before))
        self._table = np.empty((count * (count + 1) // 2, slots), np.int32)
        for s in range(count - 1, -1, -1):
            look(stop)
            fill(
                s, count, self._forward, self._joint, self._need_pass, self._first, self._tape, self._paid,
                self._need_forward, self._need_backward, self._held, self._base, self._table,
            )  # fmt: skip

    def _near(self, size: Ids) -> Ids:
        return (size + self.slot_bytes // 2) // self.slot_bytes

    def _passing(self, joint: Ids, before: Ids) -> Ids:
        """[L, L] the bytes besides the input of s that passing s … t − 1 takes, with t + 1 … L reversed before."""
        count = self.segments.count
        own = np.array([menu.passing_bytes for menu in self.menus], np.int64)
        beside = own + np.concatenate(([0], joint[:-1]))
        need = np.zeros((count, count), np.int64)
        for s in range(count - 1):
            steps = np.concatenate(([own[s]], beside[s + 1 : count - 1]))
            need[s, s + 1 :] = before[s + 1 :] + np.maximum.accumulate(steps)
        return need

    def costs(self) -> NDArray[np.int32]:
        """[slots] the cost in units of the best plan within each memory limit, `NEVER` where there is none."""
        row: NDArray[np.int32] = self._table[row_of(0, self.segments.count - 1, self.segments.count)]
        return row

    def items(self, slots: int) -> list[Item]:
        """What the best plan within so many slots does, in order; empty where there is none."""
        count, table = self.segments.count, self._table
        if self.costs()[slots] >= NEVER:
            return []
        done: list[Item] = []
        todo: list[Item | tuple[int, int, int]] = [(0, count - 1, slots)]
        while todo:
            head = todo.pop()
            if isinstance(head, Item):
                done.append(head)
                continue
            s, t, m = head
            value = int(table[row_of(s, t, count), m])
            choice = self._taped(s, t, m, value)
            if choice is not None:
                done.append(Item("tape", s, choice))
                todo.append(Item("reverse", s, choice))
                if s < t:
                    todo.append((s + 1, t, m - int(self._tape[self._first[s] + choice])))
                continue
            k = self._split(s, t, m, value)
            done += (Item("pass", segment) for segment in range(s, k))
            todo += ((s, k - 1, m), (k, t, m - int(self._joint[k - 1])))
        return done

    def _taped(self, s: int, t: int, m: int, value: int) -> int | None:
        for c in range(int(self._first[s]), int(self._first[s + 1])):
            low = max(self._held[t] + self._need_forward[c], self._base[s] + self._need_backward[c])
            if m < low or (s < t and m < self._tape[c]):
                continue
            after = 0 if s == t else int(self._table[row_of(s + 1, t, self.segments.count), m - int(self._tape[c])])
            if after + int(self._paid[c]) == value:
                return c - int(self._first[s])
        return None

    def _split(self, s: int, t: int, m: int, value: int) -> int:
        count = self.segments.count
        for k in range(s + 1, t + 1):
            saved = int(self._joint[k - 1])
            if m < max(saved, int(self._need_pass[s, t])):
                continue
            ahead = int(self._forward[k] - self._forward[s])
            if (
                int(self._table[row_of(k, t, count), m - saved] + self._table[row_of(s, k - 1, count), m]) + ahead
                == value
            ):
                return k
        raise AssertionError(f"no step reaches C({s}, {t}, {m})")


def _gradients(segments: Segments) -> tuple[Ids, Ids]:
    """[L] twice: the bytes of backward values alive before the backward part of each segment, after that of the next;
    and of those alone that are there throughout it without being read or made in it.
    """
    graph, split = segments.graph, segments.ends[-1] + 1
    keep = frozenset(graph.keep)
    change = [0] * (graph.ops + 1)
    idle = [0] * segments.count
    place = [0] * graph.ops
    for segment in range(segments.count):
        for op in segments.backward(segment):
            place[op] = segment
    for value, op in enumerate(graph.value_op):
        if op < split:
            continue
        last = graph.ops if value in keep else max(graph.users[value], default=op)
        change[op] += graph.value_bytes[value]
        change[last] -= graph.value_bytes[value]
        readers = {place[user] for user in graph.users[value]}
        lowest = 0 if value in keep else min(readers, default=place[op])
        for segment in range(lowest, place[op]):
            if segment not in readers:
                idle[segment] += graph.value_bytes[value]
    alive = np.cumsum(np.array(change, np.int64))
    return alive[np.array(segments.backward_starts) - 1], np.array(idle, np.int64)
