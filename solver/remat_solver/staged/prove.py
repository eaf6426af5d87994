"""The proof: bound with few coarse stages, see where the solution breaks memory, tell those stages apart, repeat.

It begins with one coarse stage besides stage 0 and cuts where memory is exceeded most, one cut a round, or where the
linear bound rises most. Few cuts are quicker to solve, and a coarse program has a stronger linear relaxation: inside a
coarse stage several fractional recomputations cannot all lean on one fractional value.

Certificates are written of trees of linear programs for what it has found so far.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from remat_ir import Plan, gap_of, plan_of, readable
from remat_ir.proof import StageProof

from ..array_view import ArrayView, Trace, trace, view_of
from ..backends.engine import Engine
from ..backends.outcome import Outcome
from ..deadline import Deadline, TimeUp
from ..incumbent import Incumbent
from ..program import Floats, Program
from .certificate import LOSS, Certified, Certifier, wanted_ns
from .refinement import Gains, Refinement
from .relaxation import point, primal_heuristic
from .rows import Round, worst_op, write
from .scale import WHOLE, balance_of, balanced, row_factors
from .shorten import Solve, shortening

_SOURCE = "staged"
_WORTH = 0.1
"""The share of the gap that a tree which did not get to its end must close to be certified."""
_WRITING_S, _WRITING_SHARE = 1.0, 0.1
"""The seconds at most, and the share of the time left, for writing the certificate of a tree, however small."""
_AND_CHECK = 2.0
"""How many times as long as its nodes take to be written a tree takes with the check of the answer at the end."""
_LP_ROUNDS = 30
_LARGE = 1500
_LP_SHARE, _LP_SHARE_OF_LARGE = 0.25, 0.9
"""The share of the remaining time that linear programs may take before the first integer one, which gains little on
graphs of `_LARGE` ops and more: there linear programs alone come within a hundredth of a percent."""
_NESTED = 400
"""Up to so many ops integer programs have the rows of coarse stages that were cut, too; beyond, they take too long."""
_FAR = 0.1
"""The share of the gap between incumbent and bound that is left in integer programs while cuts are still sought."""
_LEAST_GAIN = 0.01
"""What share of the gap a cut must gain where no point breaks the memory yet."""
_TURN_S, _TREE_TURN = 1e-4, 4.0
"""CPU seconds, for each entry of the program, of an integer program's first turn, and how many times as long the tree's
is that follows it."""
_CLAIM_SHARE, _CLAIM_S = 0.5, 120.0
"""The share of the time, and the seconds at most that it is a share of, after which what integer programs have claimed
until then is certified: what they prove later no certificate would have the time for."""


class Proof:
    """Raises the bound of an incumbent, and offers the plans that its relaxations lead to.

    `polish` is handed each sequence that a relaxation's solution leads to, whether or not it fits, and may make a
    plan of it; it must return soon. `exceeding` is handed those that do not fit, and those of points on the way.
    `memory_bytes` is what an engine that is started here may use, as in `Engine`.
    `second` is called once, after the first linear program, with the engine: another way to a bound.

    Attributes:
        out_of_memory: whether an engine has ended for want of memory, and the proof with it.
        out_of_time: whether the last program or tree was left for want of time; a tree is left early enough for its
            certificate to be written.
    """

    def __init__(
        self,
        incumbent: Incumbent,
        *,
        polish: Callable[[list[int]], None] | None = None,
        exceeding: Callable[[list[int]], None] | None = None,
        memory_bytes: int = 0,
        second: Callable[[Engine], None] | None = None,
    ) -> None:
        self.incumbent = incumbent
        self.view: ArrayView = view_of(incumbent.problem)
        self.refinement = Refinement(self.view)
        self.out_of_memory = False
        self.out_of_time = False
        self._polish, self._exceeding = polish, exceeding
        self._memory_bytes = memory_bytes
        self._second = second
        self._far = True
        self._without_plan = False
        self._certifier = Certifier(incumbent.problem) if incumbent.certifies else None
        self._sought = (-1, 0)
        self._gains: Gains | None = None

    def run(self, engine: Engine | None = None) -> None:
        """Prove until the incumbent is stopped or nothing is left to tell apart.

        An engine of HiGHS that is handed in is used and left running; else one is started, and ended with the proof.
        """
        if self.view.tight_from == self.view.ops:
            self._offer(trace(self.view, range(self.view.ops)))
            return
        with contextlib.ExitStack() as stack:
            engine = engine or stack.enter_context(Engine("highs", memory_bytes=self._memory_bytes))
            # a program that is half written is of no use
            with contextlib.suppress(TimeUp):
                self._linear(engine)
                self._go_on(engine)
            self._shorten(engine)

    def _shorten(self, engine: Engine) -> None:
        """Make the last certificate shorter, if it is longer than the plan, for nearly the same bound."""
        incumbent = self.incumbent
        proof, plan, bound, cost = incumbent.known.proof, incumbent.plan, incumbent.bound_ns, incumbent.cost_ns
        if self._certifier is None or not isinstance(proof, StageProof) or not isinstance(plan, Plan):
            return
        if len(proof.nodes) == 1 and cost is not None and gap_of(cost, bound) <= incumbent.max_gap:
            certified, wanted = Certified(proof, bound), wanted_ns(incumbent, bound)
            found = self._certifier.spared(certified, wanted, plan, self._shorter(engine, ending=True))
            if found.bound_ns is not None and found.proof is not proof:
                incumbent.rewritten(proof, found.bound_ns, found.proof)

    def _shorter(self, engine: Engine, *, ending: bool = False) -> tuple[Solve, Deadline]:
        """What solves the linear programs that make a certificate shorter, and for how long it may.

        `ending`: also once the incumbent is stopped.
        """
        watch = shortening(self.incumbent.deadline)

        def solve(program: Program) -> Floats | None:
            outcome = engine.lp(program, deadline=watch, stopped=None if ending else self.incumbent.stopped)
            return outcome.x if outcome.status == "optimal" else None

        return solve, watch

    def _go_on(self, engine: Engine) -> None:
        """Integer programs, each cut where its point breaks the memory, and trees of linear programs, which certify.

        A claim that is enough, or half of the time, leaves all that is left to trees. Until then both take turns, and
        who settled the rows begins next time; where neither did, turns become longer.
        """
        incumbent, certify = self.incumbent, self._certifier is not None
        watch = incumbent.deadline.within(_CLAIM_SHARE * min(incumbent.deadline.remaining(), _CLAIM_S))
        turn, tree_leads = _TURN_S, False
        if incumbent.deadline.work is not None:
            # HiGHS's own branch and bound cannot be ended by work alone; trees can
            if not certify:
                return
            watch = Deadline(0.0)
        while not incumbent.stopped() and not self.out_of_memory:
            if certify and (incumbent.claimed_enough() or self._without_plan or watch.passed()):
                if not self._grow(engine):
                    incumbent.cease_certifying()
                    return
                continue
            if certify and incumbent.cost_ns is not None:
                for by_tree in (tree_leads, not tree_leads):
                    more = self._grow(engine, _TREE_TURN * turn) if by_tree else self._round(engine, watch, turn)
                    if more is not None or self._enough():
                        tree_leads = by_tree
                        break
            else:
                more = self._round(engine, watch if certify else incumbent.deadline)
            if more is False:
                if not certify:
                    return
                watch = Deadline(0.0)
            turn = 2 * turn if more is None else _TURN_S

    def _linear(self, engine: Engine) -> None:
        """Cut by linear programs until none breaks the memory, and no cut close by gains anything."""
        share = _LP_SHARE if self.view.ops < _LARGE else _LP_SHARE_OF_LARGE
        watch = None
        for _ in range(_LP_ROUNDS):
            round_ = write(self.view, self.refinement.rows, self.refinement.scale, stop=self.incumbent.stopped)
            # on a busy machine the engine may still be starting: its first program is waited for
            until = watch or self.incumbent.deadline
            outcome = engine.lp(balanced(round_.program), deadline=until, stopped=self.incumbent.stopped)
            self._note_memory(outcome)
            watch = watch or until.within(share * min(until.remaining(), 1e6))
            if outcome.status != "optimal" or outcome.x is None:
                # what floats call infeasible is left to whole numbers to decide
                return
            bound = self.refinement.scale.linear_bound_ns(self.view, round_.program, outcome.bound)
            if self._certifier is None:
                self.incumbent.raise_bound(bound, _SOURCE)
            elif bound > self.incumbent.bound_ns and outcome.row_dual is not None:
                wanted = wanted_ns(self.incumbent, bound)
                self._take(
                    self._certifier.of_linear(round_, self.refinement.scale, outcome.row_dual, bound, wanted), engine
                )
            if self._second is not None:
                self._second(engine)
                self._second = None
            worst = worst_op(self.view, round_.columns, outcome.x)
            if self.incumbent.stopped() or watch.passed():
                return
            cut = self._ahead(engine, bound, watch) if worst is None else worst
            if cut is None:
                return
            self._gains = self._gains or Gains(cut + 1, self.view.ops - 2)
            self.refinement.rows.cut(cut)

    def _ahead(self, engine: Engine, bound_ns: int, watch: Deadline) -> int | None:
        """The cut that raises the linear bound most; None where none raises it much."""
        cost = self.incumbent.cost_ns
        if cost is None or self._gains is None or self.view.ops > _NESTED:
            return None

        def over() -> bool:
            return self.incumbent.stopped() or watch.passed()

        def raised(op: int) -> float:
            rows, scale = self.refinement.rows.with_cut(op), self.refinement.scale
            program = write(self.view, rows, scale, stop=over).program
            outcome = engine.lp(balanced(program), deadline=watch, stopped=self.incumbent.stopped)
            solved = outcome.status == "optimal"
            return scale.linear_bound_ns(self.view, program, outcome.bound) - bound_ns if solved else 0.0

        found = self._gains.best(self.refinement.rows.cuts, raised, over)
        return None if found is None or found.raised < _LEAST_GAIN * (cost - bound_ns) else found.op

    def _grow(self, engine: Engine, turn: float | None = None) -> bool | None:
        """Certify by a tree of linear programs for the rows found so far; whether its point showed what to add.

        None where its turn, in CPU seconds for each entry of the program, was over before.

        Raises:
            TimeUp: before its program was written.
        """
        assert self._certifier is not None
        incumbent, total = self.incumbent, int(self.view.cost.sum())
        wanted = math.inf
        if incumbent.cost_ns is not None:
            wanted = incumbent.cost_ns - max(0.5, incumbent.max_gap * incumbent.cost_ns - 2 * LOSS * total)
        round_, outcome = self._tree(engine, wanted - total, turn)
        tree, closed = outcome.tree, outcome.bound >= wanted - total
        # without a tree the engine was ended before its last word, which on a busy machine comes late
        self.out_of_time = tree is None or tree.late
        if tree is not None:
            # a whole number of ns: what is well above one proves the next
            bound = total + max(0, math.ceil(outcome.bound - 0.25)) if np.isfinite(outcome.bound) else total
            if turn is None or closed or bound - incumbent.bound_ns > _WORTH * (wanted - incumbent.bound_ns):
                needed, shorter = wanted_ns(incumbent, bound), self._shorter(engine)
                self._take(self._certifier.of_tree(round_, WHOLE, tree, bound, needed, shorter), engine)
        if incumbent.stopped():
            return False
        if outcome.x is None:
            return None if turn is not None and not closed else False
        run, cost = self._trace(round_, outcome.x), incumbent.cost_ns
        if self._offer(run) and incumbent.cost_ns != cost:
            # the next tree has this plan to reach
            return not incumbent.stopped()
        if self._polish is not None:
            self._polish(run.order.tolist())
        return self.refinement.refine(round_, outcome.x, run)

    def _tree(self, engine: Engine, wanted: float, turn: float | None) -> tuple[Round, Outcome]:
        """The tree that is to prove so many ns more than all ops once, and its program; its bound is in ns."""
        incumbent, certifier = self.incumbent, self._certifier
        assert certifier is not None
        extra = self._extra(wanted)
        # cutting planes are derived exactly from whole bytes and ns
        round_ = write(self.view, self.refinement.rows, WHOLE, cutoff_ns=extra, stop=incumbent.stopped)
        factor = balance_of(round_.program)
        branching = np.arange(round_.program.columns) < round_.columns.count
        program = replace(balanced(round_.program), integer=branching)
        remaining = incumbent.deadline.remaining()
        outcome = engine.tree(
            program,
            cutoff=factor * wanted,
            deadline=incumbent.deadline.within(remaining - min(_WRITING_S, _WRITING_SHARE * remaining)),
            stopped=incumbent.stopped,
            factor=row_factors(round_.program),
            turn_s=None if turn is None else turn * program.entries,
            cutoff_row=None if extra is None else (program.rows - 1, factor * extra),
            # where work is counted no clock may decide
            node_s=0.0 if incumbent.deadline.work is not None else _AND_CHECK * certifier.node_s,
        )
        return round_, outcome._replace(bound=outcome.bound / factor)

    def _extra(self, extra: float) -> int | None:
        """How many ns more than all ops once are to be proved, the same as long as the rows are: a tree is held."""
        if not math.isfinite(extra) or extra < 1:
            return None
        count, known = self._sought
        if count != self.refinement.rows.count or known < extra:
            self._sought = self.refinement.rows.count, math.ceil(extra)
        return self._sought[1]

    def _take(self, found: Certified | None, engine: Engine) -> None:
        """Record what a certificate proves; one that ends the solve and is longer than the plan is made shorter."""
        if found is None or self._certifier is None:
            return
        plan, cost = self.incumbent.plan, self.incumbent.cost_ns
        if isinstance(plan, Plan) and cost is not None:
            wanted = cost - self.incumbent.max_gap * cost
            found = self._certifier.spared(found, wanted, plan, self._shorter(engine))
        if found.bound_ns is None:
            budget = self.incumbent.problem.budget_bytes
            reason = f"No plan fits into {readable(budget)}: the staged relaxation has no solution."
            self.incumbent.prove_infeasible(reason, budget + 1, found.proof)
        else:
            self.incumbent.raise_bound(found.bound_ns, _SOURCE, proof=found.proof)

    def _round(self, engine: Engine, watch: Deadline, turn: float | None = None) -> bool | None:
        """One integer program and what follows; False when nothing is left to do, None when its turn is over."""
        rows, scale, nested = self.refinement.rows, self.refinement.scale, self.view.ops <= _NESTED
        round_ = write(self.view, rows, scale, nested=nested, stop=self.incumbent.stopped)
        outcome = self._solve(engine, round_, watch, turn)
        if outcome.status == "infeasible":
            # within the engine's tolerances only: a tree is to prove it
            self._without_plan = True
            return False
        self.out_of_time = turn is None and outcome.status in ("feasible", "nothing_found")
        self._bound(outcome.bound)
        self._note_memory(outcome)
        if self._enough():
            # of these rows that is to be certified, not of more
            return True
        unsolved = turn is not None and not self.out_of_memory and outcome.status != "optimal"
        if unsolved and not self._short(outcome):
            return None
        if self.out_of_memory or outcome.x is None:
            return False
        run = self._trace(round_, outcome.x)
        if self._offer(run):
            if unsolved:
                return None
            # the program was solved as far as asked for: if that left a gap on purpose, it is now closed
            far, self._far = self._far, False
            return far
        if self._polish is not None:
            self._polish(run.order.tolist())
        return self.refinement.refine(round_, outcome.x, run) or (None if unsolved else False)

    def _short(self, outcome: Outcome) -> bool:
        """Whether a point costs less than the bound that is wanted: by these rows alone it cannot be proved."""
        cost, total = self.incumbent.cost_ns, int(self.view.cost.sum())
        if outcome.x is None or cost is None:
            return False
        return total + outcome.objective * self.refinement.scale.cost_ns < (1 - self.incumbent.max_gap) * cost

    def _solve(self, engine: Engine, round_: Round, watch: Deadline, turn: float | None) -> Outcome:
        program, factor = balanced(round_.program), balance_of(round_.program)
        start, plan = None, self.incumbent.plan
        if isinstance(plan, Plan):
            start = np.full(program.columns, np.nan)
            start[: round_.columns.count] = point(self.view, round_.columns, trace(self.view, plan.computes))

        def improved(x: Floats | None, bound: float) -> None:
            self._bound(bound / factor)
            if x is not None:
                self._offer(self._trace(round_, x))

        outcome = engine.run(
            program,
            deadline=watch,
            start=start,
            on_improvement=improved,
            stopped=self._enough,
            absolute_gap=factor * self._tolerated_units(),
            turn_s=None if turn is None else turn * program.entries,
        )
        return outcome._replace(objective=outcome.objective / factor, bound=outcome.bound / factor)

    def _enough(self) -> bool:
        """Whether an integer program's engine can stop: the gap is reached, at least by what it claims."""
        incumbent = self.incumbent
        return incumbent.stopped() or (incumbent.certifies and incumbent.claimed_enough())

    def _tolerated_units(self) -> float:
        """How far from its optimum an integer program may be left."""
        cost, bound = self.incumbent.cost_ns, max(self.incumbent.best_claim(), self.incumbent.best_bound().ns)
        least = 0.25 * self.incumbent.max_gap * (cost or bound)
        if self._far and cost is not None:
            least = max(least, _FAR * (cost - bound))
        return least / self.refinement.scale.cost_ns

    def _note_memory(self, outcome: Outcome) -> None:
        """Where an engine ran out of memory, say so: what it had proved holds, and plans are sought without it."""
        if outcome.out_of_memory and not self.out_of_memory:
            self.out_of_memory = True
            self.incumbent.note(f"The proof ended early: {outcome.message}.")

    def _bound(self, units: float) -> None:
        if np.isfinite(units):
            bound = self.refinement.scale.bound_ns(self.view, units)
            self.incumbent.raise_bound(bound, _SOURCE)

    def _trace(self, round_: Round, x: Floats) -> Trace:
        return trace(self.view, primal_heuristic(self.view, round_.columns, x))

    def _offer(self, run: Trace) -> bool:
        """Offer a sequence if it fits, else note what it needs where nothing fits yet; whether it did."""
        fits, known = run.peak <= self.view.capacity, self.incumbent.cost_ns
        if known is None or (fits and int(self.view.cost[run.order].sum()) < known):
            self.incumbent.offer_or_suffices(plan_of(self.view.graph, run.order.tolist()), _SOURCE)
        if not fits and self._exceeding is not None:
            self._exceeding(run.order.tolist())
        return fits
