"""Plans with transfers on the page: its replay is the language's, and both directions of the link are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client.transferring import with_transfers
from remat_ir import Answer, Compute, Graph, Link, Offload, Plan, Prefetch, Problem, plain_plan, replay
from service.browsing import Visit
from service.serving import Service, training_graph

pytest.importorskip("playwright.sync_api")
LINK = Link(3 * 10**9, 5 * 10**9, latency_ns=700)


@pytest.fixture
def visit(browser: Any, service: Service) -> Iterator[Visit]:
    here = Visit(browser, service.url)
    here.go()
    yield here
    here.leave()


def case(seed: int) -> tuple[Graph, Plan]:
    graph = replace(training_graph(8), link=LINK)
    return graph, with_transfers(graph, plain_plan(graph), seed, share=1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_the_page_replays_transfers_as_the_language_does(visit: Visit, seed: int) -> None:
    graph, plan = case(seed)
    moments = list(replay(graph, plan))
    run = visit.tab.evaluate(
        """([graph, steps]) => {
        const { rows, time, copies } = Remat.replay.replay(graph, steps);
        return { memory: [...rows.memory], end: [...rows.end], host: [...rows.host], time,
          copies: copies.map(c => [c.from, c.to]) };
        }""",
        [graph.to_json(), plan.to_json()["steps"]],
    )
    computes = [m for m in moments if m.op is not None]
    assert run["memory"] == [m.peak_bytes for m in computes]
    assert run["end"] == [m.cost_ns for m in computes]
    assert run["host"] == [m.host_bytes for m in computes]
    assert run["time"] == moments[-1].cost_ns
    assert run["copies"] == [list(m.copy_ns) for m in moments if m.copy_ns is not None]
    assert sum(isinstance(s, Offload | Prefetch) for s in plan.steps) == len(run["copies"]) > 0


@pytest.mark.thorough
def test_both_directions_and_the_host_are_drawn_and_traced(visit: Visit, tmp_path: Path) -> None:
    graph, plan = case(1)
    problem = Problem(graph, 2**40)
    answer = Answer.of_plan(problem, plan, method="auto").to_json()
    whole = {"answer": {**answer, "id": "x"}, "problem": problem.to_json(), "progress": [], "names": None}
    visit.tab.evaluate(
        "whole => { const box = document.querySelector('main'); box.replaceChildren(); Remat.plan.show(box, whole); }",
        whole,
    )
    drawn = visit.tab.locator("canvas.lanes").first.get_attribute("aria-label")
    moves = sum(isinstance(s, Offload) for s in plan.steps)
    assert f"to host, {moves} stretches; from host, {moves} stretches" in drawn
    assert "on the host" in visit.tab.inner_text(".legend >> nth=0")
    events = visit.tab.evaluate(
        """([graph, steps]) => {
        const { replay, trace } = Remat.replay;
        return trace(replay(graph, steps), i => `op ${i}`, () => ({})).traceEvents;
        }""",
        [graph.to_json(), plan.to_json()["steps"]],
    )
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {lanes[3], lanes[4]} == {"copies to the host", "copies to the device"}
    assert sum(e["ph"] == "X" and e["tid"] in (3, 4) for e in events) == 2 * moves
    assert sum(e["ph"] == "X" and e["tid"] in (1, 2) for e in events) == sum(isinstance(s, Compute) for s in plan.steps)
    assert max(e["args"]["bytes"] for e in events if e["name"] == "host memory") > 0
