"""Who is asked for a plan: each lie, stall and silence is survived, and nothing unverified comes out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client.liar import Asked, Said, Script, in_turn, lying
from drawn import layered
from remat.errors import BudgetTooSmall, InvalidResponse, NothingFound, Refused, ServiceError, Unreachable
from remat.planning.greedy import greedy_answer
from remat.planning.http import Timeouts
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.planner import FallbackPlanner, Planner, plan_or_raise, planner_for
from remat.planning.quick import quick_answer
from remat.planning.sources import GreedyPlanner, LocalPlanner
from remat.settings import Settings, settings
from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    Plan,
    Problem,
    Progress,
    Status,
    budget_at,
    graph_of,
    plain_plan,
    plan_of,
    problem_digest,
    verify,
    verify_answer,
)
from remat_ir.graph import working_set
from remat_ir.proof import Leaf, PairProof, StageProof
from service.serving import hard_graph
from tiers import first

QUICK = Timeouts(connect=0.5, read=0.4, write=0.5)


def chain(layers: int = 8) -> Graph:
    return graph_of([3] * 2 * layers, [2] * 2 * layers, layered(layers, read_inputs=False), backward_from=layers)


PROBLEM = Problem(chain(), 14)
TRUE = replace(greedy_answer(PROBLEM), method="auto", status=Status.FEASIBLE, id="s-1", cache="miss")


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    return settings(cache_dir=tmp_path, environ={})


def ask(url: str, here: Settings, *, strict: bool = False, **more: Any) -> Answer:
    planner = planner_for(url, strict=strict, given=here, timeouts=QUICK, patience_s=more.pop("patience_s", 0.5))
    on_progress = more.pop("on_progress", None)
    return planner.plan(PROBLEM, SolveOptions(**{"time_limit_s": 1.0, **more}), on_progress=on_progress)


def test_a_true_answer_is_taken_and_remembered(here: Settings, no_solver: None) -> None:
    with lying(in_turn(Said(200, TRUE.to_json()))) as server:
        answer = ask(server.url, here)
        again = ask(server.url, here)
    assert (answer.plan, answer.cost_ns, answer.id) == (TRUE.plan, TRUE.cost_ns, "s-1")
    assert again.cache == "hit"
    assert again.plan == TRUE.plan
    assert len(server.asked) == 1
    sent = server.asked[0].body
    assert sent["problem"] == PROBLEM.to_json()
    assert (sent["method"], sent["time_limit_s"], sent["max_gap"]) == ("auto", 1.0, 0.001)


def test_the_id_is_logged_before_the_wait(here: Settings, no_solver: None, caplog: pytest.LogCaptureFixture) -> None:
    waiting = replace(TRUE, status=Status.RUNNING, plan=None, cost_ns=None, peak_bytes=None, gap=None)
    seen: list[bool] = []

    def script(asked: Asked) -> Said:
        if asked.method == "POST":
            return Said(202, waiting.to_json(), {"Location": "/v1/solves/s-1"})
        seen.append("remat attach s-1" in caplog.text)
        return Said(200, TRUE.to_json())

    with caplog.at_level(logging.INFO, "remat"), lying(script) as server:
        answer = ask(server.url, here)
    assert answer.plan == TRUE.plan
    assert seen == [True]


def test_progress_is_told_as_it_changes(here: Settings, no_solver: None) -> None:
    waiting = replace(TRUE, status=Status.RUNNING, plan=None, peak_bytes=None, gap=None)
    steps = [replace(waiting, cost_ns=None), replace(waiting, cost_ns=99), replace(waiting, cost_ns=99), TRUE]
    seen: list[Progress] = []
    with lying(in_turn(*(Said(200 if a.status.ended else 202, a.to_json()) for a in steps))) as server:
        ask(server.url, here, on_progress=seen.append)
    assert [progress.cost_ns for progress in seen] == [None, 99, TRUE.cost_ns]


def lie(**changes: Any) -> dict[str, Any]:
    data = TRUE.to_json()
    data.update(changes)
    return data


LIES: dict[str, Callable[[], Any]] = {
    "not an object": lambda: [1, 2],
    "no answer": dict,
    "unknown status": lambda: lie(status="splendid"),
    "no plan": lambda: {key: value for key, value in TRUE.to_json().items() if key != "plan"},
    "plan over the budget": lambda: lie(plan=plain_plan(PROBLEM.graph).to_json(), cost_ns=None, peak_bytes=None),
    "plan for another graph": lambda: lie(plan=plain_plan(chain(7)).to_json()),
    "another problem's digest": lambda: lie(digest="0" * 64),
    "another budget": lambda: lie(budget_bytes=PROBLEM.budget_bytes + 1),
    "cost too low": lambda: lie(cost_ns=TRUE.cost_ns - 1),
    "peak too low": lambda: lie(peak_bytes=TRUE.peak_bytes - 1),
    "bound above cost": lambda: lie(bound_ns=TRUE.cost_ns + 1),
    "optimal above its bound": lambda: lie(status="optimal"),
    "infeasible though it is not": lambda: {"status": "infeasible", "method": "auto", "budget_bytes": 14},
    "infeasible with a plan": lambda: lie(status="infeasible"),
    "a step left out": lambda: lie(plan=Plan(TRUE.plan.steps[1:]).to_json()),
    "a step twice": lambda: lie(plan=Plan((*TRUE.plan.steps, TRUE.plan.steps[-1])).to_json()),
    "failed": lambda: lie(status="failed"),
    "the plan is text": lambda: lie(plan="compute everything"),
    "a cost of text": lambda: lie(cost_ns="low"),
    "ended yet running": lambda: lie(status="running", id=None),
}


FORGERIES: dict[str, Callable[[], Any]] = {
    "no certificate": lambda: None,
    "another problem's": lambda: proof_of(Problem(PROBLEM.graph, PROBLEM.budget_bytes + 1)),
    "multipliers from nowhere": lambda: {**proof_of(PROBLEM), "denominator": 1, "nodes": [["bound", [0, 10**6]]]},
    "that no plan fits": lambda: PairProof(problem_digest(PROBLEM), 0, ()).to_json(),
    "an empty leaf": lambda: {**proof_of(PROBLEM), "rows": [], "nodes": [["empty", []]]},
    "nonsense": lambda: {"by": "stages"},
}


def proof_of(problem: Problem) -> dict[str, Any]:
    """A certificate that is in order, of each op once."""
    last = problem.graph.ops - 1
    return StageProof(problem_digest(problem), (last // 2, last), (), (("memory", 1),), 1, (Leaf(()),)).to_json()


@pytest.mark.parametrize("name", FORGERIES)
def test_an_expensive_plan_is_not_optimal_because_the_server_says_so(
    name: str, here: Settings, no_solver: None
) -> None:
    """A valid plan with its own cost as its bound, and whatever certificate a server can make up for it."""
    again = plan_of(PROBLEM.graph, (0, *TRUE.plan.computes))
    cost, peak = verify(PROBLEM, again)
    assert cost > TRUE.cost_ns
    said = lie(
        plan=again.to_json(), cost_ns=cost, peak_bytes=peak, bound_ns=cost, status="optimal", limit=None, gap=0.0,
        message="No plan costs less.", proof=FORGERIES[name](),
    )  # fmt: skip
    with lying(in_turn(Said(200, said))) as server:
        answer = ask(server.url, here)
        later = ask(server.url, here)  # also from the memo
    for got in (answer, later):
        assert got.status is not Status.OPTIMAL
        assert got.bound_ns <= TRUE.cost_ns
        assert got.gap
        assert got.message != "No plan costs less."
        assert got.plan is not None
        if got.plan == again:
            assert (got.claimed_bound_ns, got.claimed_by) == (cost, "the planner")


def test_that_no_plan_fits_is_not_believed_without_a_certificate(here: Settings) -> None:
    """The next planner is asked; where nobody finds a plan, the claim is what is left, with who made it."""
    graph = hard_graph(12, 3)
    problem = Problem(graph, budget_at(graph, 0.02))
    said = {"status": "infeasible", "method": "auto", "budget_bytes": problem.budget_bytes}
    with lying(in_turn(Said(200, said))) as server:
        answer = planner_for(server.url, given=here).plan(problem, SolveOptions(time_limit_s=5))
    if answer.status is Status.INFEASIBLE:
        assert answer.claimed_by is None
        assert verify_answer(problem, answer).infeasible
    else:
        assert answer.plan is not None or answer.status is Status.NOTHING_FOUND


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_survived_and_strict_raises(
    name: str, here: Settings, no_solver: None, caplog: pytest.LogCaptureFixture
) -> None:
    with lying(in_turn(Said(200, LIES[name]()))) as server:
        answer = ask(server.url, here)
        with pytest.raises(InvalidResponse):
            ask(server.url, here, strict=True)
    assert answer.method == "greedy"
    verify(PROBLEM, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    assert "passed over" in caplog.text


SILENCES: dict[str, tuple[Script, type[ServiceError]]] = {
    "it hangs": (in_turn(Said(hang=True)), Unreachable),
    "it hangs up": (in_turn(Said(drop=True)), Unreachable),
    "the body is cut off": (in_turn(Said(200, TRUE.to_json(), cut=True)), Unreachable),
    "it is broken": (in_turn(Said(500, {"detail": "oh"})), ServiceError),
    "it is busy": (in_turn(Said(429, headers={"Retry-After": "9"})), ServiceError),
    "it wants a key": (in_turn(Said(401)), ServiceError),
    "it refuses": (in_turn(Said(422, {"detail": "format remat-graph/1 is too old"})), Refused),
    "it is something else": (in_turn(Said(200, raw=b"<html>welcome</html>")), InvalidResponse),
    "it never ends": (in_turn(Said(202, lie(status="running"))), Unreachable),
}


@pytest.mark.parametrize("name", first(4, SILENCES))
def test_a_silence_is_survived_and_strict_raises(name: str, here: Settings, no_solver: None) -> None:
    script, kind = SILENCES[name]
    with lying(script) as server:
        answer = ask(server.url, here, time_limit_s=0.3)
    verify(PROBLEM, answer.plan)
    with lying(script) as server, pytest.raises(kind):
        ask(server.url, here, time_limit_s=0.3, strict=True)


def test_nobody_at_the_port(here: Settings, no_solver: None, caplog: pytest.LogCaptureFixture) -> None:
    with lying(in_turn(Said(200))) as server:
        pass
    answer = ask(server.url, here)
    assert answer.method == "greedy"
    *_, failed, instead = (record.getMessage() for record in caplog.records)
    assert failed.startswith(f"ServicePlanner('{server.url}') gave no usable answer and is passed over: ")
    assert "Connection refused" in failed
    found = re.fullmatch(
        r"the plan is GreedyPlanner's instead: it costs at most (\S+) % more than the best plan", instead
    )
    assert found is not None, instead
    assert answer.cost_ns <= answer.bound_ns * (1 + float(found[1]) / 100)
    with pytest.raises(Unreachable, match=server.url):
        ask(server.url, here, strict=True)


def test_a_greedy_plan_is_not_remembered(here: Settings, no_solver: None) -> None:
    with lying(in_turn(Said(500))) as server:
        ask(server.url, here)
    with lying(in_turn(Said(200, TRUE.to_json()))) as server:
        assert ask(server.url, here).id == "s-1"


def test_a_method_asked_for_by_name_is_not_swapped_for_another(here: Settings, no_solver: None) -> None:
    script = in_turn(Said(422, {"detail": "unknown method 'magic'"}))
    with lying(script) as server, pytest.raises(Refused, match="magic"):
        ask(server.url, here, method="magic")


def test_past_its_time_a_solve_is_cancelled_and_its_best_plan_taken(here: Settings, no_solver: None) -> None:
    waiting = lie(status="running")
    del waiting["plan"]
    cancelled = lie(status="cancelled", limit="cancel")

    def script(asked: Asked) -> Said:
        return Said(200, cancelled) if asked.path.endswith("/s-1/cancel") else Said(202, waiting)

    with lying(script) as server:
        answer = ask(server.url, here, time_limit_s=0.3, patience_s=0.2)
    assert (answer.status, answer.plan) == (Status.CANCELLED, TRUE.plan)


def test_offline_asks_nobody(tmp_path: Path, no_solver: None) -> None:
    with lying(in_turn(Said(200, TRUE.to_json()))) as server:
        env = {"REMAT_BASE_URL": server.url, "REMAT_OFFLINE": "1"}
        answer = planner_for(given=settings(cache_dir=tmp_path, environ=env)).plan(PROBLEM)
        assert answer.method == "greedy"
        assert not server.asked
        env["REMAT_OFFLINE"] = "0"
        answer = planner_for(given=settings(cache_dir=tmp_path, environ=env)).plan(PROBLEM)
    assert answer.id == "s-1"


def test_the_local_solver_is_found_by_its_entry_point(here: Settings) -> None:
    roomy = Problem(PROBLEM.graph, 1000)
    answer = planner_for("local", given=here).plan(roomy)
    assert answer.status is Status.OPTIMAL
    assert isinstance(planner_for("local", given=here).asked, FallbackPlanner)
    assert LocalPlanner().plan(roomy).cost_ns == roomy.graph.total_cost_ns


def test_without_a_solver_local_says_what_to_do(here: Settings, no_solver: None) -> None:
    with pytest.raises(InvalidData, match=r"pip install '\.\[solver\]'"):
        planner_for("local", given=here)
    assert planner_for(given=here).plan(PROBLEM).method == "greedy"


class Own:
    """A planner from outside the house."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("bad", [None, replace(TRUE, digest="1" * 64), RuntimeError("boom"), "a plan"])
def test_a_planner_from_outside_is_checked_like_any_other(bad: Any, here: Settings) -> None:
    assert planner_for(Own(bad), given=here).plan(PROBLEM).plan is not None
    with pytest.raises((InvalidResponse, RuntimeError)):
        planner_for(Own(bad), given=here, strict=True).plan(PROBLEM)
    assert planner_for(Own(TRUE), given=here, strict=True).plan(PROBLEM).plan == TRUE.plan
    assert isinstance(Own(TRUE), Planner)
    assert isinstance(GreedyPlanner(), Planner)


@pytest.mark.parametrize("word", ["magic", "localhost:80", 7, object()])
def test_what_is_no_planner_is_refused(word: Any, here: Settings) -> None:
    with pytest.raises(InvalidData):
        planner_for(word, given=here)


def test_infeasible_is_believed_where_it_is_true_and_raised_where_a_plan_is_needed(here: Settings) -> None:
    tight = Problem(PROBLEM.graph, working_set(PROBLEM.graph)[1] - 1)
    answer = planner_for("greedy", given=here).plan(tight)
    assert answer.status is Status.INFEASIBLE
    with pytest.raises(BudgetTooSmall, match=r"alone needs .* is enough") as caught:
        plan_or_raise(answer)
    assert caught.value.answer is answer
    assert "claims" not in str(caught.value)
    with pytest.raises(BudgetTooSmall, match="as rumour claims without a certificate"):
        plan_or_raise(replace(answer, claimed_by="rumour"))
    nothing = Answer(Status.NOTHING_FOUND, "auto", 5, message="No plan was found.")
    with pytest.raises(NothingFound, match="No plan was found"):
        plan_or_raise(nothing)
    assert plan_or_raise(TRUE) is TRUE


def test_a_quick_start_takes_the_first_plan_of_a_running_solve(here: Settings) -> None:
    """Where no greedy walk fits: the solve is looked at until it has a plan, and left; no solve of seconds is asked."""
    problem = Problem(graph_of(COSTS, SIZES, READS), 27)
    found = LocalPlanner().plan(problem)
    running = Answer(Status.RUNNING, "auto", 27, id="s-1", cache="miss")
    told = replace(running, cost_ns=found.cost_ns, bound_ns=sum(COSTS))
    ended = replace(found, status=Status.CANCELLED, limit="cancel", id="s-1", cache="miss", proof=None)
    ended = replace(ended, bound_ns=sum(COSTS), least_budget_bound_bytes=None)
    script = in_turn(*(Said(202, answer.to_json()) for answer in (running, running, told)), Said(200, ended.to_json()))
    with lying(script) as server:
        planner = planner_for(server.url, given=here, timeouts=QUICK)
        answer = quick_answer(problem, planner.asked, SolveOptions(time_limit_s=60))
    assert answer.plan == found.plan
    assert [(asked.method, asked.path.partition("?")[0]) for asked in server.asked] == [
        ("POST", "/v1/solves"),
        ("GET", "/v1/solves/s-1"),
        ("GET", "/v1/solves/s-1"),
        ("POST", "/v1/solves/s-1/cancel"),
    ]


def test_a_quick_start_takes_what_is_remembered_here(here: Settings) -> None:
    planner = planner_for("local", given=here).asked
    found = planner.plan(PROBLEM)
    answer = quick_answer(PROBLEM, planner, SolveOptions(time_limit_s=60))
    assert answer.cost_ns == found.cost_ns
    assert answer.method == found.method != "greedy"


READS = [[], [0], [0, 1], [2], [0, 1, 2], [0, 1, 2], [1, 4], [2], [1], [6, 7], [4], [3, 7], [5, 6, 9], [5, 10]]
COSTS, SIZES = [2, 6, 5, 8, 9, 3, 8, 8, 9, 3, 5, 4, 3, 9], [6, 5, 6, 8, 5, 5, 7, 3, 8, 9, 4, 4, 4, 6]
