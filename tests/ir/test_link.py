"""A graph with a link to the host: what travels, what makes it another problem, and what each verb of a plan means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remat_ir import (
    Compute,
    Drop,
    Free,
    Graph,
    InvalidData,
    InvalidPlan,
    Link,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Step,
    Wait,
    certificate_for,
    graph_digest,
    graph_of,
    host_peak,
    plain_plan,
    problem_digest,
    replay,
    structure_digest,
    verify,
)
from remat_ir.graph import working_set
from remat_ir.proof import InvalidProof, PairProof, certifiable
from remat_ir.restrictions import NO_TRANSFERS, contains

LINK = Link(1_000_000_000, 500_000_000, latency_ns=3, host_bytes=15)
BARE = graph_of([10, 20, 30, 40], [10, 4, 2, 1], [[], [0], [1], [0, 2]], keep=(3,), fixed_bytes=100)
GRAPH = BARE.with_link(LINK)
MOVED: tuple[Step, ...] = (
    Compute(0), Offload(0), Compute(1), Wait(0), Drop(0), Compute(2), Free(1), Prefetch(0), Wait(0), Compute(3),
)  # fmt: skip
PLENTY = 10**6


def test_what_each_step_takes() -> None:
    """Out: 3 ns and a ns a byte; back: 3 ns and two a byte."""
    seen = list(replay(GRAPH, Plan(MOVED)))
    assert [moment.cost_ns for moment in seen] == [10, 10, 30, 30, 30, 60, 60, 60, 83, 123]
    assert [moment.copy_ns for moment in seen if moment.copy_ns] == [(10, 23), (60, 83)]
    # charged until it is dropped, and again from where the copy back starts
    assert [moment.resident_bytes - 100 for moment in seen] == [10, 10, 14, 14, 4, 6, 2, 12, 12, 13]
    assert [moment.host_bytes for moment in seen] == [0, 10, 10, 10, 10, 10, 10, 10, 0, 0]
    assert verify(Problem(GRAPH, PLENTY), Plan(MOVED)) == (123, 114)
    assert host_peak(GRAPH, Plan(MOVED)) == 10


def test_a_direction_carries_one_copy_at_a_time() -> None:
    steps = (
        Compute(0), Compute(1), Offload(0), Offload(1), Compute(2), Wait(0), Drop(0), Prefetch(0), Wait(1), Free(1),
        Wait(0), Compute(3),
    )  # fmt: skip
    seen = list(replay(GRAPH, Plan(steps)))
    # the second copy out waits for the first; the copy back, with its own direction, for neither
    assert [moment.copy_ns for moment in seen if moment.copy_ns] == [(30, 43), (43, 50), (60, 83)]
    assert seen[-1].cost_ns == 123
    assert host_peak(GRAPH, Plan(steps)) == 14
    assert seen[-1].host_bytes == 0  # the copy of value 1 ended with value 1


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Offload(0),), "step 0: value 0 is offloaded but not resident"),
        ((Compute(0), Offload(0), Offload(0)), "step 2: value 0 is offloaded but already has a copy on the host"),
        ((Compute(0), Offload(0), Wait(0), Offload(0)), "step 3: value 0 is offloaded but already has a copy"),
        ((Compute(0), Offload(0), Drop(0)), "step 2: value 0 is dropped, but no copy of it to the host has been"),
        ((Compute(0), Drop(0)), "step 1: value 0 is dropped, but no copy of it to the host has been waited for"),
        ((Compute(0), Offload(0), Free(0)), "step 2: value 0 is freed while it is copied to the host"),
        ((Compute(0), Wait(0)), "step 1: wait for value 0, which is not being copied"),
        ((Compute(0), Prefetch(0)), "step 1: value 0 is prefetched but not on the host alone"),
        ((Compute(0), Offload(0), Wait(0), Prefetch(0)), "step 3: value 0 is prefetched but not on the host alone"),
        ((*MOVED[:5], Prefetch(0), Prefetch(0)), "step 6: value 0 is prefetched but not on the host alone"),
        ((*MOVED[:5], Compute(0)), "step 5: op 0 keeps value 0, which is on the host"),
        ((*MOVED[:5], Prefetch(0), Compute(0, ())), "step 6: op 0 makes value 0 while it is prefetched"),
        ((*MOVED[:5], Free(0)), "step 5: value 0 is freed but not resident"),
        ((*MOVED[:8], Compute(3)), "step 8: op 3 reads value 0, which is not resident"),
        ((*MOVED, Offload(3)), "step 10: value 3 must be kept to the end"),
        ((Compute(0), Compute(1), Offload(0), Compute(2), Compute(3)), "the copy of value 0 is never waited for"),
        ((*MOVED, Offload(0), Wait(0), Drop(0), Prefetch(0)), "the copy of value 0 is never waited for"),
        ((Compute(0), Compute(1), Compute(2), Offload(0), Offload(1), Offload(2)), "step 5: the host would hold 16"),
    ],
)
def test_transfers_that_break_a_rule(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        verify(Problem(GRAPH, PLENTY), Plan(steps))
    assert str(caught.value).startswith(message)


def test_what_is_on_the_host_may_be_made_and_let_go() -> None:
    """An op that makes two values may run again for the one while the other is on the host."""
    graph = Graph((1, 1, 1), ((), (1,), (0, 1)), (0, 0, 1, 2), (5, 5, 1, 1), link=LINK)
    begin = (Compute(0), Offload(0), Wait(0), Drop(0), Compute(1), Free(1))
    end = (Prefetch(0), Wait(0), Compute(2))
    assert verify(Problem(graph, 12), Plan((*begin, Compute(0, (1,)), *end))).cost_ns == 1 + 8 + 1 + 1 + 13 + 1
    with pytest.raises(InvalidPlan, match="keeps value 0, which is on the host"):
        verify(Problem(graph, PLENTY), Plan((*begin, Compute(0), *end)))


def test_a_link_travels_and_is_part_of_the_problem() -> None:
    problem = Problem(GRAPH, 114)
    assert Problem.from_json(problem.to_json()) == problem
    assert "link" not in Problem(BARE, 114).to_json()["graph"]
    assert Link.from_json(Link(1, 2, host_bytes=0).to_json()) == Link(1, 2, host_bytes=0)
    assert Link(1, 2).to_json() == {"to_host_bytes_per_s": 1, "to_device_bytes_per_s": 2}
    changed = [BARE, *(GRAPH.with_link(link) for link in (replace(LINK, latency_ns=4), replace(LINK, host_bytes=None)))]
    assert len({problem_digest(Problem(graph, 114)) for graph in (GRAPH, *changed)}) == 4
    slower = {"op_cost_ns": (11, 20, 30, 40)}
    assert structure_digest(replace(BARE, **slower)) == structure_digest(BARE)
    assert structure_digest(replace(GRAPH, **slower)) != structure_digest(GRAPH)
    assert graph_digest(GRAPH.with_link(None)) == graph_digest(BARE)


@pytest.mark.parametrize(
    ("change", "message", "pointer"),
    [
        ({"to_host_bytes_per_s": 0}, "to_host_bytes_per_s must be at least 1", "/link/to_host_bytes_per_s"),
        ({"latency_ns": -1}, "latency_ns must not be negative", "/link/latency_ns"),
        ({"host_bytes": 0.5}, "host_bytes must be an integer", "/link/host_bytes"),
        ({"width": 4}, "unknown key 'width'", "/link/width"),
    ],
)
def test_links_that_are_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    data = GRAPH.to_json()
    with pytest.raises(InvalidData) as caught:
        Graph.from_json(data | {"link": data["link"] | change})
    assert message in str(caught.value)
    assert caught.value.pointer == pointer


def test_what_is_proved_without_a_link_is_not_proved_with_one() -> None:
    assert certifiable(BARE)
    assert certifiable(GRAPH)
    pairs = PairProof(problem_digest(Problem(BARE, 0)), 2, ((0, 1),))
    with pytest.raises(InvalidProof, match="come back from the host"):
        certificate_for(Problem(GRAPH, 0), pairs)
    assert contains(GRAPH, plain_plan(GRAPH), (NO_TRANSFERS,))
    assert not contains(GRAPH, Plan(MOVED), (NO_TRANSFERS,))
    once = replace(BARE, once=(0,))
    # value 0 is there throughout: without a link it is resident while op 2 runs
    assert working_set(once).least_bytes == 116
    assert working_set(once.with_link(LINK)).least_bytes == 114
