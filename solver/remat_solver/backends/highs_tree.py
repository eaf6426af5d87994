"""Branch and bound by HiGHS's linear programs that keeps what a certificate needs: the duals of every leaf.

Before it branches, the program is tightened by cutting planes (`highs_cuts`) as long as they raise its bound. From time
to time it is tried whether cutting planes alone leave no point that is cheap enough: that ends it.

A node's linear program starts from its parent's basis. Its leaf is closed where the objective reaches the cutoff, or
where it has no point; else it waits, the least bound first, to be branched on a column that strong branching chose.
Whenever the time is up all nodes that wait are leaves, too: the tree is a proof at every moment. The last tree is held,
and grows on when it is asked for again.

Where much is alike, as in a network of equal layers, many points cost the same, and neither a branch nor a cutting
plane of one of them raises the least cost. With the cost as a row in place of the objective,

    c x ≤ what is to be proved, less 1

points far from the least cost are cut off too, by rows that are rounded from this one among others. Once there is no
point left, that is proved, by one vector of multipliers.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from ..program import Floats, Program
from .highs_cuts import OPTIONS, CutRows, Cuts
from .worker import Link

_WITHOUT = 14
"""Rounds without an objective; then the costs are it, times weights that are drawn anew for each round."""
_MOST_WEIGHT = 2.0
_FRUITLESS = 5
"""Points in a row that no cutting plane is found for, after which it ends."""
_IDLE_CUTS = 100
"""So many cutting planes may be in the program before those that do not bind are taken out again."""
_STATUS = highspy.HighsModelStatus


_ITERATION_S, _ENTRY_S = 2e-5, 3e-9
"""What a simplex iteration counts where work is counted in place of time, and for each entry of its program."""
RUN_ITERATIONS, _ROUND_ITERATIONS = 50, 2000
"""What a linear program counts besides, and what a round of cutting planes does, in iterations."""
_NO_LIMIT = 2**31 - 1


def iteration_s(entries: int) -> float:
    """The seconds that a simplex iteration counts."""
    return _ITERATION_S + _ENTRY_S * entries


def iterations_in(seconds: float, each_s: float) -> int:
    """How many of them fit, one at least."""
    return max(1, min(_NO_LIMIT, int(min(seconds, 1e9) / each_s)))


class Clock:
    """The machine's clocks or, where an iteration has a price, what has been done so far in seconds."""

    def __init__(self, each_s: float | None = None) -> None:
        self.each_s, self._spent = each_s, 0.0

    def now(self) -> float:
        """Seconds."""
        return time.monotonic() if self.each_s is None else self._spent

    def cpu(self) -> float:
        """CPU seconds of this process."""
        return time.process_time() if self.each_s is None else self._spent

    def count(self, iterations: int) -> None:
        """So much has been done."""
        self._spent += iterations * (self.each_s or 0.0)

    def run(self, solver: Any, until: float = math.inf, most: int = _NO_LIMIT) -> None:
        """Run a linear program's solver until then, and for so many iterations at most."""
        if self.each_s is not None:
            most = min(most, iterations_in(until - self._spent, self.each_s))
        elif until < math.inf:
            solver.setOptionValue("time_limit", solver.getRunTime() + max(0.01, until - time.monotonic()))
        solver.setOptionValue("simplex_iteration_limit", most)
        solver.run()
        solver.setOptionValue("simplex_iteration_limit", _NO_LIMIT)
        self.count(RUN_ITERATIONS + solver.getInfo().simplex_iteration_count)


class CutoffProof:
    """The program without an objective, of a solver whose row `row` is to hold with the right side `most`."""

    def __init__(self, solver: Any, cuts: Cuts, row: int, most: float) -> None:
        program = solver.getLp()
        self._cost = np.array(program.col_cost_)
        program.col_cost_ = np.zeros(program.num_col_)
        upper = np.array(program.row_upper_)
        upper[row] = most
        program.row_upper_ = upper
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.setOptionValue("output_flag", False)
        for name, value in (*OPTIONS.items(), ("threads", 1)):
            self._solver.setOptionValue(name, value)
        self._solver.passModel(program)
        self._rows = CutRows(self._solver, program.num_row_, cuts, _IDLE_CUTS)
        self._point: Floats | None = None
        self._random = np.random.default_rng(0)
        self._rounds = self._fruitless = 0
        self.seconds = 0.0
        """CPU seconds so far."""
        self.ended = False
        """Whether nothing more can be done: no cutting plane is found, or HiGHS fails."""

    def go_on(
        self, seconds: float, deadline: float, over: Callable[[], bool], clock: Clock
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Rounds of cutting planes for so many CPU seconds, and one at least; rows and duals once no point is left."""
        until = clock.cpu() + seconds
        while not self.ended and not over():
            began = clock.cpu()
            found = self._round(over, deadline, clock)
            self.seconds += clock.cpu() - began
            if found is not None or clock.cpu() > until:
                return found
        return None

    def _round(
        self, over: Callable[[], bool], deadline: float, clock: Clock
    ) -> tuple[NDArray[np.int64], Floats] | None:
        clock.count(_ROUND_ITERATIONS)
        if self._point is not None and self._rows.tighten(self._point, over):
            self._fruitless = 0
        elif self._point is not None:
            self._fruitless += 1
            self.ended = self._fruitless > _FRUITLESS
        if self._rounds >= _WITHOUT or self._fruitless:
            weight = self._random.uniform(0.0, _MOST_WEIGHT, len(self._cost))
            self._solver.changeColsCost(len(weight), np.arange(len(weight), dtype=np.int32), weight * self._cost)
        self._rounds += 1
        clock.run(self._solver, deadline)
        if self._solver.getModelStatus() == _STATUS.kInfeasible:
            self.ended = True
            _, has, ray = self._solver.getDualRay()
            return self._rows.named(np.array(ray)) if has else None
        self.ended = self.ended or self._solver.getModelStatus() != _STATUS.kOptimal
        self._point = np.array(self._solver.getSolution().col_value)
        return None


_FRACTIONAL = 1e-6
_CANDIDATES = 7
"""Columns of a node that strong branching may try."""
_RELIABLE = 1
"""Trials of a column in one direction after which its average gain is believed."""
_TRIAL_ITERATIONS = 70
_SPARE_S = 0.15
"""Seconds before the limit that are left for handing the tree over."""
_CUT_SHARE = 0.3
"""The share of the time that cutting planes may take before the first branch."""
_CUT_GAIN, _CUT_PATIENCE = 0.05, 1
"""Rounds of cuts end when so many in a row raise the bound by less than this share of all that they have raised it."""
_AT_FIRST = 0.1
"""CPU seconds for the proof under the cutoff before the first branch, if a round takes no longer."""
_RISE, _IDLE_NODES, _IDLE_SHARE = 0.02, 32, 1.0
"""A tree is idle if after so many nodes the least bound has not risen by this share of what is to be proved; then
the proof under the cutoff takes this share of the CPU seconds that the tree takes."""
_MANY_NODES, _MANY_SHARE = 1000, 0.25
"""The same of trees of many nodes, which seldom come to an end."""
_EVERY = 16
"""Nodes after which that is looked at again."""


@dataclass
class Node:
    """A node of the tree: where it branches, or its linear program's outcome while it is a leaf."""

    path: tuple[tuple[int, int], ...]
    bound: float
    rows: Any = None
    duals: Floats | None = None
    empty: bool = False
    basis: Any = None
    x: Floats | None = None
    column: int = -1
    children: list[Node] = field(default_factory=list)


class Tree:
    """The search on one program, whose `integer` columns may be branched on."""

    def __init__(
        self,
        solver: Any,
        program: Program,
        cutoff: float,
        cuts: Cuts | None = None,
        cutoff_row: tuple[int, float] | None = None,
    ) -> None:
        self.rows = CutRows(solver, program.rows, cuts)
        self.solver, self.program, self.cutoff = solver, program, cutoff
        self._cutoff_proof: CutoffProof | None = None
        if cutoff_row is not None and cuts is not None:
            row, self._proved = cutoff_row
            self._cutoff_proof = CutoffProof(solver, cuts, row, float(program.row_upper[row]))
            # the objective says the same
            solver.changeRowBounds(row, -np.inf, np.inf)
        self.able = np.flatnonzero(program.integer)
        self.gain = np.zeros((2, program.columns))
        self.tried = np.zeros((2, program.columns))
        self.point: Floats | None = None
        self.nodes, self.node_s = 0, 0.0
        self.link: Link
        self.clock = Clock()
        self.deadline = self.turn_until = math.inf
        self._seconds = self._began = 0.0
        """CPU seconds of all runs before this one; when it began."""
        self._number = itertools.count()
        self._root: Node | None = None
        self.plain: tuple[NDArray[np.int64], Floats] | None = None
        """The root's rows and duals without cutting planes, where the proof under the cutoff has closed it."""
        self._plain: tuple[NDArray[np.int64], Floats] | None = None
        self._round_s = 0.0
        """CPU seconds of a round of cutting planes at the root."""
        self._waiting: list[tuple[float, int, Node]] | None = None

    def over(self) -> bool:
        """Whether the time is up or nobody wants more."""
        return self.late() or self.clock.cpu() > self.turn_until

    def late(self) -> bool:
        """Whether the time is up but for what its nodes take afterwards, or whoever asked says so."""
        return self.link.stop.is_set() or self.clock.now() + self.node_s * self.nodes > self.deadline

    def run(self, link: Link, clock: Clock, deadline: float, turn_until: float) -> Node:
        """The tree, grown until all leaves are closed or the time is up; a root without duals proves nothing.

        Called again it grows on from where it stopped.
        """
        self.link, self.deadline, self.turn_until, self.point = link, deadline, turn_until, None
        self.clock, self._began = clock, clock.cpu()
        try:
            return self._run()
        finally:
            self._seconds += clock.cpu() - self._began

    def _run(self) -> Node:
        root = self._root
        if root is None or (root.x is None and not root.empty and not root.children):
            root = self._root = self.solve(Node((), -np.inf))
            self._plain = None if root.duals is None else (root.rows, root.duals)
            self._waiting = None
        if self._waiting is None:
            began = self.clock.cpu()
            self._tighten(root)
            self._round_s = (self.clock.cpu() - began) / max(1, self.rows.rounds)
            if self.over():
                return root
            self._waiting = []
            self._wait(root, self._waiting)
            self._first = root.bound
        self._grow(self._waiting)
        return root

    def _grow(self, waiting: list[tuple[float, int, Node]]) -> None:
        """Branch, the least bound first."""
        for number in itertools.count():
            if not waiting or self.over():
                return
            if number % _EVERY == 0 and self._emptied(waiting):
                return
            node = heapq.heappop(waiting)[2]
            if node.bound >= self.cutoff:
                continue
            self.link.improved(bound=node.bound)
            column = self.choose(node)
            if column < 0:
                # a point of the program: nothing above its objective can be proved
                ends, self.point, self.cutoff = math.isfinite(self.cutoff), node.x, node.bound
                if ends:
                    return
                continue
            children = [Node((*node.path, (column, value)), node.bound) for value in (0, 1)]
            solved = [self.solve(child, node) for child in children]
            node.column, node.children = column, solved
            node.basis = node.x = None
            for child in solved:
                self._wait(child, waiting)

    def _wait(self, node: Node, waiting: list[tuple[float, int, Node]]) -> None:
        if node.x is not None and node.bound < self.cutoff and not node.empty:
            heapq.heappush(waiting, (node.bound, next(self._number), node))

    def _emptied(self, waiting: list[tuple[float, int, Node]]) -> bool:
        """Whether cutting planes leave no point that is cheap enough; then the tree is its root alone."""
        proof, root = self._cutoff_proof, self._root
        if proof is None or proof.ended or root is None or waiting[0][0] >= self.cutoff:
            return False
        risen = waiting[0][0] - self._first
        idle = self.nodes > _IDLE_NODES and risen < _RISE * (self.cutoff - self._first)
        share = _IDLE_SHARE if idle else _MANY_SHARE if self.nodes > _MANY_NODES else 0.0
        taken = self._seconds + self.clock.cpu() - self._began - proof.seconds
        left = max(_AT_FIRST, share * taken) - proof.seconds
        least = 0.0 if proof.seconds else self._round_s
        found = proof.go_on(left, self.deadline, self.over, self.clock) if left > least else None
        if found is None:
            return False
        root.rows, root.duals = found
        root.empty, root.bound, root.x, root.column, root.children = True, self._proved, None, -1, []
        self.plain = self._plain
        waiting.clear()
        return True

    def _tighten(self, root: Node) -> None:
        """Add cutting planes that the root's point breaks, round after round while that raises its bound."""
        began, first, idle = self.clock.now(), root.bound, 0
        share = began + _CUT_SHARE * (self.deadline - began)
        while True:
            if root.x is None or root.empty or root.bound >= self.cutoff or idle >= _CUT_PATIENCE:
                return
            if self.over() or self.clock.now() > share:
                return
            self.clock.count(_ROUND_ITERATIONS)
            if not self.rows.tighten(root.x, self.over):
                return
            before, root.basis = root.bound, None
            self.solve(root)
            self.link.improved(bound=root.bound)
            idle = idle + 1 if root.bound - before < _CUT_GAIN * (root.bound - first) else 0

    def enter(self, node: Node) -> None:
        """Set the columns' bounds to those of a node, and its parent's basis."""
        lower, upper = self.program.lower.copy(), self.program.upper.copy()
        for column, value in node.path:
            lower[column] = upper[column] = value
        count = self.program.columns
        self.solver.changeColsBounds(count, np.arange(count, dtype=np.int32), lower, upper)
        if node.basis is not None:
            self.solver.setBasis(node.basis)

    def solve(self, node: Node, parent: Node | None = None) -> Node:
        """Solve a node's linear program; a leaf that HiGHS does not finish keeps its parent's duals."""
        self.nodes += 1
        if parent is not None:
            node.basis, node.rows, node.duals = parent.basis, parent.rows, parent.duals
        self.enter(node)
        self.clock.run(self.solver, self.deadline)
        status = self.solver.getModelStatus()
        if status == _STATUS.kInfeasible:
            _, has, ray = self.solver.getDualRay()
            if has:
                node.rows, node.duals = self.rows.named(np.array(ray))
                node.empty, node.bound = True, np.inf
            return node
        if status == _STATUS.kOptimal:
            solution = self.solver.getSolution()
            node.rows, node.duals = self.rows.named(np.array(solution.row_dual))
            node.x = np.array(solution.col_value)
            node.bound = max(node.bound, float(self.solver.getInfo().objective_function_value))
            node.basis = self.solver.getBasis()
        return node

    def choose(self, node: Node) -> int:
        """The column with the greatest product of gains on both sides; −1 where all are whole."""
        assert node.x is not None
        part = node.x[self.able] - np.floor(node.x[self.able])
        open_ = np.flatnonzero((part > _FRACTIONAL) & (part < 1 - _FRACTIONAL))
        if not len(open_):
            return -1
        columns, part = self.able[open_], part[open_]
        count = np.maximum(self.tried[:, columns], 1)
        mean = self.gain.sum(axis=1, keepdims=True) / np.maximum(self.tried.sum(axis=1, keepdims=True), 1)
        each = np.where(self.tried[:, columns] > 0, self.gain[:, columns] / count, mean)
        score = np.maximum(each[0] * part, 1e-9) * np.maximum(each[1] * (1 - part), 1e-9)
        # without any experience, the most fractional first
        order = np.lexsort((np.abs(part - 0.5), -score))
        best, column = -1.0, int(columns[order[0]])
        failed = 0
        for i in order[:_CANDIDATES]:
            j = int(columns[i])
            if min(self.tried[0, j], self.tried[1, j]) < _RELIABLE and not self.over():
                gains = [self._try(node, j, value, float(part[i])) for value in (0, 1)]
                tried = max(gains[0], 1e-9) * max(gains[1], 1e-9)
            else:
                tried = float(score[i])
            if tried > best:
                best, column, failed = tried, j, 0
            else:
                failed += 1
                if failed >= 5:
                    break
        return column

    def _try(self, node: Node, column: int, value: int, part: float) -> float:
        """By how much the bound rises on one side, after a few iterations."""
        child = Node((*node.path, (column, value)), node.bound, basis=node.basis)
        self.enter(child)
        self.clock.run(self.solver, most=_TRIAL_ITERATIONS)
        status = self.solver.getModelStatus()
        if status == _STATUS.kInfeasible:
            return max(self.cutoff - node.bound, 1e-6) if np.isfinite(self.cutoff) else 1e3
        reached = float(self.solver.getInfo().objective_function_value)
        gain = max(0.0, reached - node.bound) if np.isfinite(reached) else 0.0
        self.gain[value, column] += gain / max(part if value == 0 else 1 - part, 1e-3)
        self.tried[value, column] += 1
        return gain


_held: dict[bytes, Tree] = {}
"""The last tree, by its program: asked for again, with no greater cutoff, it grows on."""


def _tree_of(
    solver: Any, program: Program, cutoff: float, factor: Floats | None, cutoff_row: tuple[int, float] | None
) -> Tree:
    """The tree that is held of a program, or a new one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*(getattr(program, each.name) for each in fields(program)), factor):
        digest.update(np.asarray(0.0 if part is None else part).tobytes() + b"|")
    key = digest.digest()
    held = _held.pop(key, None)
    _held.clear()
    if held is None or cutoff > held.cutoff:
        for name, value in OPTIONS.items():
            solver.setOptionValue(name, value)
        held = Tree(solver, program, cutoff, None if factor is None else Cuts(program, factor), cutoff_row)
    held.cutoff = cutoff
    _held[key] = held
    return held


def serve_tree(solver: Any, program: Program, members: dict[str, Any], factor: Floats | None, link: Link) -> None:
    """Grow a tree and hand it over in preorder; with `factor`, by which whole rows were multiplied, also its cuts."""
    limit, turn_s, work_s = members.get("time_limit_s"), members.get("turn_s"), members.get("work_s")
    clock = Clock(None if work_s is None else iteration_s(program.entries))
    left = 1e9 if limit is None else max(0.01, float(limit) - _SPARE_S)
    deadline = clock.now() + (left if work_s is None else float(work_s))
    cutoff_row = members.get("cutoff_row")
    tree = _tree_of(
        solver, program, float(members["cutoff"]), factor, None if cutoff_row is None else tuple(cutoff_row)
    )
    tree.node_s = float(members["node_s"])
    root = tree.run(link, clock, deadline, math.inf if turn_s is None else clock.cpu() + float(turn_s))
    late = tree.late()
    column: list[int] = []
    leaves: list[Node] = []
    pending = [root]
    while pending:
        node = pending.pop()
        column.append(node.column)
        if node.column >= 0:
            pending += node.children[::-1]
        else:
            leaves.append(node)
    rows = [np.zeros(0, np.int64) if leaf.rows is None else leaf.rows for leaf in leaves]
    duals = [np.zeros(0) if leaf.duals is None else leaf.duals for leaf in leaves]
    least = min(leaf.bound for leaf in leaves)
    arrays = {
        "column": np.array(column, dtype=np.int64),
        "leaf_start": np.cumsum([0, *map(len, rows)], dtype=np.int64),
        "leaf_row": np.concatenate(rows).astype(np.int64),
        "leaf_dual": np.concatenate(duals).astype(np.float64),
        "leaf_empty": np.array([leaf.empty for leaf in leaves], dtype=np.bool_),
    }
    if tree.plain is not None:
        arrays["plain_row"], arrays["plain_dual"] = tree.plain
    if tree.point is not None:
        arrays["x"] = tree.point
    said: dict[str, Any] = {"late": late} | ({"bound": float(least)} if np.isfinite(least) else {})
    if work_s is not None:
        said["work_s"] = clock.now()
    said["cuts"] = [] if tree.rows.cuts is None else [cut.wire() for cut in tree.rows.cuts.cuts]
    link.say("outcome", {"status": "optimal", "message": f"{tree.nodes} nodes", **said}, arrays)
