"""The room that a budget leaves: plans are asked for with less until their segments fit, and each fits its problem."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat.planning.coordinator import Coordinator
from remat.planning.greedy import greedy_answer
from remat.profiling.room import ATTEMPTS, Room
from remat_ir import Answer, Plan, Problem, plain_peak, verify


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
