"""The memory of a plan kernel by kernel: finer than the verifier's view, where an op is a group of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import fx

from remat_ir import Compute, Drop, Free, Offload, Plan, Prefetch

from .. import _compat
from ..capture.dataflow import is_check, is_random, stateless
from ..capture.operations import CPU_GENERATOR_BYTES, Kind, Op, Operations
from ..planning.profiles import Profile


@dataclass(frozen=True, eq=False)
class _Run:
    """One kernel as a plan runs it, or one op that is none: what it reads and makes; whether it runs unread, too."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    needed: bool
    workspace: int = 0
    kind: Kind = Kind.KERNELS


class Phases(NamedTuple):
    """Bytes above the fixed ones: the peak of each pass, and what is held from the forward to the backward pass.

    Where the backward pass is in halves, `backward_bytes` is the peak of the first one and `weight_bytes` of the second
    one, and `between_bytes` is what is held between them, without the gradients of the inputs.
    """

    forward_bytes: int
    held_bytes: int
    backward_bytes: int
    between_bytes: int = 0
    weight_bytes: int = 0


def kernel_peak(step: Operations, plan: Plan, measured: Mapping[fx.Node, Profile]) -> int:
    """The peak of a plan in bytes above the fixed ones, as its lowered graphs reach it.

    Each storage is dropped after the last kernel that reads it; what nothing reads is not run; a copy of an overwritten
    input or of a generator's state is made only where a later recomputation needs it.
    """
    found = kernel_phases(step, plan, measured)
    given = sum(step.sizes[storage] for storage in step.given)
    return max(found.forward_bytes, found.backward_bytes, found.weight_bytes + given)


def kernel_phases(step: Operations, plan: Plan, measured: Mapping[fx.Node, Profile]) -> Phases:
    """The peaks of the two passes and what is held between them, as the lowered graphs reach them."""

    def size(instances: Iterable[Instance]) -> int:
        return sum(step.sizes[storage] for storage, _ in instances)

    now = worst = forward = held = backward = between = 0
    for moment in moments(step, plan, measured):
        now += size(moment.makes)
        if moment.kind is Kind.TURN:
            forward, worst = worst, 0
        worst = max(worst, now + moment.workspace)
        now -= size(moment.frees)
        if moment.kind is Kind.TURN:
            held = now - size(set(moment.makes) - set(moment.frees))
        elif moment.kind is Kind.HALFWAY:
            now -= sum(step.sizes[storage] for storage in step.given)
            backward, worst, between = worst, now, now
    if step.halfway is None:
        return Phases(forward, held, worst)
    return Phases(forward, held, backward, between, worst)


Instance: TypeAlias = tuple[int, int]
"""A storage, and the position of the run that makes it: one that is made again is another block of memory."""


class Moment(NamedTuple):
    """What one kernel, or one op that is none, allocates and frees, in that order; the workspace is in between."""

    makes: tuple[Instance, ...]
    workspace: int
    frees: tuple[Instance, ...]
    kind: Kind


def moments(step: Operations, plan: Plan, measured: Mapping[fx.Node, Profile]) -> list[Moment]:
    """A plan as its lowered graphs allocate and free; what the step returns is never freed."""
    runs = _runs(step, plan, measured)
    live, last = _liveness(runs, step.keep)
    dying: dict[int, list[Instance]] = {}
    for instance, position in last.items():
        if instance[0] >= 0:
            dying.setdefault(position, []).append(instance)
    copied = step.flow.storages(step.flow.mutated.values())
    found = []
    for position in live:
        run, frees = runs[position], tuple(dying.get(position, ()))
        if run.kind is Kind.TURN:  # new values of inputs are copied there, and gone, when the forward pass returns
            found.append(Moment((), 0, tuple(i for i in frees if i[0] in copied), Kind.KERNELS))
            frees = tuple(i for i in frees if i[0] not in copied)
        makes = tuple((storage, position) for storage in run.makes if storage >= 0)
        found.append(Moment(makes, run.workspace, frees, run.kind))
    return found


def _liveness(runs: list[_Run], keep: frozenset[int]) -> tuple[list[int], dict[tuple[int, int], int]]:
    """The runs that are needed, and for each storage that one of them makes the last run that reads it."""
    maker: dict[int, int] = {}
    sources: list[list[tuple[int, int]]] = []
    for position, run in enumerate(runs):
        sources.append([(s, maker[s]) for s in run.reads if s in maker])
        maker.update(dict.fromkeys(run.makes, position))
    needed = {position for position, run in enumerate(runs) if run.needed}
    needed |= {maker[s] for s in keep if s in maker}
    last = {(s, maker[s]): len(runs) for s in keep if s in maker}
    for position in range(len(runs) - 1, -1, -1):
        if position not in needed:
            continue
        for storage in runs[position].makes:
            last.setdefault((storage, position), position)
        for storage, source in sources[position]:
            needed.add(source)
            last[storage, source] = max(position, last.get((storage, source), -1))
    return sorted(needed), {key: position for key, position in last.items() if key[1] in needed}


def _runs(step: Operations, plan: Plan, measured: Mapping[fx.Node, Profile]) -> list[_Run]:
    """What a plan runs. A copy on the host of storage s is a storage ~s of its own, which the device does not hold: a
    copy out is needed if the copy back is, and that if it is read."""
    storages = [storage for op in step.ops for storage in op.makes]
    found: list[_Run] = []
    seen: set[int] = set()
    leaving: set[int] = set()
    for part in plan.steps:
        if isinstance(part, Compute):
            op, again = step.ops[part.op], part.op in seen
            seen.add(part.op)
            if op.kind is Kind.KERNELS:
                late = step.turn in seen
                found += [_kernel(step, op, node, again, late, measured[node]) for node in op.nodes]
            elif op.kind is not Kind.BEFORE_UPDATE:
                needed = op.kind in (Kind.TURN, Kind.ACCUMULATE, Kind.UPDATE, Kind.HALFWAY)
                found.append(_Run(op.reads, op.makes, needed, step.takes(op), op.kind))
        elif not isinstance(part, Free | Drop):
            storage = storages[part.value]
            if isinstance(part, Offload):
                leaving.add(storage)
                found.append(_Run((storage,), (~storage,), False))
            elif isinstance(part, Prefetch):
                found.append(_Run((~storage,), (storage,), False))
            elif storage in leaving:
                leaving.remove(storage)
                found.append(_Run((storage, ~storage), (~storage,), False))
    return found


def _kernel(step: Operations, op: Op, node: fx.Node, again: bool, late: bool, measured: Profile) -> _Run:
    flow = step.flow
    ported = frozenset(op.reads) | {s for n in op.nodes for s in flow.makes[n]}
    reads = [s for s in flow.reads[node] if s in ported]
    if late:
        originals = step.originals.items()
        reads += [s for p, s in originals if s in op.reads and set(flow.storages_of[p]) & set(flow.reads[node])]
    workspace = measured.workspace_bytes
    if node in step.states and again:
        reads.append(step.states[node])
        workspace += CPU_GENERATOR_BYTES  # the present state, put back afterwards
    makes = flow.makes[node]
    if node.target is _compat.BATCH_NORM:  # it copies the old statistics first, whose new values come last
        makes = makes[:3] if again and late and stateless(node) else makes[3:] + makes[:3]
    runs_unread = is_check(node) or (is_random(node) and not again)
    return _Run(tuple(reads), makes, runs_unread, workspace)
