"""The plans of one graph of Dynamo's at one set of sizes: traced and priced once, it has a plan for each bound."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import fx

from remat_ir import (
    Answer,
    Graph,
    InvalidPlan,
    Plan,
    Problem,
    checkpointed,
    least_memory,
    plain_plan,
    problem_digest,
    replay,
    verify,
    working_set,
)

from .. import _compat
from ..capture.operations import Operations
from ..capture.symbolic import JointTrace
from ..lowering.codegen import boxed_function, checked_function
from ..lowering.lower import lower
from ..lowering.peak import kernel_phases
from ..planning.budget import UnitBytes, bounded, bytes_of
from ..planning.division import Option
from ..planning.greedy import greedy_answer
from ..planning.options import SolveOptions
from ..planning.planner import Planner
from ..planning.quick import Better, tell_of_better
from ..profiling.profile import Profiled
from .calls import Outstanding, noting_end

UNBOUNDED = 2**53
"""More bytes than any step needs."""

Run: TypeAlias = Callable[..., Any]

LEVELS = 9
"""Bounds on what is held, from the least to what plain training holds."""

PEAKS = 3
"""Bounds on the peak at each of them."""


class Priced(Protocol):
    """A part of a step whose operations have been priced."""

    @property
    def operations(self) -> Operations:
        """What runs, in order."""
        ...

    @property
    def graph(self) -> Graph:
        """The problem that it poses."""
        ...

    @property
    def profiled(self) -> Profiled:
        """What its kernels cost."""
        ...


class Point(NamedTuple):
    """One plan of a unit's graph: within which bounds, and what it comes to."""

    size: UnitBytes
    plan: Plan
    option: Option


def curve(step: Priced, ends: tuple[Point, Point]) -> list[Point]:
    """Greedy plans of a step at several bounds and one of a small peak, with the ends: the least held, and plain.

    The bounds lie between the two ends, the most spacious first.
    """
    graph = step.graph
    least, plain = ((bytes_of(p.size.peak), bytes_of(p.size.held)) for p in ends)
    floor, most = working_set(graph).least_bytes - graph.fixed_bytes, max(least[0], plain[0])
    peaks = [most - (most - floor) * j // PEAKS for j in range(PEAKS)]
    holds = [plain[1] - (plain[1] - least[1]) * i // (LEVELS - 1) for i in range(LEVELS)]
    found = dict.fromkeys((*ends, point_of(step, least_memory(graph))))
    for size in (UnitBytes(peak, held) for peak in peaks for held in holds if held <= peak):
        problem = unit_problem(graph, size)
        answer = greedy_answer(problem, time_limit_s=1.0, look_s=0.0)
        if not isinstance(answer.plan, Plan):
            continue
        try:
            verify(problem, answer.plan)
        except InvalidPlan:
            continue
        found[point_of(step, answer.plan, size)] = None
    return list(found)


def point_of(step: Priced, plan: Plan, size: UnitBytes | None = None) -> Point:
    """A plan of a step, and what it comes to; without bounds these are what the plan itself needs."""
    phases = kernel_phases(step.operations, plan, step.profiled.kernels)
    moments = list(replay(step.graph, plan))
    turn = next(m for m in moments if m.op == step.graph.backward_from)
    if size is None:  # what the plan itself needs, as the verifier counts it
        peak = max(m.peak_bytes for m in moments)
        size = UnitBytes(peak - step.graph.fixed_bytes, turn.peak_bytes - step.graph.fixed_bytes)
    cost, halfway = moments[-1].cost_ns, step.operations.halfway
    weight = 0 if halfway is None else cost - next(m.cost_ns for m in moments if m.op == halfway)
    option = Option(
        phases.held_bytes,
        phases.forward_bytes,
        phases.backward_bytes,
        cost,
        turn.cost_ns,
        weight,
        phases.between_bytes,
        phases.weight_bytes,
    )
    return Point(size, plan, option)


def solved(step: Priced, point: Point, room_bytes: int, planner: Planner, asking: SolveOptions) -> Point | None:
    """What a planner makes of a point that recomputes, where its stage may take so much while it runs."""
    if point.option.cost_ns == step.graph.total_cost_ns:
        return None
    size = UnitBytes(max(bytes_of(point.size.peak), room_bytes), point.size.held)
    answer = planner.plan(unit_problem(step.graph, size), asking)
    return point_of(step, answer.plan, size) if isinstance(answer.plan, Plan) else None


def unit_problem(graph: Graph, size: UnitBytes) -> Problem:
    """What is asked about a unit within its bounds."""
    return Problem(bounded(graph, size), graph.fixed_bytes + bytes_of(size.peak))


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced(JointTrace):
    """One graph of Dynamo's, traced at the sizes of a call.

    Attributes:
        module: Dynamo's graph, which runs by itself, too.
        inputs: the tensors and numbers that the graph and its trace take, those that the graph holds first.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]

    def priced(self, step: Operations, profiled: Profiled) -> tuple[Traced, Operations, Profiled]:
        """What stays of it once it is priced: no tensors of the call, and no copy of a graph of symbols."""
        if self.symbolic is None:
            return replace(self, inputs=()), step, profiled
        graph = self.symbolic.graph
        return replace(self, inputs=(), joint=graph, like={}), step.of(graph, self.like), profiled.of(self.like)


@dataclass(frozen=True, eq=False)
class Step:
    """One graph of Dynamo's, traced and priced at the sizes of a call.

    Attributes:
        graph: the problem that it poses.
    """

    traced: Traced
    operations: Operations
    graph: Graph
    profiled: Profiled

    def compile(self, plan: Plan) -> Run:
        """What runs it by a plan that the verifier has passed: one trace serves for any number of plans."""

        def made() -> Run:
            lowered = lower(self.operations, plan)
            with _compat.traced_alone(), _compat.only_real_tensors():
                return _compat.compile_joint(
                    self.traced.descriptor,
                    lambda *_, **__: (lowered.forward, lowered.backward),
                    checked_function,
                    lambda graph, _: noting_end(boxed_function(graph)),
                )

        return self.traced.carried_out(self.operations, plan, made)


_NUMBERS = itertools.count()


@dataclass(eq=False)
class PlannedSizes:
    """One graph of Dynamo's at one set of sizes: what was traced, once, and the plan that it runs by.

    Where a step has several calls there are several plans of it, one for each `Point` that a call takes.

    Attributes:
        graph: what was planned.
        answer: the one that `run` follows.
        run: takes the inputs of Dynamo's graph.
        better: a better answer that is still looked for, and what is made of it in the caller's thread.
        outstanding: its calls that may run again, which need the plan that they began with.
        priced: what it poses.
        number: its own, by which calls of it are known.
        failed: whether the traced step has not run: Dynamo's graph runs in its place.
    """

    graph: Graph
    answer: Answer
    run: Run = field(repr=False)
    better: Better[tuple[Run, Answer]] | None = field(repr=False)
    outstanding: Outstanding = field(default_factory=Outstanding, repr=False)
    priced: Priced = field(kw_only=True, repr=False)
    number: int = field(default_factory=_NUMBERS.__next__, init=False)
    failed: bool = field(default=False, init=False)
    _runs: dict[int, tuple[Point, Run]] = field(default_factory=dict, init=False, repr=False)
    _more: list[Point] = field(default_factory=list, init=False, repr=False)

    @functools.cached_property
    def least(self) -> Point:
        """The plan that holds least between its passes."""
        return point_of(self.priced, checkpointed(self.graph))

    @functools.cached_property
    def plain(self) -> Point:
        """The plan that computes nothing again."""
        return point_of(self.priced, plain_plan(self.graph))

    @property
    def own(self) -> Point:
        """The one that it runs by where it is alone."""
        if not isinstance(self.answer.plan, Plan):
            return self.plain
        return point_of(self.priced, self.answer.plan)

    @functools.cached_property
    def digest(self) -> str:
        """Of what it poses: equal graphs, such as those of equal blocks, have plans in common."""
        return problem_digest(Problem(self.graph.with_fixed(0), UNBOUNDED))

    def points(self, curves: MutableMapping[str, list[Point]]) -> list[Point]:
        """Plans of it at several bounds, with what has been added.

        Args:
            curves: those of the graphs that are known, by digest; its own is entered.
        """
        if self.digest not in curves:
            curves[self.digest] = curve(self.priced, (self.least, self.plain))
        return [*curves[self.digest], *self._more]

    def add(self, point: Point) -> None:
        """One more plan of it."""
        self._more.append(point)

    def point(self, plan: Plan) -> Point:
        """The point of a plan of it."""
        found = next((point for point in self._more if point.plan == plan), None)
        if found is None:
            found = point_of(self.priced, plan)
            self.add(found)
        return found

    def has(self, point: Point) -> bool:
        """Whether a plan of it has been compiled."""
        return id(point) in self._runs

    def by(self, point: Point) -> Run:
        """What runs it by a plan, compiled at its first call, under the state of that."""
        if not self.has(point):
            verify(Problem(self.graph, UNBOUNDED), point.plan)
            self._runs[id(point)] = point, self.compiled(point.plan)
        return self._runs[id(point)][1]

    def compiled(self, plan: Plan) -> Run:
        """What runs it by a plan that the verifier has passed."""
        assert isinstance(self.priced, Step)
        return self.priced.compile(plan)

    def keep(self, points: Sequence[Point]) -> None:
        """Forget what runs other plans: a call that has begun ends by what it began with."""
        kept = {id(point) for point in (*points, self.least)}
        self._runs = {key: found for key, found in self._runs.items() if key in kept}

    def take_over(self) -> None:
        """Run by the better plan from now on, if it has come; a call that has begun ends by the plan it began with."""
        if self.better is None:
            return
        found = self.better.take(self.outstanding.may_change())
        if found is not None:
            before, (self.run, self.answer) = self.answer, found
            tell_of_better(self.answer, before)
        if self.better.over:
            self.better = None  # holds the traced graph

    def __call__(self, *inputs: Any) -> Any:
        """One forward pass by the plan."""
        results = self.run(*inputs)
        if self.better is not None:
            self.outstanding.note(results)
        return results
