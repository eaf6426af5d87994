"""Gradients that are used up where they are complete: by an update of their parameter inside the backward pass.

A parameter that has been updated must not be read again, or what is computed from it is silently another step's. So an
update stands behind every op that reads the parameter for the first time, and behind every op that computing one of
them again can lead to; a later recomputation of a reader serves nothing, and is never run. Ops of the backward pass run
once: else each gradient could lead to all that come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from .dataflow import Dataflow
from .operations import Kind, Op, Operations, same_layout


def with_updates(step: Operations, workspace: Mapping[fx.Node, int]) -> Operations:
    """The step with an update of each parameter whose gradient can be used up.

    Args:
        workspace: by the parameters' placeholders, the bytes that their updates take while they run.
    """
    flow = step.flow
    results = dict(zip(flow.primals, flow.backward_results, strict=False))
    chosen = {p: results[p] for p in workspace if _can_be_released(flow, p, results.get(p))}
    if not chosen:
        return step
    gone = {op.makes[0] for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in chosen.values()}
    ops = [op for op in step.ops if op.kind is not Kind.ACCUMULATE or op.makes[0] not in gone]
    returned = [r for r in flow.backward_results if isinstance(r, fx.Node) and r not in chosen.values()]
    left = {s for result in returned for s in _of(flow, result)}
    keep = step.keep - gone - {s for r in chosen.values() for s in _of(flow, r)} | (left & step.keep)
    places: dict[int, list[Op]] = {}
    taken: dict[fx.Node, int] = {}
    reach = _reach(ops, step.turn, keep)
    for primal, result in chosen.items():
        own = frozenset(_of(flow, result))
        at = max(_last_makers(ops, own), _last_reach(flow, ops, reach, primal))
        places.setdefault(at, []).append(Op(Kind.UPDATE, (primal,), tuple(sorted(own))))
        alone = not own & left and sum(bool(own & set(op.reads)) for op in ops) == 0
        alone = alone and sum(bool(own & set(_of(flow, r))) for r in chosen.values()) == 1
        copied = not alone or not same_layout(result.meta["val"], primal.meta["val"])
        value = result.meta["val"]
        taken[primal] = workspace[primal] + (value.numel() * value.element_size() if copied else 0)
    placed = [op for at, own in enumerate(ops) for op in (own, *places.get(at, ()))]
    return replace(step, ops=tuple(placed), keep=frozenset(keep), updates=taken)


def _of(flow: Dataflow, node: fx.Node) -> tuple[int, ...]:
    return flow.storages_of.get(node, ())


def _can_be_released(flow: Dataflow, primal: fx.Node, result: object) -> bool:
    """Whether a gradient is made by the backward pass, for one parameter alone, which the step itself leaves alone."""
    if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), torch.Tensor):
        return False
    if primal in flow.mutated or sum(r is result for r in flow.backward_results) > 1:
        return False
    returned = {s for r in flow.forward_results if isinstance(r, fx.Node) for s in _of(flow, r)}
    if returned & set(_of(flow, primal)):
        return False
    late = frozenset(flow.kernels[flow.forward_kernels :])
    return bool(_of(flow, result)) and all(flow.owner[s] in late for s in _of(flow, result))


def _reach(ops: Sequence[Op], turn: int, keep: frozenset[int] | set[int]) -> list[int]:
    """[ops] the last op whose first computation can depend on computing the op again; −1 where it runs once."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for storage in op.reads:
            users.setdefault(storage, []).append(index)
    found = [-1] * len(ops)
    for index in range(turn - 1, -1, -1):
        op = ops[index]
        if op.kind is Kind.KERNELS and not keep & set(op.makes):
            found[index] = max((max(u, found[u]) for s in op.makes for u in users.get(s, ())), default=-1)
    return found


def _last_makers(ops: Sequence[Op], storages: frozenset[int]) -> int:
    return max(index for index, op in enumerate(ops) if storages & set(op.makes))


def _last_reach(flow: Dataflow, ops: Sequence[Op], reach: Sequence[int], primal: fx.Node) -> int:
    """The last op that reads a parameter, or that computing a reader again can lead to."""
    own = frozenset(_of(flow, primal))
    readers = [i for i, op in enumerate(ops) if any(own & set(flow.reads[n]) for n in op.nodes if n in flow.reads)]
    return max((max(i, reach[i]) for i in readers), default=-1)
