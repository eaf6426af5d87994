"""What checkpoints around a model's blocks come to, as plans of its captured step: the peers of a planned step.

A block is the outermost module of a list in an op's path, such as `h.3` in `transformer.h.3.mlp`. Neither keeps to a
budget: a peak is what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from remat_ir import Graph, InvalidData, Plan, permitted, pinned_ops, plan_of, without_unread

SAVED = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))
"""What selective checkpoints keep, with everything that has attention in its name."""


def per_block(graph: Graph) -> Plan:
    """All of a block runs again when the backward pass comes to it, as with `torch.utils.checkpoint` around each.

    Example:
        >>> from remat_ir import graph_of
        >>> from dataclasses import replace
        >>> names = ("h.0:mm", "h.0:tanh", "h.1:mm", "turn", "h.1:mm", "h.0:mm")
        >>> graph = graph_of([1] * 6, [8] * 6, [[], [0], [1], [2], [3, 2, 1], [4, 1, 0]])
        >>> plan = per_block(replace(graph, backward_from=3, op_names=names))
        >>> [step.op for step in plan.steps if hasattr(step, "op")]
        [0, 1, 2, 3, 2, 4, 0, 1, 5]

    Raises:
        InvalidData: the graph has no names of modules, no backward pass, or no block.
    """
    return _checkpointed(graph, lambda _: True)


def selective(graph: Graph) -> Plan:
    """The same, but what products, convolutions and attention return is kept.

    Raises:
        InvalidData: as `per_block`.
    """
    return _checkpointed(graph, lambda operators: not any(o in SAVED or "attention" in o for o in operators))


def by_regions(graph: Graph, regions: Sequence[int | None]) -> Plan:
    """What checkpoints around given ops come to: all of a region runs again when the backward pass reads any of it.

    Args:
        regions: [ops] which region each op of the forward pass is in.

    Raises:
        InvalidData: the graph has no backward pass.
    """
    if graph.backward_from is None:
        raise InvalidData("checkpoints need a backward pass")
    turn, pinned = graph.backward_from, pinned_ops(graph)
    rerun: dict[int, list[int]] = {}
    for op, region in enumerate(regions[:turn]):
        if region is not None and op not in pinned:
            rerun.setdefault(region, []).append(op)
    given = {
        graph.value_op[value]
        for op in range(turn)
        for value in graph.op_inputs[op]
        if regions[op] != regions[graph.value_op[value]]
    }
    waiting = {op: region for region, ops in rerun.items() for op in ops if op not in given}
    sequence = list(range(turn))
    for op in range(turn, graph.ops):
        for value in graph.op_inputs[op]:
            region = waiting.get(graph.value_op[value])
            if region is not None:
                sequence += [again for again in rerun[region] if again not in given]
                waiting = {other: its for other, its in waiting.items() if its != region}
        sequence.append(op)
    return plan_of(graph, without_unread(graph, tuple(permitted(graph, sequence))))


def _checkpointed(graph: Graph, again: Callable[[list[str]], bool]) -> Plan:
    if graph.op_names is None or graph.backward_from is None:
        raise InvalidData("checkpoints need the names of modules and a backward pass: capture the model with its names")
    block = [_block(name) for name in graph.op_names]
    pinned = pinned_ops(graph)
    turn = graph.backward_from
    rerun: dict[str, list[int]] = {}
    for op in range(turn):
        if block[op] and op not in pinned and again(graph.op_names[op].rpartition(":")[2].split("+")):
            rerun.setdefault(block[op], []).append(op)
    if not rerun:
        raise InvalidData("there is no block: no op's module is in a list of modules")
    waiting = {op: name for name, ops in rerun.items() for op in ops}
    sequence = list(range(turn))
    for op in range(turn, graph.ops):
        for value in graph.op_inputs[op]:
            name = waiting.get(graph.value_op[value])
            # a block's output is the next one's input, and there from the forward pass
            if name is not None and name == block[op]:
                sequence += rerun[name]
                waiting = {other: its for other, its in waiting.items() if its != name}
        sequence.append(op)
    return plan_of(graph, without_unread(graph, tuple(permitted(graph, sequence))))


def _block(name: str) -> str:
    found = re.match(r"(.*?\.\d+|\d+)[.:]", name)
    return found[1] if found else ""
