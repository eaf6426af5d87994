"""The engines agree, end as they should, stream what they find, and leave nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import remat_solver
from remat_solver.backends import engine as engine_module
from remat_solver.backends.engine import ENGINES, Engine, last_word
from remat_solver.deadline import Deadline
from remat_solver.program import Builder, Floats, Program, Term
from solver.processes import environment, printed
from solver.programs import brute_optimum, hard_program, random_program
from tiers import first


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """One child of each kind for all short runs: what a child served before must not matter."""
    held = {name: Engine(name) for name in ENGINES}
    yield held
    for engine in held.values():
        engine.close()


@pytest.mark.parametrize("name", ENGINES)
def test_agrees_with_brute_force(engines: dict[str, Engine], name: str) -> None:
    seen = {"optimal": 0, "infeasible": 0}
    for seed in range(25):
        program = random_program(seed)
        expected = brute_optimum(program)
        outcome = engines[name].run(program, deadline=Deadline(30))
        assert outcome.status == ("infeasible" if expected is None else "optimal"), (seed, outcome)
        seen[outcome.status] += 1
        if expected is not None:
            assert outcome.x is not None
            assert outcome.objective == pytest.approx(expected, abs=1e-6), seed
            assert outcome.bound == pytest.approx(expected, abs=1e-5), seed
            assert program.violation(outcome.x) < 1e-5
    assert min(seen.values()) > 2, "the draw should hold both endings"


@pytest.mark.parametrize(("name", "seconds"), first(1, [("highs", 2.0), ("cbc", 4.0)]))
def test_stops_at_the_deadline_with_what_it_has(name: str, seconds: float) -> None:
    program = hard_program()
    with Engine(name) as engine:
        engine.run(random_program(1), deadline=Deadline(60))  # the child has started
        news: list[Floats | None] = []
        outcome = engine.run(program, deadline=Deadline(seconds), on_improvement=lambda x, _: news.append(x))
    assert news
    assert outcome.objective >= outcome.bound
    if name == "cbc":  # it writes its solution when it ends, and may be too late
        assert outcome.status in ("feasible", "nothing_found")
        return
    assert outcome.status == "feasible"
    assert outcome.x is not None
    assert program.violation(outcome.x) < 1e-4
    assert any(x is not None for x in news)


@pytest.mark.parametrize("name", first(1, ENGINES))
def test_stops_when_told(name: str) -> None:
    program = hard_program()
    with Engine(name) as engine:
        began: list[float] = []

        def stopped() -> bool:
            began.append(time.monotonic())
            return began[-1] - began[0] > 0.5

        outcome = engine.run(program, deadline=Deadline(60), stopped=stopped)
        assert sum(asked - began[0] > 0.5 for asked in began) == 1  # told once, it asks no more
        assert outcome.status in ("feasible", "nothing_found")
        small = random_program(1)
        again = engine.run(small, deadline=Deadline(30))
        assert again.objective == pytest.approx(brute_optimum(small))


def test_a_turn_ends_an_integer_program_and_a_tree(engines: dict[str, Engine]) -> None:
    program, engine = hard_program(), engines["highs"]
    outcome = engine.run(program, deadline=Deadline(60), turn_s=0.1)
    assert outcome.status in ("feasible", "nothing_found")
    root = engine.lp(program, deadline=Deadline(60)).bound
    turns = (1e-3, 0.3, 1e-3)
    grown = [engine.tree(program, cutoff=1e6, deadline=Deadline(60), stopped=None, turn_s=turn) for turn in turns]
    assert all(outcome.tree is not None and outcome.x is None for outcome in grown)
    # its turn was over, not its time
    assert not any(outcome.tree.late for outcome in grown if outcome.tree is not None)
    assert grown[0].bound == pytest.approx(root)
    assert root < grown[1].bound <= 1e6
    # asked for again it grows on
    assert grown[2].bound >= grown[1].bound
    late = engine.tree(program, cutoff=1e6, deadline=Deadline(1), stopped=None)
    assert late.tree.late
    assert late.x is None
    # no node is left for which there would be time afterwards
    slow = engine.tree(hard_program(40), cutoff=1e6, deadline=Deadline(30), stopped=None, node_s=10.0)
    assert slow.tree is not None
    assert slow.tree.late
    assert len(slow.tree.column) <= 3


def test_a_cut_closes_what_a_point_lacks_a_hundredth_of(engines: dict[str, Engine]) -> None:
    """Equal blocks of which almost one more would fit: without a cut there are leaves for most choices of blocks."""
    factor = np.array([2.0**-20])
    program = _knapsack([1.0] * 12 + [2.0], 6 - 5000 * factor[0])
    cutoff = 5 * float(program.cost[0])
    found = engines["highs"].tree(program, cutoff=cutoff, deadline=Deadline(60), stopped=None, factor=factor)
    assert found.tree.cuts
    assert found.bound == pytest.approx(cutoff, rel=1e-5)
    assert len(found.tree.leaf_start) < 50


@pytest.mark.parametrize("name", ENGINES)
def test_takes_a_start(engines: dict[str, Engine], name: str) -> None:
    program = next(p for p in map(random_program, range(9)) if brute_optimum(p) is not None)
    best = engines[name].run(program, deadline=Deadline(30))
    again = engines[name].run(program, deadline=Deadline(30), start=best.x)
    assert again.status == "optimal"
    assert again.objective == pytest.approx(best.objective)
    assert best.x is not None
    partly = np.where(np.arange(program.columns) % 2, np.nan, best.x)
    assert engines[name].run(program, deadline=Deadline(30), start=partly).objective == pytest.approx(best.objective)


@pytest.mark.parametrize(("lower", "status"), [(-1.0, "optimal"), (1.0, "infeasible")])
def test_a_program_without_columns_has_the_empty_point_if_its_rows_allow_it(
    engines: dict[str, Engine], lower: float, status: str
) -> None:
    builder = Builder()
    builder.add_rows(1, [], lower=lower, upper=2.0)
    program = builder.program(offset=3.0)
    for outcome in (engines["highs"].run(program), engines["highs"].lp(program)):
        assert outcome.status == status
        if status == "optimal":
            assert outcome.x is not None
            assert outcome.objective == outcome.bound == 3.0


def test_refuses_a_start_of_the_wrong_length(engines: dict[str, Engine]) -> None:
    with pytest.raises(ValueError, match="8 numbers"):
        engines["highs"].run(random_program(0), start=np.zeros(3))


def test_no_time_left_is_an_answer(engines: dict[str, Engine]) -> None:
    spent = Deadline(0.0)
    assert engines["highs"].run(random_program(0), deadline=spent).status == "nothing_found"


def test_what_an_engine_refuses_is_a_failure_that_says_so(engines: dict[str, Engine]) -> None:
    outcome = engines["highs"].run(random_program(0), deadline=Deadline(20), seed=-1)
    assert outcome.status == "failed"
    assert "option 'random_seed' cannot be -1" in outcome.message


@pytest.mark.parametrize("name", first(1, ENGINES))
def test_a_killed_child_is_a_failure_and_the_next_run_works(name: str) -> None:
    with Engine(name) as engine:
        began: list[float] = []

        def kill_once() -> bool:
            if not began:
                began.append(time.monotonic())
            elif began[0] > 0 and time.monotonic() - began[0] > 0.5:
                os.kill(engine.pid, signal.SIGKILL)
                began[0] = -1.0
            return False

        outcome = engine.run(hard_program(), deadline=Deadline(30), stopped=kill_once)
        assert outcome.status in ("failed", "feasible")
        assert "signal 9" in outcome.message
        small = random_program(1)
        assert engine.run(small, deadline=Deadline(30)).objective == pytest.approx(brute_optimum(small))


def test_a_child_that_reads_nothing_until_its_deadline_was_out_of_time() -> None:
    """It is killed, and that is no want of memory."""
    with Engine("highs") as engine:
        child = psutil.Process(engine.pid)
        child.suspend()
        outcome = engine.run(wide_program(20_000), deadline=Deadline(0.5))
        assert outcome.status == "nothing_found"
        assert outcome.message == "the time was up"
        assert not outcome.out_of_memory
        child.wait(20)
        small = random_program(1)
        assert engine.run(small, deadline=Deadline(30)).objective == pytest.approx(brute_optimum(small))


def test_a_run_does_not_wait_for_the_end_of_its_child_and_close_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of half a gigabyte takes 0.1 s to end, which is no part of a time limit."""
    may_end = threading.Event()
    ended = engine_module._end

    def late(*given: Any) -> None:
        may_end.wait(60)
        ended(*given)

    monkeypatch.setattr(engine_module, "_end", late)
    with Engine("highs") as engine:
        child = psutil.Process(engine.pid)
        outcome = engine.run(hard_program(), deadline=Deadline(60), stopped=lambda: True)
        assert outcome.message
    assert not may_end.is_set()
    may_end.set()
    child.wait(20)
    closed = Engine("highs")
    child = psutil.Process(closed.pid)
    closed.close()
    assert not child.is_running()


@pytest.mark.parametrize("name", first(1, ["cbc", "highs"]))
def test_no_orphan_stays_when_the_parent_is_killed(name: str) -> None:
    script = textwrap.dedent(
        f"""
        from remat_solver.backends.engine import Engine
        from remat_solver.deadline import Deadline
        from solver.programs import hard_program
        Engine({name!r}).run(hard_program(), deadline=Deadline(60), stopped=lambda: print("running", flush=True),
                             on_improvement=lambda *news: print("news", flush=True))
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment())
    try:
        parent.stdout.readline()  # the engine runs
        family = psutil.Process(parent.pid).children(recursive=True)
        for _ in range(100):
            if len(family) >= (2 if name == "cbc" else 1):
                break
            time.sleep(0.1)
            family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == (2 if name == "cbc" else 1)
        assert {os.getpgid(member.pid) for member in family} == {os.getpgid(parent.pid)}
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=20)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE], gone


def test_the_worker_imports_only_its_own_engine() -> None:
    house = str(Path(remat_solver.__file__).parent)
    script = (
        f"import sys; sys.argv = ['worker', {house!r}];"
        + engine_module._WORKER.replace("main(sys.argv[1:])", "").replace("\n", ";").rstrip(";")
        + ";print([m for m in ('highspy', 'pulp', 'numba', 'networkx', 'scipy') if m in sys.modules])"
    )
    assert printed(script).strip() == "[]"


def wide_program(columns: int) -> Program:
    """A knapsack with so many items, and that many rows more."""
    builder = Builder()
    weights = 1.0 + np.arange(columns) % 97
    x = builder.variables(columns, cost=-weights)
    builder.add_rows(1, [Term(0, x, weights)], upper=10.0)
    rows = np.arange(columns - 1)
    builder.add_rows(columns - 1, [Term(rows, x[1:]), Term(rows, x[:-1])], upper=1.0)
    return builder.program()


@pytest.mark.parametrize("megabytes", first(1, [60, 30, 90]))
def test_memory_limit_is_a_failure_not_a_crash(megabytes: int) -> None:
    program = wide_program(400_000)
    with Engine("highs", memory_bytes=megabytes << 20) as engine:
        outcome = engine.run(program, deadline=Deadline(60))
        assert outcome.status == "failed"
        assert outcome.out_of_memory


@pytest.mark.thorough
def test_an_engine_that_ran_out_of_memory_serves_on() -> None:
    with Engine("highs", memory_bytes=200 << 20) as engine:
        assert engine.run(wide_program(2_000_000), deadline=Deadline(60)).out_of_memory
        assert engine.run(random_program(0), deadline=Deadline(20)).status in ("optimal", "infeasible")


def test_engines_are_limited_unless_told_otherwise() -> None:
    with Engine("highs") as engine:
        assert engine.pid is not None
        limit, _ = psutil.Process(engine.pid).rlimit(resource.RLIMIT_DATA)
        for _ in range(100):
            if limit > 0:
                break
            time.sleep(0.05)
            limit, _ = psutil.Process(engine.pid).rlimit(resource.RLIMIT_DATA)
        assert 2**30 <= limit <= psutil.virtual_memory().total


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine must be one of highs, cbc, not 'glpk'"):
        Engine("glpk")


def test_lp_gives_duals_whose_bound_needs_no_trust(engines: dict[str, Engine]) -> None:
    children = set()
    for seed in range(6):
        program = random_program(seed)
        outcome = engines["highs"].lp(program, deadline=Deadline(20))
        children.add(engines["highs"].pid)
        if outcome.status == "infeasible":
            assert brute_optimum(program) is None
            continue
        assert outcome.status == "optimal"
        assert outcome.row_dual is not None
        assert program.dual_bound(outcome.row_dual) == pytest.approx(outcome.objective, abs=1e-6)
        best = brute_optimum(program)
        noise = np.random.default_rng(seed).normal(size=program.rows)
        for scale in (0.01, 1.0, 100.0):
            bound = program.dual_bound(outcome.row_dual + scale * noise)
            assert bound <= outcome.objective + 1e-9
            assert best is None or bound <= best
    assert len(children) == 1, "one child serves them all"


def _knapsack(weights: list[float], room: float) -> Program:
    builder = Builder()
    x = builder.variables(len(weights), cost=[-1.5 * w for w in weights])
    builder.add_rows(1, [Term(np.zeros(len(weights), dtype=int), x, weights)], upper=room)
    return builder.program()


@pytest.mark.parametrize("left_s", first(1, [0.2, float("inf"), 0.01, 1.0, 5.0, 60.0]))
@pytest.mark.parametrize(("name", "kind"), [("highs", "tree"), *((name, "solve") for name in ENGINES)])
def test_the_last_word_of_an_engine_lies_before_its_deadline(name: str, kind: str, left_s: float) -> None:
    """What it may take lies ahead of the deadline but for a tenth of a second, and is a part of what is left."""
    ahead_s, grace_s = last_word(name, kind, left_s)
    assert 0 < ahead_s <= left_s / 4
    assert ahead_s <= grace_s <= ahead_s + 0.1
    assert grace_s <= 1.51
    if left_s > 10:
        assert grace_s >= 0.29
