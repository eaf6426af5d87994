"""Stages trained inside a budget, one after the other or in branches that meet: profile, ask, verify, execute."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from remat_ir import (
    Answer,
    Chain,
    ChainPlan,
    ChainStep,
    Graph,
    InvalidData,
    InvalidPlan,
    Join,
    JoinPlan,
    JoinVerb,
    Plan,
    Problem,
    Status,
    Verb,
    permitted,
    plan_of,
    verify,
    without_unread,
)

from .. import generators
from .._compat import buffers_of, parameters_of
from ..device import storage_bytes
from ..distributed import planner_of
from ..errors import CaptureError, RanksDiffer, RematError
from ..lowering.link import bandwidth, storable
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, budget_bytes, bytes_of, device_budget
from ..planning.options import DEFAULT, PlanFields, SolveOptions, solve_options
from ..planning.planner import CoordinatedPlanner, Planner, plan_or_raise
from ..planning.quick import improved, quick_answer
from ..planning.sources import OnProgress
from ..profiling.fixed import bucket_bytes, bytes_beside, existing_gradients
from ..profiling.optimizers import check_optimizer, update_blocks, update_memory
from ..profiling.room import Room, rehearsed
from .modules import ChainedModule, JoinedModule
from .profile import ProfiledJoin, chain_of, join_of

log = logging.getLogger("remat")


class StagesAsked(NamedTuple):
    """How stages are planned, whatever the size of their input.

    Attributes:
        budget: of all of them, less the allocator's share: see `stages_budget`.
        optimizer, ema, offload, host_bytes: as for `optimize_chain`.
    """

    budget: Budget
    planner: CoordinatedPlanner
    options: SolveOptions
    optimizer: Any = None
    ema: Any = None
    offload: bool = False
    host_bytes: int | None = None


class StagesRoom(Room):
    """The room of stages: a budget, less what is there throughout their training.

    That is, in bytes, their parameters and buffers, a gradient for each parameter, the optimizer's state and averages;
    on an accelerator also what others have allocated there.
    """

    def __init__(self, modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor], asked: StagesAsked) -> None:
        super().__init__(inputs[0].device, asked.budget, 1.0, asked.planner.coordinator)
        self._inputs, self._asked = inputs, asked.budget
        whole = nn.ModuleList(modules)
        update = update_memory(asked.optimizer)
        self._blocks = update_blocks(asked.optimizer, update)
        held = sum(t.numel() * t.element_size() for t in (*whole.parameters(), *whole.buffers()))
        held += bucket_bytes(whole)[0] + (0 if asked.ema is None else bytes_beside(asked.ema, whole))
        held += update.state_bytes
        new = sum(p.numel() * p.element_size() for p in whole.parameters() if p.requires_grad)
        gradients = existing_gradients(whole)
        self._fixed = held + max(new, gradients) + update.beside_passes_bytes
        self._present = held + gradients - sum(self._blocks.state) + sum(map(storage_bytes, inputs))

    def problem(self, subject: Chain | Graph) -> Problem:
        """What is asked: the budget in bytes of activations, the inputs' included."""
        if isinstance(self._asked, Fraction | ActivationBytes):
            return Problem(subject, budget_bytes(self._asked, subject))
        assert not isinstance(self._asked, UnitBytes), "see stages_budget"
        return Problem(subject, max(0, self.left(bytes_of(self._asked), self._present) - self._fixed))

    def reserved(self, made: nn.Module) -> int:
        """The reserved bytes of some steps of stages that train by a plan, whose gradients stay from step to step."""
        assert self.device is not None
        xs = [x.detach().requires_grad_(x.requires_grad) for x in self._inputs]

        def step() -> None:
            y = made(*xs)
            torch.autograd.backward((y,), (torch.ones_like(y),))
            for x in xs:
                x.grad = None

        with torch.enable_grad(), _apart(made), generators.Own():
            return rehearsed(self.device, step, self._blocks)


@contextlib.contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Inside, a module has other parameters over the same memory, and copies of its buffers.

    So its own gradients and buffers stay as they are, and hooks of its parameters do not run.
    """
    parts = [(parameters_of(m), buffers_of(m)) for m in module.modules()]
    before = [(dict(p), dict(b)) for p, b in parts]
    others: dict[int, nn.Parameter] = {}
    for parameters, buffers in parts:
        for name, own in parameters.items():
            if own is not None:
                made = others.setdefault(id(own), nn.Parameter(own.detach(), own.requires_grad))
                parameters[name] = made
        buffers.update({name: own.clone() for name, own in buffers.items() if own is not None})
    try:
        yield
    finally:
        for (parameters, buffers), (own_parameters, own_buffers) in zip(parts, before, strict=True):
            parameters.update(own_parameters)
            buffers.update(own_buffers)


def stages_budget(budget: Budget, slack: float) -> Budget:
    """A budget of stages, bytes of a device less the allocator's share.

    Raises:
        InvalidData: not a budget, or one of a unit.
    """
    if isinstance(budget, UnitBytes):
        raise InvalidData("stages have one budget for all of them: give bytes, not remat.UnitBytes")
    return device_budget(budget, slack)


def plan_join(
    branches: Iterable[Iterable[nn.Module]], head: nn.Module, inputs: Sequence[torch.Tensor], asked: StagesAsked
) -> JoinedModule:
    """Measure and plan branches that meet in a head.

    Raises:
        CaptureError, BudgetTooSmall, NothingFound, RanksDiffer: as `optimize_chain`.
    """
    lists = [list(branch) for branch in branches]
    if len(lists) < 2 or not all(lists) or len(lists) != len(inputs):
        raise CaptureError(f"a join is two or more branches of stages, with an input each, not {len(lists)}")
    profiled = join_of(lists, head, inputs, asked.planner.coordinator)
    room = StagesRoom([*(m for b in lists for m in b), head], inputs, asked)
    order = plain = [j for j in reversed(range(len(lists))) for _ in lists[j]]

    def ask(problem: Problem) -> Answer:
        nonlocal order
        asked.planner.coordinator.same(problem)  # the search depends on it
        order, answer = _best(profiled, plain, problem.budget_bytes, asked.planner, asked.options)
        return answer

    def carried_out(problem: Problem, answer: Answer) -> JoinedModule:
        problem = Problem(profiled.graph(order), problem.budget_bytes)
        return carry_out_join(lists, head, profiled, order, problem, answer)

    def over(problem: Problem, answer: Answer) -> int:
        return room.over(lambda: room.reserved(carried_out(problem, answer)))

    made = carried_out(*room.settled(room.problem(profiled.graph(plain)), ask, over))
    made.reserved_bytes = room.seen
    return made


def _best(
    profiled: ProfiledJoin, plain: list[int], budget_bytes: int, planner: CoordinatedPlanner, asking: SolveOptions
) -> tuple[list[int], Answer]:
    """An order of the backward steps, by branch, and the best plan that is found in it.

    Raises:
        BudgetTooSmall, NothingFound: there is none.
    """
    joined = _join_plan(profiled, budget_bytes, planner, asking)
    order, answer = (plain, None) if joined is None else joined
    if asking.method != "join":
        found = planner.plan(Problem(profiled.graph(order), budget_bytes), asking)
        if answer is None or (found.cost_ns is not None and found.cost_ns <= (answer.cost_ns or 0)):
            answer = plan_or_raise(found)
    if answer is None:
        answer = plan_or_raise(Answer(Status.NOTHING_FOUND, asking.method, budget_bytes, message="No join plan fits."))
    return order, answer


def carry_out_join(
    branches: Sequence[Sequence[nn.Module]],
    head: nn.Module,
    profiled: ProfiledJoin,
    backward: Sequence[int],
    problem: Problem,
    answer: Answer,
) -> JoinedModule:
    """Branches and a head with an answer's plan, verified.

    Raises:
        InvalidPlan: the plan is not one of this graph, or not what the answer claims.
    """
    if not isinstance(answer.plan, Plan):
        raise InvalidPlan(f"branches need a plan of their graph, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return JoinedModule(branches, head, profiled, backward, answer.plan, answer)


def _join_plan(
    profiled: ProfiledJoin, budget_bytes: int, planner: Planner, asking: SolveOptions
) -> tuple[list[int], Answer] | None:
    """The optimal plan of the homogenized join in as many slots as fit the budget in bytes, and its backward order."""
    message = "The optimal plan of the join of equal steps, in as many slots as fit in bytes."
    lengths = profiled.lengths
    low, high = len(lengths), sum(lengths) + len(lengths) + 1
    best: tuple[list[int], Answer] | None = None
    while low <= high:
        slots = (low + high) // 2
        found = _in_slots(profiled, slots, planner, asking)
        if found is None:
            low = slots + 1
            continue
        order, graph, plan = found
        try:
            best = order, Answer.of_plan(Problem(graph, budget_bytes), plan, method="join", message=message)
            low = slots + 1
        except InvalidPlan:  # it is over the budget
            high = slots - 1
    return best


def _in_slots(
    profiled: ProfiledJoin, slots: int, planner: Planner, asking: SolveOptions
) -> tuple[list[int], Graph, Plan] | None:
    """The join's plan in so many slots as a backward order, the graph in that order and its plan; None if none fits."""
    join = homogenized(profiled, slots)
    problem = Problem(join, join.slots * join.slot_bytes)
    try:
        plan = planner.plan(problem, replace(asking, method="join")).plan
    except RanksDiffer:
        raise
    except RematError as error:
        log.debug("no join plan in %d slots: %s", slots, error)
        return None
    return branches_by(profiled, plan) if isinstance(plan, JoinPlan) else None


def homogenized(profiled: ProfiledJoin, slots: int) -> Join:
    """The join of as many equal steps, each of the mean cost, in so many slots of the largest activation.

    A backward step reads what its own stage made, so it counts a forward step, too: it runs right before.
    """
    lengths, count = profiled.lengths, sum(profiled.lengths)
    graph = profiled.graph([j for j, length in enumerate(lengths) for _ in range(length)])
    costs = graph.op_cost_ns
    forward, backward = sum(costs[:count]), sum(costs[count + 3 :])
    turn = sum(costs[count : count + 3])  # the head, the incoming gradient, the head's backward step
    sizes = [graph.value_bytes[v] for op in range(count) for v in graph.op_always[op]]
    return Join(lengths, forward // count, (forward + backward) // count, turn, slots, max(1, *sizes))


def branches_by(profiled: ProfiledJoin, plan: JoinPlan) -> tuple[list[int], Graph, Plan]:
    """A join plan's backward order, the graph in that order, and the plan's steps on its ops.

    Forward steps before the turn are put into op order (RR-9273, Lemma 1). After it branches do not depend on each
    other, so forward steps wait for the next backward step of their branch.
    """
    order = [step.branch for step in plan.steps if step.verb is JoinVerb.B]
    graph, count = profiled.graph(order), sum(profiled.lengths)
    starts = [sum(profiled.lengths[:j]) for j in range(len(profiled.lengths))]
    waiting: list[list[int]] = [[] for _ in starts]
    computes = list(range(count + 3))
    turn = next(i for i, step in enumerate(plan.steps) if step.verb is JoinVerb.TURN)
    backward = iter(range(count + 3, graph.ops))
    for verb, branch, at in plan.steps[turn + 1 :]:
        if verb is JoinVerb.F:
            waiting[branch].append(starts[branch] + at)
        elif verb is JoinVerb.B:
            computes += [*waiting[branch], starts[branch] + at, next(backward)]
            waiting[branch].clear()
    unrepeated = [op for op, _ in groupby(permitted(graph, computes))]  # made twice in a row
    return order, graph, plan_of(graph, without_unread(graph, unrepeated))


@overload
def optimize_chain(
    stages: Iterable[nn.Module], x: torch.Tensor, *, head: None = None, **given: Any
) -> ChainedModule: ...


@overload
def optimize_chain(
    stages: Iterable[Iterable[nn.Module]], x: Sequence[torch.Tensor], *, head: nn.Module, **given: Any
) -> JoinedModule: ...


def optimize_chain(
    stages: Iterable[Any],
    x: Any,
    *,
    budget: Budget | None = None,
    segments: int | None = None,
    head: nn.Module | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    offload: bool = False,
    host_bytes: int | None = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Any,
) -> ChainedModule | JoinedModule:
    """Make a module that runs stages one after the other, or in branches that meet, and trains inside a memory budget.

    Nothing is captured: each stage is run and measured as it is, so any Python inside a stage is fine. The budget is
    that of `remat.optimize`; bytes of the device count parameters, buffers and the gradients of all parameters as
    fixed, and so does the prediction. On an accelerator they are those that the driver has to give: three steps by the
    plan are run, after which parameters, buffers, gradients and random state are as before, and where these reserve
    more, less is planned for. The plan is for inputs of the size of `x`: where sizes vary,
    `remat.optimize(…, mode="chain")` makes one for each.

    With a `head` the stages are two or more branches, lists of stages, and `x` has an input for each: the module
    computes `head(branch_1(x_1), …, branch_k(x_k))`. The optimal plan of the join of equal steps (RR-9273) gives
    the order of the backward steps; with `method="join"` it is also the plan, otherwise the graph of the measured
    stages is asked for with that method, and the better of the two is taken.

    Args:
        stages: modules that take and give one tensor; with a head, two or more lists of such.
        x: what the first stage is given; with a head, one tensor for each branch.
        segments: in place of a budget, as for `torch.utils.checkpoint.checkpoint_sequential`: a plan of that many equal
            segments of which only the inputs are kept, for which no planner is asked.
        head: takes the results of the branches, one tensor each.
        optimizer, ema: as for `remat.optimize`.
        offload: whether values may move to the host and back; the link's bandwidth is measured.
        host_bytes: what the host may hold at most, or None without a limit.
        options, fields: those of `remat.SolveOptions` that concern the plan.

    Raises:
        CaptureError: a stage gives something other than one tensor, or overwrites its input; fewer than two branches,
            or an empty one.
        BudgetTooSmall, NothingFound: there is no plan; the message says what is enough.
        InvalidData: neither a budget of stages nor segments, or both; not a planner, or not an option; a head with
            what is for one chain alone; before anything runs.
        RanksDiffer: the ranks' branches or budgets are not equal.

    Example:
        >>> stages, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8, requires_grad=True)
        >>> optimize_chain(stages, x, segments=2)(x).sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    asking = solve_options(optimize_chain, PlanFields, options, fields)
    if (budget is None) == (segments is None):
        raise InvalidData("optimize_chain takes a budget, or a number of segments in place of it")
    if budget is None and (asking != DEFAULT or planner is not None or head is not None):
        raise InvalidData("segments are those of one chain, and no planner is asked: options go with a budget")
    if head is not None and (offload or host_bytes is not None or on_progress is not None):
        raise InvalidData("offload, host_bytes and on_progress are for one chain: branches move nothing to the host")
    modules = list(stages)
    if not modules and head is None:
        raise CaptureError("there is no stage to train")
    if segments is not None:
        chain, needs_grad = chain_of(modules, x)
        plan = segments_plan(chain.stages, segments)
        verify(Problem(chain, 2**53), plan)
        return ChainedModule(modules, chain, plan, needs_grad=needs_grad)
    assert budget is not None
    size = stages_budget(budget, asking.slack)
    asked = StagesAsked(size, planner_of(planner, asking), asking, optimizer, ema, offload, host_bytes)
    check_optimizer(optimizer)
    if head is not None:
        return plan_join(modules, head, x, asked)
    return plan_chain(modules, x, asked, on_progress=on_progress)


def plan_chain(
    modules: Sequence[nn.Module],
    x: torch.Tensor,
    asked: StagesAsked,
    *,
    known: Sequence[ChainedModule] = (),
    on_progress: OnProgress | None = None,
) -> ChainedModule:
    """Measure and plan stages for one kind of input.

    Args:
        known: what the same stages run by for other inputs, the latest last. With any, or `wait=False`, no solver is
            waited for: stages start on a quick plan, and the planner's takes over.

    Raises:
        CaptureError, BudgetTooSmall, NothingFound: as `optimize_chain`.
    """
    planner, options, ranks = asked.planner, asked.options, asked.planner.coordinator
    link = ranks.costs({"link": [bandwidth(x.device)]})["link"][0] if asked.offload else None
    host_bytes = storable(x.device, asked.host_bytes) if asked.offload else None
    chain, needs_grad = chain_of(modules, x, link_bytes_per_s=link, host_bytes=host_bytes, coordinator=ranks)
    room = StagesRoom(modules, [x], asked)
    others = [(made.chain, made.answer) for made in known if made.answer is not None]
    at_once = bool(known) or not options.wait

    def ask(problem: Problem) -> Answer:
        if not at_once:
            return plan_or_raise(planner.plan(problem, options, on_progress=on_progress))
        return plan_or_raise(ranks.answer(problem, lambda: quick_answer(problem, planner.asked, options, others)))

    def over(problem: Problem, answer: Answer) -> int:
        return room.over(lambda: room.reserved(carry_out_chain(modules, problem, answer, needs_grad)))

    problem, answer = room.settled(room.problem(chain), ask, over)
    made = carry_out_chain(modules, problem, answer, needs_grad)
    made.reserved_bytes = room.seen
    if at_once and (answer.gap or 0) > options.max_gap:

        def verified(answer: Answer) -> Answer:
            carry_out_chain(modules, problem, answer, needs_grad)
            return answer

        made.better = improved(problem, planner, options, answer, verified, on_progress)
        if room.budget is not None:
            made.reserves = lambda better: None if over(problem, better) else room.seen
    return made


def carry_out_chain(
    modules: Sequence[nn.Module], problem: Problem, answer: Answer, needs_grad: frozenset[int] = frozenset()
) -> ChainedModule:
    """Stages with an answer's plan, verified.

    Raises:
        InvalidPlan: the plan is not one of this chain, or not what the answer claims.
    """
    if not isinstance(answer.plan, ChainPlan) or not isinstance(problem.subject, Chain):
        raise InvalidPlan(f"a list of stages needs a plan of its chain, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    return ChainedModule(modules, problem.subject, answer.plan, answer, needs_grad)


def segments_plan(stages: int, segments: int) -> ChainPlan:
    """Equal segments of which only the inputs are kept, the last one with its tapes (torch's checkpoint_sequential)."""
    count = max(1, min(segments, stages))
    size = stages // count
    starts = [1 + i * size for i in range(count)]
    ends = [*(s - 1 for s in starts[1:]), stages]
    steps: list[ChainStep] = []
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        steps += [ChainStep(Verb.F_CK if s == start else Verb.F_NONE, s) for s in range(start, end + 1)]
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        steps += [ChainStep(Verb.F_ALL, s) for s in range(start, end + 1)]
        steps += [ChainStep(Verb.B, s) for s in range(end, start - 1, -1)]
    return ChainPlan(tuple(steps))
