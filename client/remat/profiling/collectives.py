"""What a collective costs, the same on all ranks: measured where they meet, by a fixed model where they do not."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from .. import _compat
from ..capture.dataflow import tensors
from ..capture.operations import Operations
from ..device import storage_bytes
from ..errors import CaptureError
from ..planning.profiles import Profile, ProfileTable
from .measure import seconds
from .timing import elements, operands, read_by, rounded


class Hop(NamedTuple):
    """What sending from rank to rank takes: ns of a message, and bytes in a microsecond."""

    latency_ns: int
    bytes_per_us: int


HOPS = {"cpu": Hop(25_000, 1_000)}
"""By kind of device: sockets between hosts' memories."""

ACCELERATORS = Hop(10_000, 50_000)

SMALL, LARGE = 2, 2**20
"""Elements of four bytes, of which all-reduces are timed; a mean of both is what a step's are like."""

SAMPLES = 5
"""Of which the least counts: what a rank waits for another one is not the link's."""


def collective_costs(nodes: Sequence[fx.Node], table: ProfileTable | None, device: str) -> dict[fx.Node, Profile]:
    """Time in ns of each collective of a step; all of them are seen to be the same ones in the same order on all ranks.

    Where all ranks of their groups meet at the table, an all-reduce of eight bytes and one of 4 MiB are timed for each
    size of group that the table does not know; latency and bandwidth of a link follow from both. Else a fixed model
    counts, since a collective that one rank launches to time it would pair with another one's training.

    Args:
        nodes: in the order of the captured step.
        device: under which the table holds what is measured.

    Raises:
        RanksDiffer: the ranks that meet run other collectives, or in another order.
    """
    groups = list(dict.fromkeys(filter(None, map(_compat.process_group, nodes))))
    found: dict[object, Hop] = {}
    members = [dist.get_process_group_ranks(group) for group in groups]
    if nodes and table is not None and table.meets(members, order(nodes)):
        for group in groups:
            where = next(_device(n) for n in nodes if _compat.process_group(n) is group)
            found[group] = _measured(group, where, table, device)
    return {node: modelled_collective(node, found.get(_compat.process_group(node))) for node in nodes}


def order(nodes: Sequence[fx.Node]) -> str:
    """A digest of collectives in their order: operators, shapes, types, and groups, by number and by size."""
    number: dict[object, int] = {}
    text = []
    for node in nodes:
        group = _compat.process_group(node)
        shapes = [[list(t.shape), str(t.dtype)] for t in operands(node)]
        named = zip(_compat.parameter_names(node.target), node.args, strict=False)  # type: ignore[arg-type]
        how = [str(a) for name, a in named if isinstance(a, (int, str)) and name not in _compat.GROUP_NAMES]
        text.append([str(node.target), shapes, how, number.setdefault(group, len(number)), _ranks(group)])
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()


def _measured(group: dist.ProcessGroup, device: torch.device, table: ProfileTable, kind: str) -> Hop:
    """The link between the ranks of a group, all of which are here."""
    ranks = _ranks(group)
    if ranks < 2:
        return HOPS.get(device.type, ACCELERATORS)
    signatures = hop_signatures(group, device)
    known = table.get(kind, sorted(signatures.values()))
    if len(known) < len(signatures):
        with _compat.only_real_tensors(), torch.no_grad():
            known = table.put(kind, {s: Profile(_timed(group, device, n), 0) for n, s in signatures.items()})
    small, large = (known[signatures[size]].cost_ns for size in (SMALL, LARGE))
    sent = 2 * (ranks - 1) * 4 * (LARGE - SMALL) // ranks
    return Hop(max(1, small // (2 * (ranks - 1))), max(1, sent * 1000 // max(1, large - small)))


def hop_signatures(group: dist.ProcessGroup, device: torch.device) -> dict[int, str]:
    """What a table calls the all-reduces that are timed among the ranks of a group, by their elements."""
    ranks = dist.get_process_group_ranks(group)
    span = max(ranks) - min(ranks) + 1  # the same for all groups of a dimension of a mesh, wherever they begin
    hosts = -(-span // int(os.environ.get("LOCAL_WORLD_SIZE", span)))
    text = f"all-reduce {dist.get_backend(group)} {device.type} {len(ranks)} ranks {hosts} hosts"
    return {n: hashlib.sha256(f"{text} {n}".encode()).hexdigest()[:32] for n in (SMALL, LARGE)}


def _timed(group: dist.ProcessGroup, device: torch.device, size: int) -> int:
    run = partial(dist.all_reduce, torch.zeros(size, device=device), group=group)
    took = [seconds(run, device, time.perf_counter_ns) for _ in range(SAMPLES + 1)]
    return rounded(min(took[1:]))


def modelled_collective(node: fx.Node, hop: Hop | None = None) -> Profile:
    """Time in ns and workspace in bytes of a collective among n ranks in a ring, each of which sends to the next.

    An all-gather, a reduce-scatter or an all-to-all takes n − 1 messages and (n − 1) / n of the whole, an all-reduce
    both twice, anything else the whole once (Thakur, Rabenseifner and Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, sections 4.1 to 4.4). A wait costs nothing of its own: that compute may
    hide a collective is not modelled. What the backend allocates for itself is not counted.
    """
    assert isinstance(node.target, _compat.OpOverload)
    name = _compat.operator_name(node.target)
    if "wait" in name:
        return Profile(1, 0)
    made = list(tensors(node.meta.get("val")))
    size = max(sum(map(storage_bytes, read_by(node))), sum(map(storage_bytes, made)))
    latency, rate = hop or HOPS.get(_device(node).type, ACCELERATORS)
    ranks = max(1, _ranks(_compat.process_group(node)))
    times = 2 if "reduce" in name and "scatter" not in name else 1
    whole = not any(word in name for word in ("reduce", "gather", "all_to_all"))
    sent = size if whole else times * size * (ranks - 1) // ranks
    return Profile(rounded(times * max(1, ranks - 1) * latency + sent * 1000 // rate), 0)


def with_collectives_once(
    step: Operations, kernels: Mapping[fx.Node, Profile], again: bool | None = None
) -> Operations:
    """The step with those collectives marked that no plan may run again.

    Args:
        again: whether any may; None: where it costs no more than the kernel of the step that is nearest in size.
    """
    others = [n for n in kernels if not _compat.is_collective(n.target)]

    def once(node: fx.Node) -> bool:
        if again is not None or not others:
            return not again
        size = elements(node)
        nearest = min(others, key=lambda other: (abs(elements(other) - size), other.name))
        return kernels[node].cost_ns > kernels[nearest].cost_ns

    found = {n for n in step.flow.kernels if _compat.is_collective(n.target) and n in kernels and once(n)}
    return replace(step, once=step.once | found)


def _device(node: fx.Node) -> torch.device:
    return next((t.device for t in (*tensors(node.meta.get("val")), *read_by(node))), torch.device("cpu"))


def _ranks(group: dist.ProcessGroup | None) -> int:
    """Of a group, or of the whole job; two where there is none: a step that is planned for another machine."""
    if not (dist.is_available() and dist.is_initialized()):
        return 2
    return dist.get_world_size(group)


def no_collectives(what: str) -> AbstractContextManager[object]:
    """While this holds in a job of several ranks, a collective is refused before it is launched; `what` is measured.

    Raises:
        CaptureError: by what runs inside.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return nullcontext() if alone else _NoCollectives(what)


class _NoCollectives(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A collective launched on one rank would pair with one of another rank's training."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _compat.is_collective(func):
            raise CaptureError(
                f"{self.what} calls the collective {func}, and is measured by running it: launched on one rank it "
                "would pair with another rank's training; use mode='graph', which models what collectives cost and "
                "does not run what hides them in an operator, unless functional_ops names it"
            )
        if not _compat.is_known(func):
            return _compat.run_watched(func, args, kwargs or {}, self)
        return func(*args, **(kwargs or {}))
