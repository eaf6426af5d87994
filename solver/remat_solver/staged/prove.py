"""The proof: bound with few coarse stages, see where the solution breaks memory, tell those stages apart, repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from remat_ir import Plan, plan_of

from ..backends import Engine, Improvement, Outcome
from ..incumbent import Incumbent
from ..program import Floats
from ..restrictions import ONE_PER_STAGE
from .interior import violated
from .program import Round, Rows, start_of, write
from .realize import point, realize
from .scale import Scale, balance_of, balanced, scale_of
from .shape import Shape, shape_of
from .single import violated_reruns
from .trace import Trace, trace

_LP_ROUNDS = 20
_LP_SHARE = 0.25
"""The share of the remaining time that linear programs may take before the first integer one."""


@dataclass(frozen=True)
class Switches:
    """What a proof may use; each changes its pace, none its result.

    engine: "cpsat" or "highs". linear: begin with linear programs. interior: rows (g) and (h). single: go on inside
    stages in the space of one recomputation per op and stage once the whole space has nothing more to tell apart.
    """

    engine: str = "cpsat"
    linear: bool = True
    interior: bool = True
    single: bool = True


class Proof:
    """Raises the bound of an incumbent, and offers the plans that its relaxations lead to.

    `polish` is handed each sequence that a relaxation's solution leads to, whether or not it fits, and may make a
    plan of it; it must return soon.
    """

    def __init__(
        self,
        incumbent: Incumbent,
        switches: Switches,
        *,
        polish: Callable[[list[int]], None] | None = None,
        source: str = "staged",
    ) -> None:
        self.incumbent = incumbent
        self.switches = switches
        self.source = source
        self.shape: Shape = shape_of(incumbent.problem)
        self.scale: Scale = scale_of(self.shape)
        roomy, last = self.shape.roomy, self.shape.ops - 1
        self.rows = Rows({min(max(0, roomy - 1), last), last})
        self._polish = polish

    def run(self, linear: Engine | None = None, integer: Engine | None = None) -> None:
        """Prove until the incumbent is stopped or nothing is left to tell apart.

        Engines that are handed in are used and left running; others are started, and ended with the proof.
        """
        if self.shape.roomy == self.shape.ops:
            self._offer(trace(self.shape, range(self.shape.ops)))
            return
        with contextlib.ExitStack() as stack:
            # started before it is needed: the engine's libraries load while linear programs are solved
            integer = integer or stack.enter_context(Engine(self.switches.engine))
            if self.switches.linear:
                linear = linear or stack.enter_context(Engine("highs"))
                self._linear(linear)
            while not self.incumbent.stopped():
                if not self._round(integer):
                    return

    def _linear(self, engine: Engine) -> None:
        """Cut by linear programs until none breaks the memory."""
        watch = self.incumbent.deadline.within(max(0.2, _LP_SHARE * min(self.incumbent.deadline.remaining(), 1e6)))
        for _ in range(_LP_ROUNDS):
            round_ = write(self.shape, self.rows, self.scale, again=self.switches.interior)
            outcome = engine.lp(balanced(round_.program), deadline=watch, stopped=self.incumbent.stopped)
            if outcome.status != "optimal" or outcome.x is None:
                # what floats call infeasible is left to whole numbers to judge
                return
            units = outcome.bound / balance_of(round_.program)
            self.incumbent.raise_bound(self.scale.bound_ns(self.shape, units, exact=False), self.source)
            if self.incumbent.stopped() or watch.passed() or not self._cut_by(round_, outcome.x):
                return

    def _cut_by(self, round_: Round, x: Floats) -> bool:
        """Add the worst broken slot of each coarse stage as a cut; whether there was one."""
        worst: dict[int, tuple[float, int]] = {}
        for excess, slot in violated(self.shape, round_.columns, round_.again, x):
            stage = round_.columns.stage_of(slot.op)
            worst[stage] = max(worst.get(stage, (0.0, 0)), (excess, slot.op))
        self.rows.cuts |= {op for _, op in worst.values()}
        return bool(worst)

    def _round(self, engine: Engine) -> bool:
        """One integer program and what follows from it; False when nothing is left to do."""
        round_ = write(self.shape, self.rows, self.scale, again=self.switches.interior)
        outcome = self._solve(engine, round_)
        within = () if round_.whole_space else (ONE_PER_STAGE,)
        if outcome.status == "infeasible":
            self._infeasible(round_)
            return False
        self._bound(outcome.bound, within)
        if outcome.x is None or self.incumbent.stopped():
            return False
        run = self._best_trace(round_, outcome.x)
        if self._offer(run):
            return outcome.status != "optimal"
        if self._polish is not None:
            self._polish([int(op) for op in run.order])
        return self._refine(round_, outcome.x, run)

    def _solve(self, engine: Engine, round_: Round) -> Outcome:
        program, within = round_.program, () if round_.whole_space else (ONE_PER_STAGE,)
        factor = 1.0
        if self.switches.engine == "highs":
            factor = balance_of(program)
            program = balanced(program)

        def improved(news: Improvement) -> None:
            self._bound(news.bound / factor, within)
            if news.x is not None:
                self._offer(self._best_trace(round_, news.x))

        outcome = engine.run(
            program,
            deadline=self.incumbent.deadline,
            start=self._start(round_),
            on_improvement=improved,
            stopped=self.incumbent.stopped,
            absolute_gap=factor * self._tolerated_units(),
        )
        return outcome._replace(objective=outcome.objective / factor, bound=outcome.bound / factor)

    def _tolerated_units(self) -> float:
        """How far from its optimum an integer program may be left: a quarter of the gap that is asked for."""
        cost = self.incumbent.cost_ns or self.incumbent.bound_ns
        return 0.25 * self.incumbent.max_gap * cost / self.scale.cost_ns

    def _start(self, round_: Round) -> Floats | None:
        plan = self.incumbent.plan
        if not isinstance(plan, Plan):
            return None
        known = point(
            self.shape, round_.columns, round_.again, round_.program.columns, trace(self.shape, plan.computes)
        )
        return known if round_.whole_space else start_of(round_, known)

    def _bound(self, units: float, within: tuple[str, ...]) -> None:
        exact = self.switches.engine == "cpsat"
        if not np.isfinite(units):
            return
        self.incumbent.raise_bound(self.scale.bound_ns(self.shape, units, exact=exact), self.source, within)

    def _infeasible(self, round_: Round) -> None:
        if self.switches.engine != "cpsat":
            return
        budget = self.incumbent.problem.budget_bytes
        if round_.whole_space:
            self.incumbent.prove_infeasible(f"No plan fits into {budget} bytes: the staged relaxation has no solution.")
        else:
            self.incumbent.nothing_within(
                (ONE_PER_STAGE,),
                f"No plan that recomputes each op at most once per stage fits into {budget} bytes.",
            )

    def _best_trace(self, round_: Round, x: Floats) -> Trace:
        return trace(self.shape, realize(self.shape, round_.columns, round_.again, x))

    def _offer(self, run: Trace) -> bool:
        """Offer a sequence if it fits; whether it did."""
        if run.peak > self.shape.capacity:
            return False
        cost = int(self.shape.cost[run.order].sum())
        if self.incumbent.cost_ns is None or cost < self.incumbent.cost_ns:
            self.incumbent.offer(plan_of(self.shape.graph, run.order.tolist()), self.source)
        return True

    def _refine(self, round_: Round, x: Floats, run: Trace) -> bool:
        """Tell apart the stages in which the sequence breaks the memory; False where all that can be told apart is."""
        cuts, seen = self.rows.cuts, set()
        new: set[int] = set()
        inside: list[tuple[int, int]] = []
        for position in np.argsort(-run.memory, kind="stable").tolist():
            if run.memory[position] <= self.shape.capacity:
                break
            stage, op = int(run.stage[position]), int(run.order[position])
            coarse = round_.columns.stage_of(stage)
            if coarse in seen:
                continue
            seen.add(coarse)
            if stage not in cuts:
                new.add(stage)
            elif op < stage:
                if stage - 1 not in cuts:
                    new.add(stage - 1)
                else:
                    inside.append((stage, op))
        if self.switches.interior:
            reruns = violated_reruns(self.shape, round_.columns, x)
            self.rows.reruns += reruns
            if reruns:
                inside = []
        else:
            reruns = []
        self.rows.cuts |= new
        if new or reruns:
            return True
        if not self.switches.single or not inside:
            return self._split(round_, x)
        before = sum(map(len, self.rows.singles.values()))
        for stage, op in inside:
            self.rows.singles.setdefault(stage, set()).add(op)
        return sum(map(len, self.rows.singles.values())) > before

    def _split(self, round_: Round, x: Floats) -> bool:
        """Halve the widest coarse stages in which the solution recomputes: for when only the placement failed."""
        columns = round_.columns
        wide = [
            (columns.cuts[c] - columns.first[c], (columns.cuts[c] + columns.first[c]) // 2)
            for c in range(1, columns.stages)
            if columns.cuts[c] > columns.first[c] and bool((x[columns.runs[c][columns.runs[c] >= 0]] > 0.5).any())
        ]
        new = {middle for _, middle in sorted(wide, reverse=True)[:2]}
        self.rows.cuts |= new
        return bool(new)
