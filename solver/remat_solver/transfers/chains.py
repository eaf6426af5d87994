"""The search on a chain with a link: sequences of its lift to a graph, whose copies are placed as chains have them.

A chain moves what is stored at a cut as one: a tape, or else an activation. So a sequence of the lift is lowered to the
steps of a chain plan, and what each of them stores is a value of one more graph, in which every step runs once.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Sequence

from remat_ir import (
    AnyPlan,
    Chain,
    ChainPlan,
    ChainStep,
    Compute,
    Free,
    Graph,
    Plan,
    Problem,
    Verb,
    graph_of,
    lifted_plan,
    lowered_plan,
    verify,
)
from remat_ir.chain_lift import STEP_OF_VERB

from ..incumbent import Incumbent
from .place import Gap, Placed, Timetable, timetable
from .search import TransferSearch

_INPUT = ChainStep(Verb.F_CK, 0)
"""What stands for making a^0, where that may leave."""
_VERB_OF_STEP: dict[type, Verb] = {Free: Verb.FREE} | {step: verb for verb, step in STEP_OF_VERB.items()}


class LinkedLift(Incumbent):
    """The incumbent of a chain's lift with its link. Nothing is passed on to the chain's but what closes it.

    Copies of a tape are rounded up to whole ns value by value there, so a bound of the lift is not quite the chain's.
    """

    def __init__(self, outer: Incumbent) -> None:
        chain = outer.problem.subject
        assert isinstance(chain, Chain)
        problem = Problem(chain.to_graph().with_link(chain.link), outer.problem.budget_bytes)
        super().__init__(problem, outer.deadline, outer.max_gap)
        self.outer = outer

    def stopped(self) -> bool:
        """Whether there is a reason to stop, here or on the chain."""
        return super().stopped() or self.outer.stopped()

    def close(self) -> None:
        """Have everybody who works on the chain stop."""
        super().close()
        self.outer.close()


class ChainTransferSearch(TransferSearch):
    """The search on the incumbent of a chain with a link."""

    def __init__(self, incumbent: Incumbent, seed: int = 0) -> None:
        super().__init__(incumbent, seed, LinkedLift(incumbent))
        chain = incumbent.problem.subject
        assert isinstance(chain, Chain)
        self.chain = chain
        self._stored: tuple[ChainStep, ...] = ()

    def adopt(self, plan: AnyPlan) -> None:
        """Go on from a plan of the chain or its lift, if it is the best, with its copies placed anew."""
        if isinstance(plan, ChainPlan):
            plan = lifted_plan(self.chain, ChainPlan(tuple(step for step in plan.steps if step.stage)))
        super().adopt(plan)

    def table(self, order: Sequence[int]) -> Timetable:
        """What is stored when, of the chain plan with these computations."""
        steps = lowered_plan(self.chain, order).steps
        first = (_INPUT,) if self.chain.input_may_leave else ()
        self._stored = (*first, *(step for step in steps if step.verb is not Verb.FREE))
        return timetable(stored_graph(self.chain, self._stored), range(len(self._stored)))

    def values_of(self, gap: Gap) -> Collection[int]:
        """The values of the lift that are stored there; none of a gradient, which stays, or of the input."""
        verb, stage = self._stored[gap.value]
        if verb is Verb.B or not stage:
            return ()
        values = self.chain.stage_values(stage)
        return values if verb is Verb.F_ALL else values[:1]

    def may_move(self, gap: Gap, allowed: Collection[int]) -> bool:
        """Whether a gap may be spent on the host: also of an input that may leave, which no set has."""
        return self._stored[gap.value] == _INPUT or super().may_move(gap, allowed)

    def planned(self, table: Timetable, found: Placed) -> tuple[int, AnyPlan]:
        """The chain plan and its makespan."""
        plan = moved_plan(self._stored, found.plan)
        return verify(self.incumbent.problem, plan).cost_ns, plan


def stored_graph(chain: Chain, steps: Iterable[ChainStep]) -> Graph:
    """The graph of forward and backward steps that each run once, in which what a step stores is a value.

    δ^L appears with B^L and goes with it: it is part of its workspace. An input that may leave is made by a step of its
    own.
    """
    costs: list[int] = []
    sizes: list[int] = []
    workspaces: list[int] = []
    inputs: list[list[int]] = []
    stored: dict[int, int] = {}  # cut -> the step that made what is stored there
    gradient = -1
    for i, (verb, stage) in enumerate(steps):
        reads = [stored[cut] for cut in (stage - 1, *((stage,) if verb is Verb.B else ())) if cut in stored]
        if not stage:
            costs.append(0)
            sizes.append(chain.fixed_bytes)
            workspaces.append(0)
            stored[0] = i
        elif verb is Verb.B:
            last = stage == chain.stages
            costs.append(chain.backward_ns[stage - 1])
            sizes.append(chain.gradient_bytes[stage - 1])
            workspaces.append(chain.backward_workspace_bytes[stage - 1] + (chain.gradient_bytes[stage] if last else 0))
            reads += [] if last else [gradient]
            gradient = i  # δ^(l−1)
        else:
            tape = verb is Verb.F_ALL
            costs.append(chain.forward_ns[stage - 1])
            sizes.append(chain.tape_bytes[stage - 1] if tape else chain.activation_bytes[stage])
            workspaces.append((chain.forward_workspace_bytes if tape else chain.untaped_workspaces)[stage - 1])
            stored[stage] = i
        inputs.append(sorted(reads))
    return graph_of(
        costs,
        sizes,
        inputs,
        op_workspace_bytes=workspaces,
        keep=(len(costs) - 1,),
        fixed_bytes=chain.staying_bytes,
    ).with_link(chain.link)


def moved_plan(stored: Sequence[ChainStep], plan: Plan) -> ChainPlan:
    """The chain plan of a plan of `stored_graph`. A backward step frees what it has used, so copies of that out are
    waited for before it, not after.
    """
    steps: list[ChainStep] = []
    freed = {step.value: i for i, step in enumerate(plan.steps) if isinstance(step, Free)}
    computed = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
    backward = -1  # where the backward step is that ran last, if no forward step has run since
    for i, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            verb, stage = stored[step.op]
            if not stage:
                continue
            backward = len(steps) if verb is Verb.B else -1
            steps.append(ChainStep(Verb.F_CK if verb is Verb.F_NONE else verb, stage))
            continue
        cut = stored[step.value].stage
        found = ChainStep(_VERB_OF_STEP[type(step)], cut)
        dies = backward >= 0 and bisect(computed, freed.get(step.value, -1)) == bisect(computed, i)
        if isinstance(step, Free) and steps[-1] == ChainStep(Verb.F_CK, cut + 1):
            steps[-1] = ChainStep(Verb.F_NONE, cut + 1)
        elif not dies:
            steps.append(found)
        elif not isinstance(step, Free):
            steps.insert(backward, found)
            backward += 1
    return ChainPlan(tuple(steps))
