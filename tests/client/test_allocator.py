"""The model of the caching allocator, and the room in it that a budget leaves: plans are asked for until they fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat.lowering.allocator import MIB, Allocator, Block, Bytes, Settings
from remat.planning.coordinator import Coordinator
from remat.planning.greedy import greedy_answer
from remat.profiling.room import ATTEMPTS, Room
from remat_ir import Answer, Plan, Problem, plain_peak, verify


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([512], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([5 * MIB] * 5, 25 * MIB, 40 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),  # more than 1 MiB is left, which is split off
        ([11 * MIB + 1], 12 * MIB, 12 * MIB),  # less is left
        ([19 * MIB], 20 * MIB, 20 * MIB),
    ],
)
def test_sizes_and_segments(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = Allocator()
    for size in requests:
        allocator.allocate(size)
    assert allocator.now == Bytes(sum(requests), allocated, reserved)


def test_settings_are_those_of_the_environment() -> None:
    text = "expandable_segments:True, roundup_power2_divisions:4,max_split_size_mb:64"
    assert Settings.of_process({"PYTORCH_CUDA_ALLOC_CONF": text}) == Settings(True, 4, 64 * MIB)
    assert Settings.of_process({}) == Settings()
    rounded = Allocator(Settings(divisions=4))
    # torch's own example: 1200 with 4 divisions lies between 1024 and 2048, in steps of 256
    assert [rounded.allocate(size * 1024).size for size in (1024, 1200, 1281, 2047)] == [
        size * 1024 for size in (1024, 1280, 1536, 2048)
    ]
    whole = Allocator(Settings(largest_split=64 * MIB))
    large = whole.allocate(100 * MIB)
    whole.free(large)
    whole.allocate(30 * MIB)
    assert whole.now.reserved == 130 * MIB


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(
    st.lists(st.one_of(st.integers(1, 64 * MIB), st.integers(1, 4 * MIB), st.just(0)), max_size=80),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_blocks_never_overlap_and_all_bytes_are_accounted_for(sizes, expandable, random) -> None:  # type: ignore[no-untyped-def]
    allocator, held = Allocator(Settings(expandable=expandable)), list[Block]()
    for size in sizes:
        if size:
            held.append(allocator.allocate(size))
        elif held:
            allocator.free(held.pop(random.randrange(len(held))))
        spans = sorted((b.start, b.start + b.size) for b in held)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        free = sum(size for blocks in allocator._free.values() for size, _, _ in blocks)
        assert allocator.now.requested == sum(b.requested or 0 for b in held)
        assert allocator.now.allocated == sum(b.size for b in held) == allocator.now.reserved - free
        assert all(p >= n for p, n in zip(allocator.peak, allocator.now, strict=True))
    for block in held:
        allocator.free(block)
    assert allocator.now[:2] == (0, 0)
    spans = [size for blocks in allocator._free.values() for size, _, _ in blocks]
    assert sum(spans) == allocator.now.reserved, "neighbours that are free are one block"


def test_a_model_that_starts_from_a_devices_segments_goes_on_from_there() -> None:
    small = {"address": 0, "size": 2 * MIB - 512, "state": "inactive"}
    blocks = [{"address": 2 * MIB - 512, "size": 512, "requested_size": 4, "state": "active_allocated"}]
    segment = {"segment_type": "small", "blocks": [small, *blocks]}
    allocator = Allocator(None, [segment])
    assert allocator.now == allocator.peak == Bytes(4, 512, 2 * MIB)
    assert allocator.allocate(MIB).start == 0
    assert allocator.now.reserved == 2 * MIB


def room_of(budget: int, outside: int = 0) -> Room:
    """A room of so many bytes, on a machine without an accelerator."""
    made = Room(torch.device("cpu"), budget, 1.0, Coordinator())
    made.budget, made.outside = budget, outside
    return made


@settings(max_examples=examples(60), deadline=None)
@given(graphs(), st.floats(0.3, 1.2), st.integers(1, 40), st.integers(0, 30))
def test_a_plan_settled_on_fits_its_problem_and_the_room(graph, share: float, segment: int, waste: int) -> None:  # type: ignore[no-untyped-def]
    room = room_of(max(1, int(share * plain_peak(graph))))
    asked: list[Problem] = []

    def ask(problem: Problem) -> Answer:
        asked.append(problem)
        return greedy_answer(problem, time_limit_s=1.0, look_s=0.0)

    def reserved(answer: Answer) -> int:
        return -(-((answer.peak_bytes or 0) + waste) // segment) * segment

    problem, answer = room.settled(Problem(graph, room.budget), ask, lambda _, a: room.over(lambda: reserved(a)))
    assert problem == asked[-1]
    assert len(asked) <= ATTEMPTS
    assert all(p.budget_bytes < room.budget or p.budget_bytes == 0 for p in asked[1:])
    if isinstance(answer.plan, Plan):
        verify(problem, answer.plan)
        assert reserved(answer) <= room.budget or len(asked) == ATTEMPTS
        assert room.seen == reserved(answer)


def test_what_others_take_is_not_there() -> None:
    room = room_of(1000, outside=100)
    room._allocated = 450
    assert room.left(1000, present=300) == 1000 - 100 - 150
    assert room.left(1000, present=500) == 900
    assert room.over(lambda: 900) == 0
    assert room.over(lambda: 930) == 30


def test_a_rehearsal_without_memory_counts_as_over_and_other_errors_come_out() -> None:
    def out() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def wrong() -> int:
        raise RuntimeError("shapes differ")

    assert room_of(1600).over(out) == 100
    with pytest.raises(RuntimeError, match="shapes"):
        room_of(1600).over(wrong)


def test_the_cpu_has_no_segments() -> None:
    room = Room(torch.device("cpu"), 1000, 1.0, Coordinator())
    assert room.device is None
    assert room.left(700, present=0) == 700

    def unasked() -> int:
        raise AssertionError("nothing is rehearsed here")

    assert room.over(unasked) == 0
