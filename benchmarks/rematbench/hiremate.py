"""HiRemate's hierarchy (Gusak et al., ICML 2025): partition, solve the parts by integer programs, combine them.

The forward pass is cut into parts of up to MOST_OPS ops, each with the backward ops that belong to it. For a few limits
on its peak and on what it may save between its passes Checkmate's program gives a part's *options*: what it runs in its
forward pass, what it saves, what it runs in its backward pass. A second program chooses an option for each of up to
MOST_PARTS parts and when they run: a forward pass may run by an option, fast without saving anything, or again; a
backward pass runs once, by the option that was saved for. Its solutions, for a few limits again, are options of the
parts together, and so on until one program has the whole. Parts that are equal are solved once.

What differs from the paper: the forward ops are cut in their order, where few bytes cross, since a plan runs them so;
a graph does not say which backward op belongs to which forward op, so that one belongs to the part of the last forward
value that it reads, and no backward op to a later part than the one before it; the program is written anew, with what
is held while each part runs. The grid of limits has three peaks and four amounts to save, the paper's is finer. A graph
of one part is Checkmate's program at the budget.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.rematbench import Unanswered
from remat_ir import Graph, InvalidPlan, Plan, Problem, plain_peak, plan_of, replay, verify
from remat_ir.digest import graph_digest
from remat_ir.plan import permitted, without_unread
from remat_solver import least_need
from remat_solver.array_view import view_of
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from remat_solver.formulate.checkmate import checkmate
from remat_solver.program import Builder, Term

MOST_OPS, MOST_PARTS = 12, 8
_SAVED = (1.0, 2 / 3, 1 / 3, 0.0)
"""The shares of what a part saves at most that its other options may save."""
_PEAKS = (1.0, 0.5, 0.2)
"""The shares of the way from what its largest op needs to its plain peak that its other options may hold."""
_LEAVES_SHARE, _GROUPS_SHARE = 0.5, 0.25
"""Shares of the time for the programs of the first parts, and of those that combine them, but for the last one."""
_LEAST_S = 0.1


class Option(NamedTuple):
    """What a part runs in its forward and its backward pass; bytes and ns of what is inside of the part.

    `forward_bytes` and `backward_bytes` are held while these run, besides `saved_bytes`.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What is held at most."""
        return self.saved_bytes + max(self.forward_bytes, self.backward_bytes)


@dataclass
class Part:
    """Consecutive forward ops and the backward ops that belong to them; `fast` is the forward pass that saves nothing.

    `again`: whether the forward pass may run again.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: bool = True
    options: list[Option] = field(default_factory=list)
    fast_bytes: int = 0

    @property
    def ops(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.forward, *self.backward)


class Scope:
    """The ops of a part as a graph of their own, with a pause between the passes: values that others see are left out.

    `ops` are the part's ops, None for the pause.
    """

    def __init__(self, graph: Graph, part: Part) -> None:
        self.graph, self.part = graph, part
        self.ops = (*part.forward, None, *part.backward)
        self.pause = len(part.forward)
        inside = frozenset(part.ops)
        kept = frozenset(graph.keep)
        self.internal = [
            v
            for op in part.ops
            for v in graph.op_values[op]
            if v not in kept and all(user in inside for user in graph.users[v])
        ]
        self._number = {value: i for i, value in enumerate(self.internal)}
        self._at = {op: i for i, op in enumerate(self.ops)}

    def small(self, pause_bytes: int = 0, *, forward_only: bool = False) -> Graph:
        """The graph; while it pauses, so many bytes are taken."""
        graph, number = self.graph, self._number
        ops = self.ops[: self.pause] if forward_only else self.ops
        values = [v for v in self.internal if self._at[graph.value_op[v]] < len(ops)]
        once = frozenset(graph.once)
        return Graph(
            op_cost_ns=tuple(0 if op is None else graph.op_cost_ns[op] for op in ops),
            op_inputs=tuple(
                () if op is None else tuple(sorted(number[v] for v in graph.op_inputs[op] if v in number)) for op in ops
            ),
            value_op=tuple(self._at[graph.value_op[v]] for v in values),
            value_bytes=tuple(graph.value_bytes[v] for v in values),
            op_workspace_bytes=tuple(pause_bytes if op is None else graph.op_workspace_bytes[op] for op in ops),
            optional=tuple(number[v] for v in graph.optional if v in number and number[v] < len(values)),
            once=tuple(i for i, op in enumerate(ops) if op is None or op in once),
        )

    def option(self, forward: Iterable[int], backward: Iterable[int]) -> Option:
        """An option of these ops of the part."""
        forward, backward, small = tuple(forward), tuple(backward), self.small()
        order = [*(self._at[op] for op in forward), self.pause, *(self._at[op] for op in backward)]
        peaks: tuple[list[int], list[int]] = ([0], [0])
        saved, later = 0, 0
        for moment in replay(small, plan_of(small, without_unread(small, order))):
            if moment.op == self.pause:
                saved, later = moment.resident_bytes, 1
            peaks[later].append(moment.peak_bytes)
        cost = self.graph.op_cost_ns
        return Option(
            forward,
            backward,
            sum(cost[op] for op in forward),
            sum(cost[op] for op in backward),
            saved,
            max(0, max(peaks[0]) - saved),
            max(0, max(peaks[1]) - saved),
        )

    def split(self, order: Sequence[int]) -> Option:
        """An option of a sequence of the small graph."""
        at = order.index(self.pause)
        before, after = ([op for i in part if (op := self.ops[i]) is not None] for part in (order[:at], order[at:]))
        return self.option(before, after)


def cut(graph: Graph, border: int, most_ops: int) -> list[range]:
    """The forward ops in runs of at most so many, so that the least bytes cross from one to the next."""
    crossing = [0] * (border + 1)
    for value, maker in enumerate(graph.value_op):
        last = max((user for user in graph.users[value] if user < border), default=maker)
        for place in range(maker + 1, last + 1 if maker < border else maker):
            crossing[place] += graph.value_bytes[value]
    best: list[tuple[float, int]] = [(0.0, 0)] + [(np.inf, 0)] * border
    count = -(-border // most_ops)
    for end in range(1, border + 1):
        for start in range(max(0, end - most_ops), end):
            # as few bytes as can be, and a little for each part
            price = best[start][0] + crossing[start] + sum(graph.value_bytes) / (100 * count)
            best[end] = min(best[end], (price, start))
    ends = [border]
    while ends[-1]:
        ends.append(best[ends[-1]][1])
    return [range(a, b) for a, b in pairwise(ends[::-1])]


def parts_of(graph: Graph, most_ops: int = MOST_OPS) -> list[Part]:
    """The parts of a joint graph, without options.

    Raises:
        Unanswered: nothing marks its backward pass.
    """
    border = graph.backward_from
    if not border:
        raise Unanswered("no joint graph: nothing marks its backward pass")
    runs = cut(graph, border, most_ops)
    of_forward = {op: number for number, run in enumerate(runs) for op in run}
    backward: list[list[int]] = [[] for _ in runs]
    now = len(runs) - 1
    for op in range(border, graph.ops):
        read = [graph.value_op[v] for v in graph.op_inputs[op] if graph.value_op[v] < border]
        now = min(now, of_forward[max(read)]) if read else now
        backward[now].append(op)
    return [Part(tuple(run), tuple(ops), _again(graph, run)) for run, ops in zip(runs, backward, strict=True)]


def _again(graph: Graph, ops: Iterable[int]) -> bool:
    return all(graph.last_stage[op] >= graph.ops for op in ops)


class Hierarchy:
    """The options of parts, from the first ones up; equal parts share theirs."""

    def __init__(self, graph: Graph, seconds: float) -> None:
        self.graph, self.deadline = graph, Deadline(seconds)
        self._seconds = seconds
        self._known: dict[str, list[Option]] = {}
        self._engine = Engine("highs")

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def plan(self, budget_bytes: int, parts: list[Part]) -> Plan:
        """The plan of all parts together.

        Raises:
            Unanswered: the programs have none within the budget, or in the time.
        """
        if len(parts) == 1:
            return self._whole(budget_bytes)
        self._solve(parts, _LEAVES_SHARE, self._leaf)
        while len(parts) > MOST_PARTS:
            groups = [parts[i : i + MOST_PARTS] for i in range(0, len(parts), MOST_PARTS)]
            parts = [self._joined(group) for group in groups]
            children = {part.forward: group for part, group in zip(parts, groups, strict=True)}
            self._solve(parts, _GROUPS_SHARE, partial(self._group, children))
        chosen = self._combined(
            parts, range(self.graph.values), budget_bytes - self.graph.fixed_bytes, None, self.deadline
        )
        if chosen is None:
            raise Unanswered("its last program has no solution within the budget, or none in the time")
        order = without_unread(self.graph, tuple(permitted(self.graph, (*chosen[0], *chosen[1]))))
        return plan_of(self.graph, order)

    def _joined(self, group: list[Part]) -> Part:
        forward = tuple(op for part in group for op in part.forward)
        backward = tuple(op for part in reversed(group) for op in part.backward)
        return Part(forward, backward, all(part.again for part in group))

    def _whole(self, budget_bytes: int) -> Plan:
        """The plan of Checkmate's program for all ops."""
        program = checkmate(view_of(Problem(self.graph, budget_bytes)))
        outcome = self._engine.run(program.program, deadline=self.deadline, relative_gap=0.001)
        if outcome.x is None:
            raise Unanswered("Checkmate's program has no solution within the budget, or none in the time")
        return plan_of(self.graph, without_unread(self.graph, program.sequence(outcome.x)))

    def _solve(self, parts: list[Part], share: float, better: Better) -> None:
        """Give each part its options: all saved, and what `better` finds within less; an earlier one may fit already.

        Where the time ends, the tightest limits of all parts stay untried.
        """
        scopes = [Scope(self.graph, part) for part in parts]
        keys = [graph_digest(scope.small()) + str(part.again) for scope, part in zip(scopes, parts, strict=True)]
        new = {key: scope for key, scope in zip(keys, scopes, strict=True) if key not in self._known}
        found = {key: [scope.option(scope.part.forward, scope.part.backward)] for key, scope in new.items()}
        watch = self.deadline.within(share * self._seconds)
        limits = [(peak, saved) for peak in _PEAKS for saved in _SAVED][1:]
        each = max(_LEAST_S, share * self._seconds / max(1, len(new) * len(limits)))
        for (peak_rate, saved_rate), (key, scope) in itertools.product(limits, new.items()):
            whole, small = found[key][0], scope.small()
            least = min(whole.peak_bytes, least_need(small)[0])
            peak = least + int(peak_rate * (whole.peak_bytes - least))
            saved = min(peak, int(saved_rate * whole.saved_bytes))
            fits = any(option.peak_bytes <= peak and option.saved_bytes <= saved for option in found[key])
            if scope.part.backward and not fits and not watch.passed():
                option = better(scope, peak, saved, watch.within(each))
                found[key] += [] if option is None or option in found[key] else [option]
        self._known |= {
            key: [_numbered(scope, option) for option in _undominated(found[key])] for key, scope in new.items()
        }
        for scope, part, key in zip(scopes, parts, keys, strict=True):
            small = scope.small(forward_only=True)
            part.fast_bytes = plain_peak(small) if small.ops else 0
            part.options = [_named(scope, option) for option in self._known[key]]

    def _leaf(self, scope: Scope, peak: int, saved: int, watch: Deadline) -> Option | None:
        """The option within this peak that saves so much, by Checkmate's program."""
        program = checkmate(view_of(Problem(scope.small(peak - saved), peak)))
        outcome = self._engine.run(program.program, deadline=watch, relative_gap=0.005)
        return None if outcome.x is None else scope.split(program.sequence(outcome.x))

    def _group(
        self, children: dict[tuple[int, ...], list[Part]], scope: Scope, peak: int, saved: int, watch: Deadline
    ) -> Option | None:
        """The same by the program that combines parts."""
        chosen = self._combined(children[scope.part.forward], scope.internal, peak, saved, watch)
        return None if chosen is None else scope.option(*chosen)

    def _combined(
        self, parts: list[Part], values: Iterable[int], most_bytes: int, saved: int | None, watch: Deadline
    ) -> tuple[list[int], list[int]] | None:
        """The ops that run before and after the turn from forward to backward, by the best choice of options."""
        program = Combination(self.graph, parts, values)
        program.write(most_bytes, saved)
        outcome = self._engine.run(program.builder.program(), deadline=watch, relative_gap=0.001)
        return None if outcome.x is None else program.chosen(outcome.x)


Better = Callable[[Scope, int, int, Deadline], Option | None]
"""An option of a part within a peak and bytes to save, in a time."""


def _undominated(options: Sequence[Option]) -> list[Option]:
    """The options to which no other is equal or better in time, in what it saves and in what it holds."""

    def figures(option: Option) -> tuple[int, ...]:
        return option.forward_ns + option.backward_ns, *option[4:]

    found: list[Option] = []
    for option in sorted(options, key=figures):
        if not any(all(map(operator.le, figures(other), figures(option))) for other in found):
            found.append(option)
    return found


def _numbered(scope: Scope, option: Option) -> Option:
    """An option with ops as numbers of its scope, for parts that are equal."""
    at = {op: i for i, op in enumerate(scope.ops)}
    return option._replace(forward=tuple(at[o] for o in option.forward), backward=tuple(at[o] for o in option.backward))


def _named(scope: Scope, option: Option) -> Option:
    ops = [-1 if op is None else op for op in scope.ops]
    return option._replace(
        forward=tuple(ops[i] for i in option.forward), backward=tuple(ops[i] for i in option.backward)
    )


class Bundle(NamedTuple):
    """Values that one node makes and the same nodes read by the same options, as one; `readers` are nodes and options.

    `kept`: they stay to the end.
    """

    maker: int
    readers: tuple[tuple[int, int], ...]
    kept: bool


Terms = list[tuple[int, float]]


class Combination:
    """The program over the forward passes of some parts in their order, then their backward passes in reverse: nodes.

    Stage t ends with the first run of node t. R[t, k, o]: node k runs in stage t by option o, the last of a forward
    pass being the fast one. S[t, b] and P[t, j, o]: a bundle, and what part j saves by option o, are there when stage t
    begins. What is held while a node runs is bounded from below by columns that are no choices.
    """

    def __init__(self, graph: Graph, parts: list[Part], values: Iterable[int]) -> None:
        self.graph, self.parts, self.count = graph, parts, len(parts)
        self.nodes = 2 * self.count
        self.builder = Builder()
        self.size = self._bundled(frozenset(values))
        self._rows: list[tuple[Terms, float]] = []
        self.runs: dict[tuple[int, int], list[int]] = {}
        self._held: dict[tuple[int, Bundle], int] = {}
        self._saved: dict[tuple[int, int, int], int] = {}

    def part(self, node: int) -> Part:
        """Whose forward or backward pass a node is."""
        return self.parts[min(node, self.nodes - 1 - node)]

    def _ops(self, node: int, option: int) -> tuple[int, ...]:
        part = self.part(node)
        if option == len(part.options):
            return part.forward
        return part.options[option].forward if node < self.count else part.options[option].backward

    def _options(self, node: int) -> range:
        return range(len(self.part(node).options) + (node < self.count))

    def _bundled(self, values: frozenset[int]) -> dict[Bundle, int]:
        """The bytes of the bundles of what nodes make for others, or to stay."""
        graph, kept = self.graph, frozenset(self.graph.keep)
        maker: dict[int, int] = {}
        inner: set[int] = set()
        for node in range(self.nodes):
            part = self.part(node)
            inside = frozenset(part.ops)
            for op in part.forward if node < self.count else part.backward:
                for value in graph.op_values[op]:
                    maker[value] = node
                    if value not in kept and all(user in inside for user in graph.users[value]):
                        inner.add(value)
        readers: dict[int, set[tuple[int, int]]] = {v: set() for v in maker if v in values and v not in inner}
        for node in range(self.nodes):
            for option in self._options(node):
                for value in {v for op in self._ops(node, option) for v in graph.op_inputs[op]}:
                    # what a node makes itself it reads where it makes it
                    if value in readers and maker[value] != node:
                        readers[value].add((node, option))
        size: dict[Bundle, int] = {}
        for value, pairs in readers.items():
            bundle = Bundle(maker[value], tuple(sorted(pairs)), value in kept)
            size[bundle] = size.get(bundle, 0) + graph.value_bytes[value]
        return size

    def write(self, most_bytes: int, saved: int | None) -> None:
        """The columns and rows; `saved` limits what is there when the first backward pass begins."""
        unit = float(max(1, most_bytes))
        self._columns()
        self._order()
        for stage in range(self.nodes):
            for node in range(stage + 1):
                if (stage, node) in self.runs:
                    self._memory(stage, node, unit)
        if saved is not None:
            held = [(c, self.size[b] / unit) for (stage, b), c in self._held.items() if stage == self.count]
            held += [
                (c, self.parts[j].options[o].saved_bytes / unit)
                for (stage, j, o), c in self._saved.items()
                if stage == self.count
            ]
            self._rows.append((held, saved / unit))
        row = [i for i, (terms, _) in enumerate(self._rows) for _ in terms]
        column = [c for terms, _ in self._rows for c, _ in terms]
        value = [a for terms, _ in self._rows for _, a in terms]
        upper = np.array([limit for _, limit in self._rows])
        self.builder.add_rows(len(upper), [Term(np.array(row), np.array(column), np.array(value))], upper=upper)

    def _columns(self) -> None:
        total = float(max(1, sum(sum(self.graph.op_cost_ns[op] for op in part.ops) for part in self.parts)))
        for stage in range(self.nodes):
            for node in range(stage + 1):
                if node < stage and (node >= self.count or not self.part(node).again):
                    continue
                costs = [sum(self.graph.op_cost_ns[op] for op in self._ops(node, o)) for o in self._options(node)]
                columns = self.builder.variables(len(costs), cost=1e4 * np.array(costs) / total)
                self.runs[stage, node] = columns.tolist()
        for bundle in self.size:
            last = self.nodes if bundle.kept else max((node for node, _ in bundle.readers), default=-1)
            for stage in range(bundle.maker + 1, last + 1):
                (column,) = self.builder.variables(1, lower=float(bundle.kept))
                self._held[stage, bundle] = int(column)
        for j, part in enumerate(self.parts):
            for o in range(len(part.options)):
                for stage in range(j + 1, self.nodes - j):
                    (column,) = self.builder.variables(1)
                    self._saved[stage, j, o] = int(column)

    def _run(self, stage: int, node: int, options: Iterable[int] | None = None, sign: float = 1.0) -> Terms:
        """The sum of R of a node in a stage, of some options."""
        columns = self.runs.get((stage, node), [])
        return [(columns[o], sign) for o in (range(len(columns)) if options is None else options) if o < len(columns)]

    def _there(self, stage: int, bundle: Bundle, sign: float = 1.0) -> Terms:
        column = self._held.get((stage, bundle))
        return [] if column is None else [(column, sign)]

    def _order(self) -> None:
        """Each node runs by one option, what it reads is there, and what is held was made or held before."""
        for (stage, node), columns in self.runs.items():
            self._rows.append(([(c, 1.0) for c in columns], 1.0))
            if stage == node:
                self._rows.append(([(c, -1.0) for c in columns], -1.0))
        for bundle in self.size:
            for stage in range(self.nodes):
                made = [*self._run(stage, bundle.maker, sign=-1.0), *self._there(stage, bundle, -1.0)]
                for node in {node for node, _ in bundle.readers if node <= stage}:
                    reads = self._run(stage, node, [o for k, o in bundle.readers if k == node])
                    if reads:
                        self._rows.append(([*reads, *made], 0.0))
                if self._there(stage + 1, bundle):
                    self._rows.append(([*self._there(stage + 1, bundle), *made], 0.0))
        for (stage, j, o), column in self._saved.items():
            before = [(self._saved[stage - 1, j, o], -1.0)] if (stage - 1, j, o) in self._saved else []
            self._rows.append(([(column, 1.0), *before, *self._run(stage - 1, j, [o], -1.0)], 0.0))
        for j, part in enumerate(self.parts):
            last = self.nodes - 1 - j
            for o in range(len(part.options)):
                there = [(self._saved[last, j, o], -1.0), *self._run(last, j, [o], -1.0)]
                self._rows.append(([*self._run(last, last, [o]), *there], 0.0))

    def _memory(self, stage: int, node: int, unit: float) -> None:
        """What is there while a node runs in a stage, and what its options need besides."""
        terms: Terms = []
        part = self.part(node)
        for o, column in enumerate(self.runs[stage, node]):
            if o == len(part.options):
                terms.append((column, part.fast_bytes / unit))
            else:
                option = part.options[o]
                terms.append((column, (option.forward_bytes if node < self.count else option.backward_bytes) / unit))
        for bundle, size in self.size.items():
            bounds = self._while(stage, node, bundle)
            if size and bounds:
                terms.append((self._at_least(bounds), size / unit))
        for j, each in enumerate(self.parts):
            for o, option in enumerate(each.options):
                bounds = self._while_saved(stage, node, j, o)
                if option.saved_bytes and bounds:
                    terms.append((self._at_least(bounds), option.saved_bytes / unit))
        self._rows.append((terms, 1.0))

    def _at_least(self, bounds: list[tuple[Terms, float]]) -> int:
        """A column that is at least each sum, less a number."""
        (column,) = self.builder.variables(1, integer=False)
        for terms, less in bounds:
            self._rows.append(([*terms, (int(column), -1.0)], less))
        return int(column)

    def _while(self, stage: int, node: int, bundle: Bundle) -> list[tuple[Terms, float]]:
        """What says that a bundle is there while a node runs."""
        after, maker = self._there(stage + 1, bundle), bundle.maker
        reads = [
            self._run(stage, k, [o for n, o in bundle.readers if n == k])
            for k in {k for k, _ in bundle.readers if node <= k <= stage}
        ]
        if node >= maker:
            own = [self._run(stage, maker)] if node == maker else []
            return [(terms, 0.0) for terms in (after, *reads, *own) if terms]
        before = self._there(stage, bundle)
        if not before:
            return []
        made = self._run(stage, maker, sign=-1.0)
        return [*([([*before, *after], 1.0)] if after else []), *(([*terms, *made], 0.0) for terms in reads if terms)]

    def _while_saved(self, stage: int, node: int, j: int, o: int) -> list[tuple[Terms, float]]:
        """The same of what a part saves by an option."""
        last = self.nodes - 1 - j
        column = self._saved.get((stage + 1, j, o))
        after: Terms = [] if column is None else [(column, 1.0)]
        if stage == last:
            after = self._run(last, last, [o])
        if node >= j:
            own = self._run(stage, j, [o]) if node == j else []
            return [(terms, 0.0) for terms in (after, own) if terms]
        before = self._saved.get((stage, j, o))
        return [([(before, 1.0), *after], 1.0)] if before is not None and after else []

    def chosen(self, x: np.ndarray) -> tuple[list[int], list[int]]:
        """The ops of a solution, before and after the turn."""
        found: tuple[list[int], list[int]] = ([], [])
        for stage in range(self.nodes):
            for node in range(stage + 1):
                for o, column in enumerate(self.runs.get((stage, node), ())):
                    if x[column] > 0.5:
                        found[stage >= self.count].extend(self._ops(node, o))
        return found


def hiremate(problem: Problem, seconds: float, most_ops: int = MOST_OPS) -> Plan:
    """The method: the plan of the hierarchy in these seconds, from parts of so many forward ops.

    Raises:
        Unanswered: nothing marks the backward pass, or it has no plan within the budget.
    """
    parts = parts_of(problem.graph, most_ops)
    hierarchy = Hierarchy(problem.graph, seconds)
    try:
        plan = hierarchy.plan(problem.budget_bytes, parts)
    finally:
        hierarchy.close()
    try:
        verify(problem, plan)
    except InvalidPlan as error:
        raise Unanswered(f"what its last program chose does not fit: {error}") from None
    return plan
