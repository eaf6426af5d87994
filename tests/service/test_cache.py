"""The cache: ranges of budgets, pairing, near hits, methods and solvers apart, damage, eviction, looks that end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat_ir
import remat_solver
from drawn import examples
from remat.planning.options import SolveOptions
from remat.planning.sources import ServicePlanner
from remat_ir import Graph, Link, Problem, budget_at, plain_peak
from remat_ir.restrictions import NO_TRANSFERS, ONE_PER_STAGE
from remat_service.storage.cache import carried_bound
from remat_service.storage.seals import Effort, Seals
from remat_service.storage.verifier import Verifier, pack, written
from remat_solver import solve, solver_version
from service.serving import (
    Service,
    checked,
    eventually,
    hard_graph,
    open_problem,
    posed,
    served,
    serving,
    training_graph,
)


def _post(service: Service, graph: Graph, budget: int, **more: object) -> dict[str, object]:
    status, data = service.post(Problem(graph, budget), **({"time_limit_s": 10} | more))
    assert status == 200
    return data


def test_optimal_answers_a_range_of_budgets(service: Service) -> None:
    """A plan proved optimal at budget B answers every budget from its peak to B, with the same bound."""
    graph = training_graph(9, cost=1009)
    peak = plain_peak(graph)
    first = _post(service, graph, peak + 5000)
    assert (first["status"], first["cache"]) == ("optimal", "miss")
    for budget in (peak, peak + 1, peak + 4999):
        again = _post(service, graph, budget, wait=0)
        assert (again["status"], again["cache"]) == ("optimal", "hit")
        checked(Problem(graph, budget), again)
    assert _post(service, graph, peak - 1)["cache"] == "miss"


def test_plan_of_a_smaller_budget_pairs_with_a_bound_of_a_larger_one(service: Service) -> None:
    """Between two budgets: the plan comes from the smaller, the bound from the larger, the gap from both."""
    graph = training_graph(11, cost=1019)
    peak = plain_peak(graph)
    small = _post(service, graph, budget_at(graph, 0.9), method="greedy", max_gap=0.9)
    large = _post(service, graph, peak, method="greedy")
    assert large["status"] == "optimal"
    middle = Problem(graph, budget_at(graph, 0.95))
    data = _post(service, graph, middle.budget_bytes, method="greedy", max_gap=0.9)
    assert data["cache"] == "hit"
    assert data["cost_ns"] <= small["cost_ns"]
    assert data["bound_ns"] >= large["bound_ns"]
    checked(middle, data)


@pytest.mark.thorough
def test_near_hit_is_recosted_and_its_bound_is_proved(service: Service) -> None:
    """The same structure with other costs: the stored plan re-costed, the carried bound below the optimum."""
    graph = training_graph(12, cost=2000)
    peak = plain_peak(graph)
    assert _post(service, graph, peak)["status"] == "optimal"
    jittered = replace(graph, op_cost_ns=tuple(c + i % 3 for i, c in enumerate(graph.op_cost_ns)))
    data = _post(service, jittered, peak, max_gap=0.01)
    assert data["cache"] == "near"
    answer = checked(Problem(jittered, peak), data)
    assert answer.bound_ns == jittered.total_cost_ns  # ΣC′ + r·(L − ΣC) with L = ΣC
    assert _post(service, jittered, peak, max_gap=0.01)["cache"] == "hit"


@settings(deadline=None, derandomize=True, max_examples=examples(200))
@given(
    costs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=3, max_size=3),
    again=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_carried_bound_is_a_bound(costs: list[tuple[int, int]], again: tuple[int, int]) -> None:
    """Whatever a plan recomputes, its new cost is at least the bound carried over from its old cost."""
    old = Graph((costs[0][0], costs[1][0], costs[2][0]), ((), (0,), (0, 1)), (0, 1, 2), (1, 1, 1))
    new = replace(old, op_cost_ns=tuple(c for _, c in costs))
    extra = again[0] * costs[0][0] + again[1] * costs[1][0]
    extra_new = again[0] * costs[0][1] + again[1] * costs[1][1]
    bound = carried_bound(old, new, old.total_cost_ns + extra)
    ratios = [Fraction(c2, c1) for c1, c2 in costs if c1]
    assert new.total_cost_ns <= bound <= new.total_cost_ns + extra_new or not ratios
    if not ratios:
        assert bound == new.total_cost_ns


@pytest.mark.thorough
def test_methods_are_kept_apart(service: Service) -> None:
    """`auto` may serve any method's plan; a named method only its own."""
    graph = training_graph(13, cost=1021)
    peak = plain_peak(graph)
    assert _post(service, graph, peak, method="checkpoint-all")["cache"] == "miss"
    assert _post(service, graph, peak, method="auto")["cache"] == "hit"
    other = _post(service, graph, peak, method="greedy")
    assert (other["cache"], other["method"]) == ("miss", "greedy")
    assert _post(service, graph, peak, method="greedy")["cache"] == "hit"


@pytest.mark.thorough
def test_the_restriction_of_lp_roundings_bound_is_kept(service: Service) -> None:
    """The bound is the relaxation's of one recomputation per op and stage: it comes back from the store as such.

    Another method is not given it: its answer says less, or proves its own.
    """
    graph = training_graph(6, cost=1027)
    budget = budget_at(graph, Fraction(1, 2))
    first = _post(service, graph, budget, method="lp-rounding")
    assert first["cache"] == "miss"
    assert first["restricted_to"] == [ONE_PER_STAGE]
    assert graph.total_cost_ns < first["bound_ns"] <= first["cost_ns"]
    again = _post(service, graph, budget, method="lp-rounding")
    assert again["cache"] == "hit"
    kept = ("restricted_to", "bound_ns", "cost_ns", "status")
    assert [again[key] for key in kept] == [first[key] for key in kept]
    assert service.get(str(first["id"]))[1]["restricted_to"] == [ONE_PER_STAGE]
    other = _post(service, graph, budget, method="greedy")
    assert other["restricted_to"] == []
    assert other["bound_ns"] == graph.total_cost_ns


@pytest.mark.thorough
def test_what_was_said_without_transfers_is_no_answer_where_they_are_looked_at(own: Service) -> None:
    """Rows as a solver left them that looked at recomputations only, sealed: "optimal" there, and settled for good."""
    graph = training_graph(8, cost=1031).with_link(Link(10**7, 10**7))
    budget = budget_at(graph, Fraction(1, 2))
    first = _post(own, graph, budget, time_limit_s=1, max_gap=0.0)
    assert (first["status"], first["restricted_to"]) == ("feasible", [])
    seals = Seals([os.environ["REMAT_SEAL_KEY"].encode()])
    ((key, net),) = own.rows("SELECT graph_key, budget_bytes FROM efforts")
    named = {"graph_key": key, "budget_bytes": net, "method_key": "auto", "solver": solver_version()}
    said = {"bound_ns": first["cost_ns"], "source": "staged", "restricted_to": NO_TRANSFERS}
    effort = Effort(1.0, True, "optimal", None, NO_TRANSFERS, "")
    for table, row in (("bounds", named | said), ("efforts", named | effort._asdict())):
        row = seals.sealed(table, row) | {"created_at": 0}
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        own.edit(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", *row.values())
    for _ in range(2):
        again = _post(own, graph, budget, time_limit_s=1, max_gap=0.0)
        assert (again["status"], again["restricted_to"]) == ("feasible", [])
        assert again["limit"] == "time"


@pytest.mark.thorough
def test_force_solves_anew(service: Service) -> None:
    """`force` asks the solver whatever the store has."""
    graph = training_graph(14, cost=1031)
    before = service.metric("remat_solve_seconds_count")
    _post(service, graph, plain_peak(graph))
    assert _post(service, graph, plain_peak(graph), force=True)["cache"] == "miss"
    assert service.metric("remat_solve_seconds_count") == before + 2


@pytest.mark.thorough
def test_warm_start_from_a_named_solve(service: Service) -> None:
    """A solve starts from another's plan; one that is not valid here is refused with its pointer."""
    graph = training_graph(15, cost=1033)
    first = _post(service, graph, plain_peak(graph))
    other = replace(graph, op_cost_ns=tuple(c + 7 for c in graph.op_cost_ns))
    data = _post(service, other, plain_peak(graph), start=first["id"], method="greedy", max_gap=0.5)
    assert data["cost_ns"] is not None
    refused = service.post(Problem(training_graph(3), 10**9), start=first["id"])
    assert (refused[0], refused[1]["pointer"]) == (422, "/start")


def test_a_start_that_is_no_solve_is_refused(service: Service) -> None:
    """Also one that no database takes."""
    body = {"problem": Problem(training_graph(3, cost=1043), 10**9).to_json(), "method": "greedy"}
    for start in ("", "x", "0" * 32, "nul\x00", "\ud800"):
        text = json.dumps(body | {"start": start})
        reply = service.http.post("/v1/solves", content=text, headers={"Content-Type": "application/json"})
        assert (reply.status_code, reply.json().get("pointer")) == (422, "/start"), (start, reply.text)


@pytest.mark.thorough
def test_explain_says_what_differs(service: Service) -> None:
    """A miss is explained: unknown, other costs, another structure, another budget."""
    graph = training_graph(16, cost=1039)

    def reasons(asked: Graph, budget: int, **more: object) -> tuple[str, str]:
        body = {"problem": Problem(asked, budget).to_json(), **more}
        reply = service.http.post("/v1/cache:explain", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["result"], " ".join(reply.json()["reasons"])

    assert reasons(graph, 10**6)[0] == "miss"
    _post(service, graph, plain_peak(graph))
    assert reasons(graph, plain_peak(graph))[0] == "hit"
    result, said = reasons(graph, plain_peak(graph), force=True)
    assert result == "miss"
    assert "force is set" in said
    result, said = reasons(graph, plain_peak(graph) - 1)
    assert result == "miss"
    assert "not been run at this budget" in said
    costlier = replace(graph, op_cost_ns=(graph.op_cost_ns[0] + 500, *graph.op_cost_ns[1:]))
    assert "first at 0: 1539 ns sent, 1039 ns stored" in reasons(costlier, plain_peak(graph), method="greedy")[1]
    larger = replace(graph, value_bytes=(*graph.value_bytes[:4], 999, *graph.value_bytes[5:]))
    assert "value_bytes differs first at 4" in reasons(larger, 10**6)[1]


own = served("function", workers=1, housekeeping_s=0.2)
"""A service of the test's own, whose database it may damage."""


@pytest.mark.thorough
def test_a_damaged_graph_is_a_miss(own: Service) -> None:
    """A graph whose bytes no longer lead to its key is not solved, nor served."""
    graph = training_graph(7, cost=51)
    first = _post(own, graph, plain_peak(graph))
    own.stop()
    own.edit("UPDATE graphs SET data = ?", pack(written({"graph": training_graph(7, cost=52).to_json()})))
    own.start()
    assert own.get(str(first["id"]), 0)[0] == 410
    assert own.http.get(f"/v1/solves/{first['id']}/problem").status_code == 410


@pytest.mark.thorough
@pytest.mark.parametrize("live", [True, False])
def test_a_damaged_graph_is_replaced_by_the_next_post(own: Service, live: bool) -> None:
    """One flipped bit: the POST carries the graph, so its row is written anew and what was found about it stays."""
    graph = training_graph(8, cost=53)
    first = _post(own, graph, plain_peak(graph))
    if not live:
        own.stop()
    ((data,),) = own.rows("SELECT data FROM graphs")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    own.edit("UPDATE graphs SET data = ?", bytes(flipped))
    if not live:
        own.start()
    again = _post(own, graph, plain_peak(graph) + 1)  # another budget: not a body that was answered before
    assert again["cache"] == "hit"
    checked(Problem(graph, plain_peak(graph) + 1), again)
    assert own.metric("remat_store_mended_total") == 1
    assert own.get(str(first["id"]), 0)[0] == 200


@pytest.mark.thorough
def test_eviction_by_bytes_keeps_what_is_pinned(tmp_path: Path) -> None:
    """The least used graphs go with their plans; a pinned plan stays, and is still served."""
    with serving(tmp_path, workers=1, housekeeping_s=0.2) as own:
        kept, gone = training_graph(5, cost=60), training_graph(6, cost=61)
        pinned, evicted = _post(own, kept, plain_peak(kept)), _post(own, gone, plain_peak(gone))
        assert own.http.put(f"/v1/plans/{pinned['digest']}/pin").status_code == 204
        own.stop()
        own.settings["store_bytes"] = 0
        own.start()
        eventually(lambda: own.http.get(f"/v1/plans/{evicted['digest']}").status_code == 404)
        assert own.get(str(evicted["id"]), 0)[0] == 410
        assert _post(own, kept, plain_peak(kept))["cache"] == "hit"
        assert own.metric("remat_store_evicted_total") >= 1


@pytest.fixture
def greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a method, in a copy of the solver that a service runs."""
    for package in (remat_solver, remat_ir):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / "solver" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "solver"), *filter(None, sys.path)]))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # the copy's kernels would be compiled first
    return tmp_path / "solver" / "remat_solver" / "methods" / "heuristics.py"


@pytest.mark.slow
def test_a_change_of_a_method_is_a_solve_and_one_of_a_comment_is_none(tmp_path: Path, greedy: Path) -> None:
    """What a method ended with counts for the same syntax tree alone; the plan stays, and is no worse."""
    problem = posed(hard_graph(20), 0.6)
    source, said, versions = greedy.read_text(), [], []
    docstring = re.search(r'^"""(.*)"""\n', source)
    commented = source.replace(docstring[0], '"""Another sentence."""\n# and a comment\n')
    for text in (source, commented, commented + "\n_UNUSED = 1\n", commented):
        greedy.write_text(text)
        with serving(tmp_path, workers=1) as own:
            versions.append(own.http.get("/v1/capabilities").json()["version"])
            for _ in range(2):
                status, answer = own.post(problem, method="greedy", time_limit_s=20)
                assert status == 200
                checked(problem, answer)
                said.append(answer["cache"])
    assert versions[0] == versions[1] == versions[3] != versions[2]
    assert said == ["miss", "hit", "hit", "hit", "miss", "hit", "hit", "hit"]


def test_the_version_names_the_solver_and_fits_its_column() -> None:
    """The package, a digest, and HiGHS."""
    assert re.fullmatch(r"[\w.]+\+[0-9a-f]{12}\.highs[\d.]+", solver_version())
    assert len(solver_version()) <= 50


# ---- a look before a request is queued: it ends in time, and what it finds counts from then on

GRAPH = hard_graph(16, 7)


short = served(workers=1, look_up_s=0)
"""A service with one worker whose looks have no time for any certificate that it has not checked before."""


@pytest.fixture(scope="module")
def known(short: Service) -> dict[str, Any]:
    """The answer to a small budget, next to the certificate of a large one, and a worker that is busy otherwise."""
    _, large = short.post(at(0.9), time_limit_s=20, max_gap=0.01)
    assert large["proof"] is not None
    _, found = short.post(at(0.6), time_limit_s=20, max_gap=0.2)
    assert found["plan"] is not None
    _, long = short.post(open_problem(3), wait=0, method="staged", time_limit_s=300, max_gap=0)
    eventually(lambda: short.get(long["id"], 0)[1]["status"] == "running")
    return found


def at(share: float) -> Problem:
    return Problem(GRAPH, budget_at(GRAPH, share))


def test_the_best_stored_plan_counts_from_the_queue_on(short: Service, known: dict[str, Any]) -> None:
    """A new budget of a known graph is queued at once, and given up while it waits: the stored plan is the answer."""
    problem = at(0.72)
    before = _parts(short)
    status, posted = short.post(problem, wait=0, time_limit_s=20, max_gap=0)
    assert (status, posted["status"], posted["cost_ns"]) == (202, "queued", known["cost_ns"])
    assert _parts(short) > before
    given = short.http.post(f"/v1/solves/{posted['id']}/cancel").json()
    answer = checked(problem, given)
    assert (answer.cost_ns, given["status"]) == (known["cost_ns"], "cancelled")


@pytest.mark.thorough
def test_a_queue_limit_that_ends_answers_with_it(short: Service, known: dict[str, Any]) -> None:
    """The request has waited too long for a worker: not without a plan."""
    problem = at(0.73)
    _, posted = short.post(problem, wait=0, time_limit_s=20, max_gap=0, queue_limit_s=0.2)
    ended = eventually(lambda: (found := short.get(posted["id"], 1))[0] == 200 and found[1])
    assert checked(problem, ended).cost_ns == known["cost_ns"]


@pytest.mark.thorough
def test_a_client_whose_time_is_up_has_it(short: Service, known: dict[str, Any]) -> None:
    """A time limit of a second, and no worker is free."""
    answer = ServicePlanner(short.url, patience_s=0.5).plan(at(0.74), SolveOptions(time_limit_s=1.0, max_gap=0.0))
    assert answer.plan is not None
    assert answer.cost_ns == known["cost_ns"]


@pytest.mark.thorough
def test_what_had_no_time_before_the_queue_is_checked_behind_it(tmp_path: Path) -> None:
    """An answer that the store has, but for its certificate's check, is found by the solve that was queued for it."""
    graph = training_graph(12, cost=2003)
    problem = Problem(graph, plain_peak(graph) - 1)
    with serving(tmp_path, workers=1, look_up_s=0) as service:
        _, first = service.post(problem, time_limit_s=20)
        service.stop()
        service.start()  # with nothing in memory
        status, second = service.post(problem, time_limit_s=20)
        assert status == 200
        assert checked(problem, second).cost_ns == first["cost_ns"]
        assert (second["status"], second["bound_ns"]) == (first["status"], first["bound_ns"])
        assert (first["cache"], second["cache"]) == ("miss", "hit")  # nothing was solved for it


@pytest.mark.thorough
def test_a_limit_that_is_over_before_anything_is_found_is_a_miss(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, look_up_s=0) as service:
        _, ended = service.post(open_problem(5), time_limit_s=0.03)
        assert (ended["status"], ended["cache"], ended.get("plan")) == ("nothing_found", "miss", None)


def _parts(service: Service) -> float:
    """Looks that had no time for all there is."""
    return service.metric('remat_store_look_seconds_count{found="part"}')


def _certificate(graph: Graph) -> tuple[Problem, bytes]:
    problem = Problem(graph, budget_at(graph, 0.6))
    answer = solve(problem, time_limit_s=20.0, max_gap=0.02)
    return problem, pack(written(answer.proof.to_json()))


@pytest.mark.thorough
async def test_a_check_that_began_goes_on_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no time leaves it, who has waits for the same one; none is begun next to it, or that takes too long."""
    monkeypatch.setattr("remat_service.storage.verifier._SMALL_BYTES", 1)  # in a thread, as large ones are
    problem, packed = _certificate(GRAPH)
    verifier = Verifier()
    with pytest.raises(TimeoutError):
        await verifier.proof("a", problem, packed, 0.0)
    with pytest.raises(TimeoutError):
        await verifier.proof("b", problem, packed, 100.0)
    both = await asyncio.gather(verifier.proof("a", problem, packed), verifier.proof("a", problem, packed, 100.0))
    assert both[0] is not None
    assert both[0] is both[1]
    with pytest.raises(TimeoutError):
        await verifier.proof("b", problem, packed, 1e-9)
    assert await verifier.proof("a", problem, packed, 0.0) is both[0]
    assert await verifier.proof("b", problem, packed) is not None
