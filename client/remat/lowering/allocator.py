"""What a caching allocator reserves for a sequence of requests: torch's policy, in plain Python, without a device.

After c10/cuda/CUDACachingAllocator.cpp of torch 2.13: `round_size`, `get_pool`, `get_allocation_size`,
`get_free_block`, `should_split`, `try_merge_blocks` and, with expandable segments, `try_allocate_expandable_block`.
All requests come from one stream.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

KIB, MIB = 2**10, 2**20
SMALLEST = 512
"""Requests are rounded up to multiples of so many bytes."""
SMALL = MIB
"""Requests up to so many bytes are cut from small segments."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, OWN_UNIT = 10 * MIB, 2 * MIB
"""Requests from here on have segments of their own size, rounded up to the unit."""


class Settings(NamedTuple):
    """Options of the allocator, as PYTORCH_ALLOC_CONF has them; sizes in bytes.

    Attributes:
        expandable: segments grow at their end.
        divisions: requests are rounded up to one of so many steps between two powers of two; 0: to `SMALLEST`.
        largest_split: blocks of at least so many bytes are not split.
    """

    expandable: bool = False
    divisions: int = 0
    largest_split: int = 2**62

    @classmethod
    def of_process(cls, around: Mapping[str, str] | None = None) -> Settings:
        """Those that this process was started with."""
        around = os.environ if around is None else around
        text = around.get("PYTORCH_ALLOC_CONF") or around.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        found = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
        divisions, most = found.get("roundup_power2_divisions", ""), found.get("max_split_size_mb", "")
        return cls(
            found.get("expandable_segments", "").lower() == "true",
            int(divisions) if divisions.isdigit() else 0,
            int(most) * MIB if most.isdigit() else 2**62,
        )


class Bytes(NamedTuple):
    """Bytes that were asked for, those of the blocks that serve them, and those of the segments these are cut from."""

    requested: int
    allocated: int
    reserved: int


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, with its neighbours there."""

    start: int
    size: int
    small: bool
    requested: int | None = None
    before: Block | None = None
    after: Block | None = None

    def key(self) -> tuple[int, int]:
        """Free blocks are taken in this order."""
        return self.size, self.start


class Allocator:
    """A caching allocator as it stands, with its peaks.

    Args:
        segments: of a device, as `torch.cuda.memory_snapshot` has them; the peaks begin with what is in use there.

    Example:
        >>> allocator = Allocator()
        >>> block = allocator.allocate(5 * 2**20)
        >>> allocator.now
        Bytes(requested=5242880, allocated=5242880, reserved=20971520)
    """

    def __init__(self, settings: Settings | None = None, segments: Iterable[Mapping[str, Any]] = ()) -> None:
        self.settings = settings or Settings()
        self.now = self.peak = Bytes(0, 0, 0)
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._end = 0
        self._last: dict[bool, Block] = {}
        for segment in segments:
            before = None
            small = segment["segment_type"] == "small"
            for found in segment["blocks"]:
                free = found["state"] == "inactive"
                asked = None if free else int(found.get("requested_size", found["size"]))
                block = Block(int(found["address"]), int(found["size"]), small, asked, before)
                if before is not None:
                    before.after = block
                if free:
                    self._put(block)
                self._count(asked or 0, 0 if free else block.size, block.size)
                before = block
                self._end = max(self._end, block.start + block.size)
            if before is not None and segment.get("is_expandable"):
                self._last[small] = before
        self.peak = self.now

    def allocate(self, size: int) -> Block:
        """A block for so many bytes."""
        need = self._rounded(size)
        small = need <= SMALL
        block = self._best(small, need) or (
            self._grown(small, need) if self.settings.expandable else self._segment(small, need)
        )
        rest = block.size - need
        whole = rest < SMALLEST if small or self.settings.expandable else rest <= SMALL
        if not whole and need < self.settings.largest_split:
            self._split(block, need)
        block.requested = size
        self._count(size, block.size, 0)
        return block

    def free(self, block: Block) -> None:
        """A block is in the cache, in one with its neighbours there."""
        assert block.requested is not None, "a block is freed once"
        self._count(-block.requested, -block.size, 0)
        block.requested = None
        for other in (block.before, block.after):
            if other is not None and other.requested is None:
                self._take(other)
                first, second = (other, block) if other is block.before else (block, other)
                block.start, block.size = first.start, first.size + second.size
                block.before, block.after = first.before, second.after
                if self._last.get(block.small) is other:
                    self._last[block.small] = block
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._put(block)

    def _rounded(self, size: int) -> int:
        size = max(size, SMALLEST)
        divisions = self.settings.divisions
        if divisions > 1 and size > SMALLEST * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // SMALLEST) * SMALLEST

    def _best(self, small: bool, need: int) -> Block | None:
        blocks = self._free[small]
        at = bisect_left(blocks, (need, -1))
        if at == len(blocks):
            return None
        block = blocks[at][2]
        if self._last.get(small) is block and at + 1 < len(blocks):
            block = blocks[at + 1][2]  # the end of an expandable segment counts as large as it can become
        limit = self.settings.largest_split
        if (need < limit <= block.size) or (need >= limit and block.size >= need + LARGE_SEGMENT):
            return None
        self._take(block)
        return block

    def _segment(self, small: bool, need: int) -> Block:
        own = -(-need // OWN_UNIT) * OWN_UNIT
        size = SMALL_SEGMENT if small else LARGE_SEGMENT if need < OWN_SEGMENT else own
        self._count(0, 0, size)
        self._end += size
        return Block(self._end - size, size, small)

    def _grown(self, small: bool, need: int) -> Block:
        last, unit = self._last.get(small), SMALL_SEGMENT if small else LARGE_SEGMENT
        spare = last if last is not None and last.requested is None else None
        more = -(-(need - (spare.size if spare else 0)) // unit) * unit
        self._count(0, 0, more)
        if spare is not None:
            self._take(spare)
            spare.size += more
            return spare
        start = last.start + last.size if last else 2**44 * (1 + small)  # each grows in a range of its own
        block = Block(start, more, small, before=last)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.start + size, block.size - size, block.small, None, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._last.get(block.small) is block:
            self._last[block.small] = rest
        self._put(rest)

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (*block.key(), block))

    def _take(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, block.key())]

    def _count(self, requested: int, allocated: int, reserved: int) -> None:
        self.now = Bytes(*(a + b for a, b in zip(self.now, (requested, allocated, reserved), strict=True)))
        self.peak = Bytes(*map(max, self.peak, self.now))
