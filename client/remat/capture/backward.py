"""The backward pass of a step, changed: parameters are updated inside of it, or it runs in two halves.

A gradient is used up where it is complete, by an update of its parameter. A parameter that has been updated must not be
read again, or what is computed from it is silently another step's. So each parameter as it was before its update is a
value of no bytes: every op that reads the parameter reads that value, and the update consumes it, as it consumes the
gradient.

In halves, as zero-bubble schedules run it, a backward pass begins with what the gradients of the inputs need (Qi et
al., Zero Bubble Pipeline Parallelism, ICLR 2024): the gradient of a stage's input is what another stage waits for; the
gradients of its parameters may come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from .dataflow import Dataflow, is_check, is_random, is_unknown
from .operations import Kind, Op, Operations, copying_bytes, same_layout


def with_updates(step: Operations, workspace: Mapping[fx.Node, int], together: bool = False) -> Operations:
    """The step with an update of each parameter whose gradient can be used up.

    Args:
        workspace: by the parameters' placeholders, the bytes that their updates take while they run.
        together: all gradients of these parameters, or none.
    """
    flow = step.flow
    results = dict(zip(flow.primals, flow.backward_results, strict=False))
    chosen = {p: results[p] for p in workspace if _can_be_released(flow, p, results.get(p))}
    kept = sum(isinstance(results.get(p), fx.Node) for p in workspace) - len(chosen)
    if not chosen or (together and kept):
        return step
    gone = {op.makes[0] for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in chosen.values()}
    ops = [op for op in step.ops if op.kind is not Kind.ACCUMULATE or op.makes[0] not in gone]
    left = flow.storages(r for r in flow.backward_results if isinstance(r, fx.Node) and r not in chosen.values())
    keep = step.keep - gone - flow.storages(chosen.values()) | (left & step.keep)
    updates: dict[int, list[Op]] = {}
    before: dict[int, list[int]] = {}  # op → the parameters as they were before, which it is the first to read
    sizes, taken = list(step.sizes), dict[fx.Node, int]()
    for primal, result in chosen.items():
        own = flow.storages([result])
        readers = _readers(flow, ops, primal)
        alone = not own & left and sum(bool(own & set(op.reads)) for op in ops) == 0
        alone = alone and sum(bool(own & flow.storages([r])) for r in chosen.values()) == 1
        copied = not alone or not same_layout(result.meta["val"], primal.meta["val"])
        value = result.meta["val"]
        beside = max(workspace[primal], copying_bytes(value, primal.meta["val"])) if copied else workspace[primal]
        taken[primal] = beside + (value.numel() * value.element_size() if copied else 0)
        consumed = sorted(own) if alone else []
        if readers:
            consumed.append(len(sizes))
            before.setdefault(readers[0], []).append(len(sizes))
            sizes.append(0)
            for reader in readers:
                ops[reader] = replace(ops[reader], reads=(*ops[reader].reads, consumed[-1]))
        update = Op(Kind.UPDATE, (primal,), tuple(sorted({*own, *consumed})), consumes=tuple(consumed))
        updates.setdefault(max([_last_makers(ops, own), *readers[-1:]]), []).append(update)
    placed: list[Op] = []
    for at, op in enumerate(ops):
        placed += [Op(Kind.BEFORE_UPDATE, (), (), tuple(before[at]))] if at in before else []
        placed += [op, *updates.get(at, ())]
    return replace(step, ops=tuple(placed), sizes=tuple(sizes), keep=frozenset(keep), updates=taken)


def _can_be_released(flow: Dataflow, primal: fx.Node, result: object) -> bool:
    """Whether a gradient is made by the backward pass, for one parameter alone, which the step itself leaves alone."""
    if not isinstance(result, fx.Node) or not isinstance(result.meta.get("val"), torch.Tensor):
        return False
    if primal in flow.mutated or sum(r is result for r in flow.backward_results) > 1:
        return False
    if flow.storages(flow.forward_results) & flow.storages([primal]):
        return False
    late = frozenset(flow.kernels[flow.forward_kernels :])
    own = flow.storages([result])
    return bool(own) and all(flow.owner[s] in late for s in own)


def _last_makers(ops: Sequence[Op], storages: set[int]) -> int:
    return max(index for index, op in enumerate(ops) if storages & set(op.makes))


def _readers(flow: Dataflow, ops: Sequence[Op], primal: fx.Node) -> list[int]:
    """The ops that read a parameter, ascending."""
    own = flow.storages([primal])
    return [i for i, op in enumerate(ops) if any(own & set(flow.reads[n]) for n in op.nodes if n in flow.reads)]


def in_halves(step: Operations, early: Sequence[int]) -> Operations:
    """The step with an op HALFWAY in its backward pass, before which is all that some of its results need.

    What draws random numbers, raises, or runs once comes before it too, so that its order stays. Kernels and their
    results are the same ones.

    Args:
        early: positions in the backward results, those of the inputs; the others are complete at the end.
    """
    flow, after = step.flow, step.turn + 1
    results = [r for r in (flow.backward_results[i] for i in early) if isinstance(r, fx.Node)]
    own = flow.storages(results)
    copies = {s for op in step.ops if op.kind is Kind.ACCUMULATE and op.nodes[0] in results for s in op.makes}
    wanted = own | copies
    first: list[Op] = []
    second: list[Op] = []
    for op in reversed(step.ops[after:]):
        fixed = any(node in step.once or is_random(node) or is_check(node) or is_unknown(node) for node in op.nodes)
        if fixed or wanted & set(op.makes):
            wanted.update(op.reads)
            first.append(op)
        else:
            second.append(op)
    head = (*step.ops[:after], *reversed(first))
    made = {s for op in head for s in op.makes}
    cut = Op(Kind.HALFWAY, (), tuple(sorted((own | copies) & made)))
    given = frozenset((own | copies) & step.keep & made)
    return replace(step, ops=(*head, cut, *reversed(second)), early=tuple(sorted(early)), given=given)
