"""A plan whose generated code fits the budget: its memory replayed, and replanned where that is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from remat_ir import Answer, Compute, Graph, Plan, Problem, readable, replay, verify

from ... import _compat
from ..._compat import inductor
from ...capture.dataflow import is_unknown, results_of, value_bytes
from ...capture.operations import Operations, custom_name
from ...errors import CaptureError, NothingFound
from ...lowering.lower import lower
from ...planning.planner import plan_or_raise
from ...planning.profiles import ProfileTable
from ...profiling.profile import profile_kernels, signature
from .joint import Joint, with_updates
from .regions import REGION

log = logging.getLogger("remat")


TRIES, MOST_TRIES = 5, 12
"""How many plans are asked for at most, and at most while the code of none fits."""

MOST_STEPS = 2.0
"""Computations for each op beyond which a plan is not lowered: Inductor compiles such plans for minutes."""

WORTH_A_TRY = 0.05
"""The share of the budget beyond the fixed bytes that has to be left over before a larger plan is tried."""


@dataclass(frozen=True, eq=False)
class Carried:
    """One training graph that was planned and compiled.

    Attributes:
        graph: the graph of regions that was planned; the code of earlier plans may have added to its workspaces.
        budget_bytes: what the step has to keep to.
        answer: the planner's answer, verified on `graph` for the planning budget that it carries.
        predicted_bytes: the peak of the code that Inductor generates for the plan, fixed bytes included.
        estimate_bytes: Inductor's own estimates for the two graphs, which know neither workspaces nor what else lives.
        tries: the planning budgets that were tried, in order, with the peak that each came to; None where there was
            no plan, or one that was not lowered.
        kernels, other_kernels: how many kernels Inductor generates for the plan, and how many of them it does not
            generate without one.
        compiled: what Inductor then generated when it compiled the backward graph (True) and the forward graph (False).
    """

    graph: Graph
    budget_bytes: int
    answer: Answer
    predicted_bytes: int
    estimate_bytes: tuple[int, int]
    tries: tuple[tuple[int, int | None], ...]
    forward: fx.GraphModule = field(repr=False)
    backward: fx.GraphModule = field(repr=False)
    kernels: int = 0
    other_kernels: int = 0
    compiled: dict[bool, inductor.Generated] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        """Whether the step is plain Inductor's bit for bit, since all its kernels are; else it may differ by rounding.

        Kernels that fuse other operators may add up in another order.
        """
        return not self.other_kernels

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.graph.fixed_bytes


@dataclass(eq=False)
class Search:
    """The search for a plan that, as Inductor runs it, fits the budget.

    Inductor's fusion holds some tensors longer than the plan, and never makes others; what its generated code allocates
    decides. Where a plan's code exceeds the budget, what it holds there beyond the plan becomes a workspace, and the
    planner is asked again: for a plan of a smaller budget where that leaves none, of a larger one where there is room.
    Ranks that train in step go by the highest of what they find, so that all of them ask the same.
    """

    joint: Joint
    step: Operations
    graph: Graph
    results: int
    budget: int
    ask: Callable[[Problem], Answer]
    table: ProfileTable | None
    agreed: Callable[[Sequence[int]], list[int]]
    plain: frozenset[str]
    functional: Collection[str] = ()
    tries: list[tuple[int, int | None]] = field(default_factory=list)
    best: Carried | None = None
    workspaces: dict[str, int] = field(default_factory=dict)
    fits: int = 0
    over: tuple[int, int] | None = None
    beyond: list[int] = field(default_factory=list)
    halved: bool = False

    def run(self) -> Carried:
        """The cheapest plan found that fits.

        Raises:
            BudgetTooSmall, NothingFound: there is none; the message says what is enough.
        """
        self._forget()
        planning: int | None = self.budget
        while planning is not None and len(self.tries) < (TRIES if self.best else MOST_TRIES):
            problem = Problem(self._charged(), planning)
            answer = self.ask(problem)
            peak, kernels = self._try(problem, answer)
            self.tries.append((planning, peak))
            needs = "none to lower" if peak is None else f"its code needs {readable(peak)}"
            log.info("plan %d for %s: %s", len(self.tries), readable(planning), needs)
            planning = self._next(planning, answer, peak, kernels)
        if self.best is not None:
            log.info("planned under Inductor: %s", _told(self.best, self.tries))
            return replace(self.best, tries=tuple(self.tries))
        peaks = [peak for _, peak in self.tries if peak is not None]
        if not peaks:
            plan_or_raise(answer)
        over = f"the smallest of {len(self.tries)} plans needs {readable(min(peaks))}" if peaks else "its plans thrash"
        raise NothingFound(
            f"No plan's generated code fits {readable(self.budget)}: {over}; raise the budget, or use inner='eager'",
            answer,
        )

    def _try(self, problem: Problem, answer: Answer) -> tuple[int | None, list[Kernel]]:
        """The peak of the code generated for an answer's plan, and its kernels; None without a plan worth lowering."""
        if answer.plan is None:
            return None, []
        if not isinstance(answer.plan, Plan):
            raise CaptureError(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        computes = sum(isinstance(s, Compute) for s in answer.plan.steps)
        if computes > MOST_STEPS * len(self.step.ops):
            log.info(
                "a plan of %d steps for %d ops is not lowered: Inductor would compile it for minutes",
                computes,
                len(self.step.ops),
            )
            return None, []
        forward, backward = with_updates(self.joint, lower(self.step, answer.plan))
        first, second = inductor.dry_run(forward, backward, self.results)
        saved = len(results_of(forward.graph)) - self.results
        inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
        tangents = [value_bytes(n) for n in inputs[saved:]]
        above, kernels = step_memory(first, second, tangents, self.results, self._workspace)
        (peak,) = self.agreed([self.graph.fixed_bytes + above])
        sources = first.kernels | second.kernels
        carried = Carried(
            problem.graph,
            self.budget,
            answer,
            peak,
            (first.estimate_bytes, second.estimate_bytes),
            (),
            forward,
            backward,
            len(sources),
            len(sources - self.plain),
        )
        if peak <= self.budget and (self.best is None or (answer.cost_ns or 0) < (self.best.answer.cost_ns or 0)):
            self.best = carried
        return peak, kernels

    def _charged(self) -> Graph:
        """The graph with what generated code was found to hold beyond the plan, as workspaces."""
        own = self.graph.op_workspace_bytes
        return replace(self.graph, op_workspace_bytes=tuple(map(sum, zip(own, self.beyond, strict=True))))

    def _forget(self) -> None:
        self.beyond, self.halved = [0] * self.graph.ops, False

    def _charge(self, kernels: Sequence[Kernel], plan: Plan, planning: int) -> bool:
        """Charge the busiest region of each kernel over the budget with what is too much there; False: nothing new."""
        planned: dict[tuple[bool, int], int] = {}
        late = False
        for moment in replay(self.graph, plan):
            late |= moment.op == self.step.turn
            if moment.op is not None:
                planned[late, moment.op] = max(planned.get((late, moment.op), 0), moment.peak_bytes)
        beyond = list(self.beyond)
        for kernel in kernels:
            excess = self.graph.fixed_bytes + kernel.peak_bytes - self.budget
            known = [(planned[kernel.backward, r], r) for r in kernel.regions if (kernel.backward, r) in planned]
            if excess > 0 and known:
                most, region = max(known)
                beyond[region] = max(beyond[region], planning + excess - most)
        before, self.beyond = self.beyond, self.agreed(beyond)
        return self.beyond != before

    def _next(self, planning: int, answer: Answer, peak: int | None, kernels: Sequence[Kernel]) -> int | None:
        """The planning budget to try next, or None."""
        if peak is None and self.over is not None and any(self.beyond):  # more than any plan can spare
            if not self.halved:
                self.beyond, self.halved = [charge // 2 for charge in self.beyond], True
                return planning
            self._forget()
            return self._smaller(*self.over)
        if peak is None:
            # regions count more than fused code needs: what is infeasible for them may still fit
            least = answer.least_budget_bytes if answer.plan is None else None
            return least if least not in {tried for tried, _ in self.tries} else None
        reached = min(planning, answer.peak_bytes or planning)
        if peak > self.budget:
            if not any(self.beyond):
                self.over = reached, peak
            assert isinstance(answer.plan, Plan)
            return planning if self._charge(kernels, answer.plan, planning) else self._smaller(reached, peak)
        self.fits = max(self.fits, reached)
        room = self.budget - peak
        better = self.best is not None and self.best.answer is answer
        if not better or not answer.overhead or room < WORTH_A_TRY * (self.budget - self.graph.fixed_bytes):
            return None
        return max(planning, reached) + room

    def _smaller(self, reached: int, peak: int) -> int:
        wanted = reached - (peak - self.budget)
        return wanted if wanted > self.fits else (self.fits + reached) // 2

    def _workspace(self, node: fx.Node) -> int:
        """Bytes that a kernel needs while it runs in the generated code, in its layouts there.

        0 for a custom operator, which is not run to be measured.
        """
        if is_unknown(node) and custom_name(node) not in self.functional:
            return 0
        key = signature(node)
        if key not in self.workspaces:
            with _compat.only_real_tensors():
                found = profile_kernels([node], self.table, functional=self.functional).kernels
                self.workspaces[key] = found[node].workspace_bytes
        return self.workspaces[key]


def _told(carried: Carried, tries: list[tuple[int, int | None]]) -> str:
    if carried.exact:
        equality = "equal bit for bit to plain Inductor, which generates the same kernels"
    else:
        other = f"{carried.other_kernels} of {carried.kernels} generated kernels are not plain Inductor's"
        equality = f"equal to plain Inductor up to rounding: {other}"
    return (
        f"{readable(carried.predicted_bytes)} predicted within {readable(carried.budget_bytes)}, overhead "
        f"{carried.answer.overhead:.1%}, {len(tries)} plans tried; {equality}"
    )


SCALAR_BYTES = 8

Workspace = Callable[[fx.Node], int]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the generated code.

    Attributes:
        backward: whether it is in the backward pass.
        regions: what runs in it.
        peak_bytes: the memory while it runs, above the parameters, buffers and inputs.
    """

    backward: bool
    regions: frozenset[int]
    peak_bytes: int


class _Memory:
    """Bytes by names: storage lives while a name or the caller holds it."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.sizes: list[int] = []
        self.holders: list[int] = []
        self.of: dict[str, int] = {}
        self.items: dict[str, list[str]] = {}
        self.now = self.worst = 0
        self.kernels: list[Kernel] = []

    def alloc(self, name: str, size: int) -> None:
        self.of[name] = len(self.sizes)
        self.sizes.append(size)
        self.holders.append(1)
        self.now += size
        self.worst = max(self.worst, self.now)

    def hold(self, storage: int) -> None:
        self.holders[storage] += 1

    def let_go(self, storage: int) -> None:
        self.holders[storage] -= 1
        if self.holders[storage] == 0:
            self.now -= self.sizes[storage]

    def name(self, name: str, storage: int) -> None:
        self.free(name)
        self.of[name] = storage
        self.hold(storage)

    def free(self, name: str) -> None:
        for item in self.items.pop(name, ()):
            self.free(item)
        if name in self.of:
            self.let_go(self.of.pop(name))

    def play(self, generated: inductor.Generated, backward: bool) -> None:
        for event in generated.events:
            work = 0
            if event.kind == "alloc":
                self.alloc(event.name, event.size)
                if event.source:
                    self.items.setdefault(event.source, []).append(event.name)
            elif event.kind == "alias" and event.source in self.of:
                self.name(event.name, self.of[event.source])
            elif event.kind == "free":
                self.free(event.name)
            elif event.kind == "call" and event.node is not None:
                work = self.workspace(event.node)
                self.worst = max(self.worst, self.now + work)
            if regions := frozenset(node.meta[REGION] for node in event.origins if REGION in node.meta):
                self.kernels.append(Kernel(backward, regions, self.now + work))

    def leave(self, generated: inductor.Generated) -> list[int | None]:
        """The generated code returns: only its results stay. Returns the storage of each result."""
        found = [self.of.get(name) if name is not None else None for name in generated.outputs]
        for storage in found:
            if storage is not None:
                self.hold(storage)
        for name in list(self.of):
            self.free(name)
        return found


def step_memory(
    forward: inductor.Generated, backward: inductor.Generated, tangents: Sequence[int], results: int, work: Workspace
) -> tuple[int, list[Kernel]]:
    """The peak in bytes above the parameters, buffers and inputs, and the kernels that allocate, in order.

    Args:
        forward, backward: what Inductor generates for the two passes.
        tangents: [incoming gradients] bytes; they come after the saved tensors among the backward pass's inputs.
        results: how many of the forward pass's outputs are the caller's.
        work: the bytes that a kernel of torch's own needs while it runs, beyond inputs and outputs.
    """
    memory = _Memory(work)
    memory.play(forward, backward=False)
    saved = memory.leave(forward)[results:]
    for name, storage in zip(backward.inputs, saved, strict=False):
        if storage is not None:
            memory.of[name] = storage  # the hold of the forward pass's result becomes the name's
    for name, size in zip(backward.inputs[len(saved) :], tangents, strict=False):
        memory.alloc(name, size)
        if size <= SCALAR_BYTES:
            memory.hold(memory.of[name])  # a loss's own gradient, which backward() holds to its end
    memory.play(backward, backward=True)
    return memory.worst, memory.kernels
