"""The persistent optimum of a linear network: Rotor's recursion with stages that are replayed op by op.

As in RR-9302, Section 4.2, with what captured graphs have beyond the paper's chains. Gradients that are kept add up
from stage to stage, in one order, so that they are a function of the stage whose backward part comes next. The first
run of a stage computes all of its ops, later ones only what is read of them. And a value that leads on is read by the
backward part of its own stage, too: where it was saved, and stays, that stage's tape is made out of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from remat_ir import Plan

from ..deadline import look, never
from .network import LinearNetwork

NEVER = 1 << 60
"""Stands for infinity; two of them fit an int64."""
MOST_SLOTS = 2000
MOST_CELLS = 16_000_000
"""Costs that one table may hold, of 16 bytes each."""
MOST_WORK = 2e7
"""Sums that one table may take: some tenths of a second."""

Array = Any
Choose: TypeAlias = Callable[[int, int, bool, int], tuple[int, bool, int]]


@dataclass(frozen=True)
class Run:
    """Some ops of a stage, run in order: what they cost, and their peak in bytes beyond what is counted elsewhere."""

    ops: tuple[int, ...]
    cost_ns: int
    peak_bytes: int


@dataclass(frozen=True)
class Stage:
    """What one stage t costs and needs, by replay.

    Attributes:
        forward, taped: its run for the value that leads on alone, or with its tape, the first time.
        again, taped_again: the same later, when only what is read is computed.
        retaped: its tape made anew where the value that leads on is there; None where that value would be, too.
        backward: its backward part.
        leads_bytes, tape_bytes: the value that leads on, and its tape with that.
        staying_first_bytes: values that stay, as it runs for the first time.
        held_bytes: what stays or comes from later backward parts, while stages up to t are run again.
        staying_bytes: what of that its backward part does not read or make itself.
    """

    forward: Run
    taped: Run
    again: Run
    taped_again: Run
    retaped: Run | None
    backward: Run
    leads_bytes: int
    tape_bytes: int
    staying_first_bytes: int
    held_bytes: int
    staying_bytes: int


class Stages:
    """What a linear network's stages cost and need: `stages[t]`, counted from 1 as in the paper.

    Where `stop` says so, their making is left, by `TimeUp`.

    Attributes:
        highest: [L+1, L+1] the most that running stages s … t one after the other needs, beyond what leads into s; of
            their first runs, by True, and of later ones.
    """

    def __init__(self, network: LinearNetwork, stop: Callable[[], bool] = never) -> None:
        self.network = network
        self.count, graph = network.stages, network.graph
        first = network.forward[-1].stop
        part = [0] * graph.ops
        for stage in range(self.count):
            for op in (*network.forward[stage], *network.backward[stage]):
                part[op] = stage + 1
        ids = [v for v, op in enumerate(graph.value_op) if op >= first]
        by = [part[graph.value_op[v]] for v in ids]
        # one that nothing reads is gone at once
        read_last = [part[graph.users[v][-1]] if graph.users[v] else 1 << 30 for v in ids]
        gradients = np.array(ids, np.int64), np.array(by), np.array(read_last)
        # stages after this one have no backward part: whatever is run again for them comes before the first backward op
        head = part[first]
        self._stages: list[Stage] = []
        after_first: list[int] = []  # peaks of runs that free what leads in
        after_again: list[int] = []
        for t in range(1, self.count + 1):
            look(stop)
            made = self._stage(t, part, gradients, network.passed if t >= head else frozenset())
            self._stages.append(made)
            before, leads = network.leads(t - 2), network.leads(t - 1)
            following = self._run(network.forward[t - 1], leads, before, first=True)
            after_first.append(following.peak_bytes + made.staying_first_bytes)
            after_again.append(self._run(made.again.ops, leads, before).peak_bytes)
        self._parts = [0, *itertools.accumulate(len(made.backward.ops) for made in self._stages)]
        alone = [made.forward.peak_bytes + made.staying_first_bytes for made in self._stages]
        again = [stage.again.peak_bytes for stage in self._stages]
        self.highest = {True: self._highest(alone, after_first), False: self._highest(again, after_again)}

    def __getitem__(self, t: int) -> Stage:
        """Stage t, from 1 on."""
        return self._stages[t - 1]

    def _stage(
        self, t: int, part: Sequence[int], gradients: tuple[Array, Array, Array], passed: frozenset[int]
    ) -> Stage:
        """Stage t; `part` has the stage of each op, `passed` what stays until the backward pass begins.

        `gradients` has of each value of the backward pass its id, the stage that makes it, and that of the last op that
        reads it.
        """
        network, graph = self.network, self.network.graph
        keep = frozenset(graph.keep)
        ops, before, leads = network.forward[t - 1], network.leads(t - 2), network.leads(t - 1)
        tape = network.tapes[t - 1] | leads
        anew = network.needed(t - 1, tape, before | leads)
        ids, by, read_last = gradients
        from_later = ids[by > t].tolist()
        crossing = frozenset(ids[(by > t) & (read_last <= t)].tolist()) - keep
        leaving = frozenset(ids[(by >= t) & (read_last < t)].tolist())
        staying = network.bytes_of(v for v in network.stays if v in keep or any(part[u] <= t for u in graph.users[v]))
        staying += network.bytes_of(v for v in from_later if v in keep)
        there = tape | crossing | passed
        return Stage(
            forward=self._run(ops, leads, first=True),
            taped=self._run(ops, tape, first=True),
            again=self._run(network.needed(t - 1, leads, before), leads),
            taped_again=self._run(network.needed(t - 1, tape, before), tape),
            retaped=None if any(graph.value_op[v] in anew for v in leads) else self._run(anew, tape, given=leads),
            backward=self._run(network.backward[t - 1], leaving | keep, given=there),
            leads_bytes=network.bytes_of(leads),
            tape_bytes=network.bytes_of(tape),
            staying_first_bytes=network.bytes_of(
                v
                for v in (*network.stays, *network.passed)
                if graph.value_op[v] < ops.start and v not in before and (v in keep or graph.users[v][-1] >= ops.start)
            ),
            held_bytes=staying + network.bytes_of(crossing | passed),
            staying_bytes=staying,
        )

    def _run(
        self, ops: Sequence[int], retained: Collection[int], given: Iterable[int] = (), *, first: bool = False
    ) -> Run:
        """Ops in order, with what is given counted from the start, and all but what is retained freed when read last.

        What else they read is counted elsewhere, and so are values that stay, but where they are made first.
        """
        graph = self.network.graph
        stays = self.network.stays | self.network.passed if first else frozenset()
        kept = stays.union(graph.keep, retained)
        last = {v: i for i, op in enumerate(ops) for v in graph.op_inputs[op]}
        here = set(given)
        held = self.network.bytes_of(here)
        peak = held
        for i, op in enumerate(ops):
            wanted = {v for v in graph.op_values[op] if last.get(v, -1) > i or v in kept} - here
            during = wanted.union(graph.op_always[op]) - here
            peak = max(peak, held + self.network.bytes_of(during) + graph.op_workspace_bytes[op])
            here.update(wanted)
            gone = {v for v in graph.op_inputs[op] if v in here and last[v] == i} - kept
            here -= gone
            held += self.network.bytes_of(wanted) - self.network.bytes_of(gone)
        return Run(tuple(ops), sum(graph.op_cost_ns[op] for op in ops), peak)

    def nothing_after(self, s: int, t: int) -> bool:
        """Whether stages s … t have no backward part, so that nothing of them is run again."""
        return t < self.count and self._parts[t] == self._parts[s - 1]

    def held_bytes(self, t: int, joined: bool) -> int:
        """What is there for others while stages up to t run; with what leads on from t where that is `joined`."""
        return 0 if t == self.count else self[t].held_bytes + (self[t].leads_bytes if joined else 0)

    def run_with_tape(self, s: int, t: int, joined: bool) -> Run:
        """The run of s that keeps its tape, before s + 1 … t follow; `joined` where what leads on from t is there."""
        if t == self.count:
            return self[s].taped
        anew = self[s].retaped if joined and s == t else None
        return self[s].taped_again if anew is None else anew

    def needed_with_tape(self, s: int, t: int, joined: bool) -> int:
        """The bytes that this run and the backward part of s need, beyond the value that leads into s."""
        stage = self[s]
        base = stage.staying_first_bytes if t == self.count else self.held_bytes(t, joined and s < t)
        run = self.run_with_tape(s, t, joined)
        return max(run.peak_bytes + base, stage.staying_bytes + stage.backward.peak_bytes)

    def _highest(self, alone: Sequence[int], after: Sequence[int]) -> Array:
        """From the peak of each stage that begins, and of each that follows another."""
        found = np.zeros((self.count + 1, self.count + 1), np.int64)
        for s in range(1, self.count + 1):
            found[s, s:] = np.maximum.accumulate(np.array((alone[s - 1], *after[s:]), np.int64))
        return found


class Persistent:
    """The cheapest persistent schedule of stages for every memory limit up to a budget, in slots that round down.

    C(s, t, m) is what running stages s … t again adds to one pass, with m slots beyond the value that leads into s and
    all that is held for other stages; D(s, t, m) the same where the value that leads on from t is there, within m.
    Every schedule that fits in bytes fits in slots, so that costs are bounds; whether a schedule fits is for a replay
    to say.

    Attributes:
        added_ns: the least that persistent schedules of these stages add to one pass, or None where none fits.

    Raises:
        TimeUp: `stop` said so before the table was full.
    """

    def __init__(
        self,
        stages: Stages,
        budget_bytes: int,
        *,
        slots: int,
        tapes: bool = True,
        stop: Callable[[], bool] = never,
    ) -> None:
        self.stages, self.tapes, self._stop = stages, tapes, stop
        count = stages.count
        available = max(0, budget_bytes - stages.network.graph.fixed_bytes)
        self.unit = max(1, -(-available // slots))
        self._room = np.arange(available // self.unit + 1)
        each = [stages[t] for t in range(1, count + 1)]
        self._tape = np.array([0, *(stage.tape_bytes for stage in each)], np.int64) // self.unit
        self._leads = np.array([0, *(stage.leads_bytes for stage in each)], np.int64) // self.unit
        self._again_ns = np.cumsum([0, *(stage.again.cost_ns for stage in each)])
        shape = (count + 2, count + 2, len(self._room))
        self.c, self.d = np.full(shape, NEVER, np.int64), np.full(shape, NEVER, np.int64)
        for t in range(1, count + 1):
            look(stop)
            shifted = {joined: np.full((count + 2, len(self._room)), NEVER, np.int64) for joined in (False, True)}
            for s in range(t, 0, -1):
                for joined, costs in ((False, self.c), (True, self.d)):
                    if joined and (t == count or stages[t].retaped is None):
                        continue
                    costs[s, t] = self._options(s, t, joined, shifted[joined]).min(axis=0)
                    shift = int(self._leads[s - 1])
                    shifted[joined][s, shift:] = costs[s, t, : len(self._room) - shift]
        added = int(self.c[1, count, -1])
        self.added_ns = None if added >= NEVER else added

    def cheapest(self, fitting: Callable[[list[int]], Plan | None]) -> Plan | None:
        """The plan of the cheapest schedule found that fits, as `fitting` makes it of its ops; None without one.

        Rounding loses less than a slot for each value that is saved, so the limit is lowered until a schedule fits, by
        bisection over the different costs, which ends with what it has where `stop` says so.
        """
        costs = self.c[1, self.stages.count]
        limits = [int(m) for m in np.unique(costs, return_index=True)[1] if costs[m] < NEVER]
        best: Plan | None = None
        low, high = 0, len(limits)
        while low < high and not self._stop():
            middle = 0 if best is None and low == 0 and high == len(limits) else (low + high) // 2
            plan = fitting(self._sequence(limits[middle]))
            if plan is None:
                low = middle + 1
            else:
                best, high = plan, middle
        return best

    def _options(self, s: int, t: int, joined: bool, shifted: Array) -> Array:
        """[t − s + 1, m + 1] the cost of beginning with the tape of s, and of saving what leads on from s … t − 1.

        `shifted` [k, m] is what k … t add where m less the value that leads into k is left.
        """
        stages, last = self.stages, t == self.stages.count
        found = np.full((t - s + 1, len(self._room)), NEVER, np.int64)
        self._with_tape(s, t, joined, found[0])
        if s == t:
            return found
        base = stages.held_bytes(t, joined)
        split = np.minimum(self.c[s, s:t], self.d[s, s:t]) + shifted[s + 1 : t + 1]
        if not last:
            split += (self._again_ns[s:t] - self._again_ns[s - 1])[:, None]
        least = (stages.highest[last][s, s:t] + base) // self.unit
        split[(self._room[None, :] < least[:, None]) | (split > NEVER)] = NEVER
        found[1:] = split
        return found

    def _with_tape(self, s: int, t: int, joined: bool, into: Array) -> None:
        stages = self.stages
        if stages.nothing_after(s, t):
            into[:] = 0
            return
        if s < t and not self.tapes:
            return
        again = 0 if t == stages.count else stages.run_with_tape(s, t, joined).cost_ns
        least = stages.needed_with_tape(s, t, joined) // self.unit
        if s == t:
            into[least:] = again
            return
        shift = int(self._tape[s])
        least = max(least, shift)
        if least < len(into):
            rest = (self.d if joined else self.c)[s + 1, t, least - shift : len(into) - shift]
            into[least:] = np.minimum(NEVER, rest + again)

    def _sequence(self, room: int) -> list[int]:
        def choose(s: int, t: int, joined: bool, room: int) -> tuple[int, bool, int]:
            costs = self.d if joined else self.c
            shifted = np.full((t + 1, len(self._room)), NEVER, np.int64)
            for k in range(s + 1, t + 1):
                shift = int(self._leads[k - 1])
                shifted[k, shift:] = costs[k, t, : len(self._room) - shift]
            choice = int(self._options(s, t, joined, shifted)[:, room].argmin())
            if choice == 0:
                return 0, False, room - int(self._tape[s])
            k = s + choice
            there = bool(self.d[s, k - 1, room] < self.c[s, k - 1, room])
            return choice, there, room - int(self._leads[k - 1])

        return _schedule(self.stages, choose, room)


class LeastOfStages:
    """The persistent schedule of the least peak: the same recursion with peaks in place of costs, in bytes.

    Raises:
        TimeUp: `stop` said so before the table was full.
    """

    def __init__(self, stages: Stages, *, tapes: bool = True, stop: Callable[[], bool] = never) -> None:
        self.stages, self.tapes = stages, tapes
        self._leads = np.array([0, *(stages[t].leads_bytes for t in range(1, stages.count + 1))], np.int64)
        shape = (stages.count + 2, stages.count + 2)
        self.c, self.d = np.full(shape, NEVER, np.int64), np.full(shape, NEVER, np.int64)
        for t in range(1, stages.count + 1):
            look(stop)
            for s in range(t, 0, -1):
                self.c[s, t] = self._options(s, t, joined=False).min()
                if t < stages.count and stages[t].retaped is not None:
                    self.d[s, t] = self._options(s, t, joined=True).min()

    @property
    def budget_bytes(self) -> int:
        """The least budget for which a persistent schedule of these stages is known to exist."""
        return self.stages.network.graph.fixed_bytes + int(self.c[1, self.stages.count])

    def sequence(self) -> list[int]:
        """The ops of a schedule with that peak, in order."""

        def choose(s: int, t: int, joined: bool, _: int) -> tuple[int, bool, int]:
            choice = int(self._options(s, t, joined=joined).argmin())
            k = s + choice
            return choice, bool(choice and self.d[s, k - 1] < self.c[s, k - 1]), 0

        return _schedule(self.stages, choose, 0)

    def _options(self, s: int, t: int, *, joined: bool) -> Array:
        stages, rest = self.stages, self.d if joined else self.c
        if stages.nothing_after(s, t):
            return np.zeros(1, np.int64)
        taped = stages.needed_with_tape(s, t, joined)
        if s < t:
            taped = max(taped, stages[s].tape_bytes + int(rest[s + 1, t])) if self.tapes else NEVER
        last = t == stages.count
        base = stages.held_bytes(t, joined)
        left = np.minimum(self.c[s, s:t], self.d[s, s:t])
        after = self._leads[s:t] + rest[s + 1 : t + 1, t]
        split = np.maximum(stages.highest[last][s, s:t] + base, np.maximum(after, left))
        return np.concatenate((np.array([taped], np.int64), split))


def _schedule(stages: Stages, choose: Choose, room: int) -> list[int]:
    """The ops of the schedule that choices make, as RR-9302's Algorithm 2.

    `choose` says of stages s … t, whether what leads on from t is there, and the room that they have: 0 for the tape of
    s first or i for saving what leads into s + i; whether that stays for the part before it; and the room behind it.
    """
    count = stages.count
    found: list[int] = []
    todo: list[tuple[int, int, bool, int] | int] = [(1, count, False, room)]
    while todo:
        item = todo.pop()
        if isinstance(item, int):
            found += stages[item].backward.ops
            continue
        s, t, joined, room = item
        if stages.nothing_after(s, t):
            continue
        choice, there, after = choose(s, t, joined, room)
        if choice == 0:
            found += stages.run_with_tape(s, t, joined).ops
            todo.append(s)
            if s < t:
                todo.append((s + 1, t, joined, after))
            continue
        k = s + choice
        for stage in range(s, k):
            found += (stages[stage].forward if t == count else stages[stage].again).ops
        todo += ((s, k - 1, there, room), (k, t, joined, after))
    return found


def slots_for(stages: int) -> int:
    """How many slots of memory a table of so many stages may have, to take a second at most."""
    return max(20, min(MOST_SLOTS, int(MOST_WORK * 6 / stages**3), MOST_CELLS // stages**2))
