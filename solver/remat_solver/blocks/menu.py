"""What a block may keep from its forward to its backward part, and what that costs: a few choices, found by search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from remat_ir import Graph, Problem
from remat_ir.greedy import greedy_plan
from remat_ir.working_set import working_set

from ..array_view import view_of
from ..search import Search
from ..trace import trace
from .block import Block

_LEVELS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
"""How much of what could be kept over the forward/backward boundary is, in most of the choices."""
_PEAKS = (0.0, 0.2, 0.5)
"""Where the peaks of the other choices lie between the least and that of keeping all."""
_MOVES_PER_OP, _MOST_MOVES = 200, 8192


@dataclass(frozen=True)
class Choice:
    """One way to run a block's two parts.

    Attributes:
        backward: the block's ops of the backward part in the order in which they run, recomputations included.
        extra_ns: the cost of these recomputations.
        tape_bytes: what stays between the parts, the joint included.
        forward_bytes, backward_bytes: the peaks of the parts besides what comes from earlier segments.
    """

    backward: tuple[int, ...]
    extra_ns: int
    tape_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Menu:
    """What a chain program must know of a block: its choices, and how it runs forward without a tape.

    `passing_bytes` is the peak of that, besides what comes from earlier segments, and `forward_ns` its cost.
    """

    choices: tuple[Choice, ...]
    passing_bytes: int
    forward_ns: int


def menu_of(block: Block, *, stopped: Callable[[], bool] = lambda: False) -> Menu:
    """The choices of a block: keep all, keep less and recompute in the backward part, with as much memory as is there
    or with less; none that another one beats in everything. Deterministic.
    """
    graph = block.graph
    plain = tuple(range(graph.ops))
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
        turned = _memory_at(graph, plain, block.turn)
        workspace = list(graph.op_workspace_bytes)
        workspace[block.turn] = max(0, peak - (turned - int((1.0 - share) * spare)))
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
    return Menu(tuple(_undominated(found)), _passing_bytes(block), sum(graph.op_cost_ns[: block.turn]))


def choice_of(block: Block, order: tuple[int, ...]) -> Choice:
    """The choice that runs the forward part once and the backward part as `order` does."""
    graph, turn = block.graph, block.turn
    at = order.index(turn)
    backward = order[at + 1 :]
    view = view_of(Problem(graph, 0))
    run = trace(view, (*range(turn + 1), *backward))
    after = run.instance_value[(run.made < turn) & (run.last > turn)]
    held = {int(v) for v in after if graph.value_op[v] != 0} | set(block.joint)
    return Choice(
        backward,
        sum(graph.op_cost_ns[op] for op in backward) - sum(graph.op_cost_ns[turn + 1 :]),
        sum(graph.value_bytes[v] for v in held),
        max((int(m) for m in run.memory[1 : turn + 1]), default=0) - block.outside_bytes,
        max((int(m) for m in run.memory[turn:]), default=0) - block.outside_bytes,
    )


def _memory_at(graph: Graph, order: tuple[int, ...], op: int) -> int:
    return int(trace(view_of(Problem(graph, 0)), order).memory[order.index(op)])


def _cheap(graph: Graph, budget: int, start: tuple[int, ...]) -> tuple[int, ...] | None:
    """A cheap sequence within the budget, from the greedy plan or from `start`, or None."""
    search = Search(graph, budget)
    plan = greedy_plan(graph, budget, tries=2)
    search.adopt(start if plan is None else plan.computes)
    moves = min(_MOST_MOVES, _MOVES_PER_OP * graph.ops)
    search.cycle(moves, 0.3, lambda: False)
    return search.sequence()


def _passing_bytes(block: Block) -> int:
    """The peak while the forward part runs and nothing but the joint stays."""
    graph = block.graph
    end = block.turn
    last = dict.fromkeys(block.joint, end)
    for op in range(1, end):
        for value in graph.op_inputs[op]:
            last[value] = max(last.get(value, 0), op)
    memory, peak = 0, 0
    dying: list[list[int]] = [[] for _ in range(end + 1)]
    for op in range(1, end):
        made = [v for v in graph.op_values[op] if v in last or v in graph.op_always[op]]
        memory += sum(graph.value_bytes[v] for v in made)
        peak = max(peak, memory + graph.op_workspace_bytes[op])
        for value in made:
            dying[last.get(value, op)].append(value)
        memory -= sum(graph.value_bytes[v] for v in dying[op])
    return peak


def _undominated(choices: set[Choice]) -> list[Choice]:
    def numbers(choice: Choice) -> tuple[int, int, int, int]:
        return choice.extra_ns, choice.tape_bytes, choice.backward_bytes, choice.forward_bytes

    ranked = sorted(choices, key=lambda choice: (numbers(choice), choice.backward))
    kept: list[Choice] = []
    for choice in ranked:
        if not any(all(a <= b for a, b in zip(numbers(other), numbers(choice), strict=True)) for other in kept):
            kept.append(choice)
    return kept
