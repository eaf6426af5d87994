"""What the link of a device to its host carries, measured: each way alone, and both at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from remat_ir import Link

from ..device import of
from ..planning.budget import bytes_of
from ..planning.coordinator import Coordinator
from ..planning.options import SolveOptions
from ..planning.transfers import read_link
from ..profiling.timing import rounded
from .link import link_of, storable

SIZES = (2**20, 2**24, 2**26)
REPETITIONS = 4


class LinkFigures(NamedTuple):
    """Bytes a second each way, alone and while the other way is at work too, and ns that the smallest copy takes."""

    out: int
    back: int
    out_together: int
    back_together: int
    latency_ns: int

    def link(self) -> Link:
        """The link for a plan, whose copies run both ways at once: the slower of both figures each way."""
        out, back = min(self.out, self.out_together), min(self.back, self.back_together)
        return Link(out, back, latency_ns=self.latency_ns)


def measured_link(device: torch.device, sizes: Sequence[int] = SIZES) -> LinkFigures:
    """The figures of a device's link, each the best of a few sizes and repetitions, rounded as times are.

    On a CPU a copy is one of the process's own: nothing runs next to it.
    """
    best = [1.0, 1.0, 1.0]
    for size in sizes:
        for _ in range(REPETITIONS):
            best = [max(pair) for pair in zip(best, (size / ns for ns in _timed(device, size)), strict=True)]
    latency = min(min(_timed(device, 1)[:2]) for _ in range(REPETITIONS))
    out, back, together = (max(1, rounded(figure * 1e9)) for figure in best)
    return LinkFigures(out, back, together, together, rounded(latency))


def _timed(device: torch.device, size: int) -> tuple[int, int, int]:
    """How long a copy of so many bytes takes out, back, and both at once, in ns."""
    link, there = link_of(device), of(device)
    storage, other = (torch.empty(size, dtype=torch.uint8, device=device).untyped_storage() for _ in range(2))

    def now() -> int:
        there.synchronize()
        return time.perf_counter_ns()

    start = now()
    copies, token = link.out([storage])
    link.wait(token)
    middle = now()
    _, token = link.back(copies)
    link.wait(token)
    end = now()
    _, leaving = link.out([other])
    _, returning = link.back(copies)
    link.wait(leaving)
    link.wait(returning)
    last = now()
    return max(1, middle - start), max(1, end - middle), max(1, last - end)


@cache
def _figures(device: torch.device) -> LinkFigures:
    return measured_link(device)


def bandwidth(device: torch.device) -> int:
    """Bytes per second that a link carries out and back, the slower of both, one way at a time."""
    found = _figures(device)
    return min(found.out, found.back)


def link_for(options: SolveOptions, device: torch.device, coordinator: Coordinator) -> Link | None:
    """The link that options mean for a step on a device, the same numbers in every process of the job.

    The host's limit is lowered by what pinned blocks may take beyond what is stored in them.
    """
    if options.link is None:
        return None
    link = read_link(options.link)
    if link is None:
        figures = coordinator.costs({"link": _figures(of(device).device)})
        link = LinkFigures(*figures["link"]).link()
    limit = link.host_bytes if options.host_bytes is None else bytes_of(options.host_bytes)
    return replace(link, host_bytes=storable(device, limit))
