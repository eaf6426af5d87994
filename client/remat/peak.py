"""The memory of a plan kernel by kernel: finer than the judge's view, where an op is a group of kernels."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from remat_ir import Compute, Plan

from .operations import Kind, Measured, Op, Operations


def kernel_peak(step: Operations, plan: Plan, measured: Mapping[fx.Node, Measured]) -> int:
    """The peak of a plan in bytes above the fixed ones, each storage dropped after the last kernel that reads it."""
    runs = list(_runs(step, plan))
    sizes = step.sizes
    last: dict[tuple[int, int], int] = {}  # (storage, run that made it) → last run that reads it
    current: dict[int, int] = {}
    for position, (_, reads, makes) in enumerate(runs):
        for storage in reads:
            last[storage, current[storage]] = position
        for storage in makes:
            current[storage] = position
            last[storage, position] = position
    for storage in step.keep:
        last[storage, current[storage]] = len(runs)
    dying: dict[int, list[int]] = {}
    for (storage, _), position in last.items():
        dying.setdefault(position, []).append(storage)
    now = worst = 0
    for position, (node, _, makes) in enumerate(runs):
        now += sum(sizes[s] for s in makes)
        worst = max(worst, now + (measured[node].workspace_bytes if node is not None else 0))
        now -= sum(sizes[s] for s in dying.get(position, ()))
    return worst


def _runs(step: Operations, plan: Plan) -> list[tuple[fx.Node | None, tuple[int, ...], tuple[int, ...]]]:
    """Each kernel run of a plan: what runs, the storages that it reads, the storages that it makes."""
    found: list[tuple[fx.Node | None, tuple[int, ...], tuple[int, ...]]] = []
    for compute in plan.steps:
        if isinstance(compute, Compute):
            op = step.ops[compute.op]
            if op.kind is Kind.KERNELS:
                found += [_kernel(step, op, node) for node in op.nodes]
            else:
                found.append((None, op.reads, op.makes))
    return found


def _kernel(step: Operations, op: Op, node: fx.Node) -> tuple[fx.Node, tuple[int, ...], tuple[int, ...]]:
    flow = step.flow
    ported = frozenset(op.reads) | {s for n in op.nodes for s in flow.makes[n]}
    reads = [s for s in flow.reads[node] if s in ported]
    reads += [
        s for p, s in step.originals.items() if s in op.reads and set(flow.storages_of[p]) & set(flow.reads[node])
    ]
    if node in step.states:
        reads.append(step.states[node])
    return node, tuple(reads), flow.makes[node]
