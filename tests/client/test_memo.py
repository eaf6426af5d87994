"""What is kept on a machine: answers, none of which is unverified; nothing of a killed writer; no more than a bound."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from drawn import layered
from remat.planning import folder as folders
from remat.planning.folder import ABANDONED_S, BLOCK, EVERY_S, UNUSED_S, trim, write_whole
from remat.planning.greedy import greedy_answer
from remat.planning.memo import Memo
from remat.planning.profiles import DiskProfiles, Profile
from remat_ir import (
    Answer,
    Graph,
    Link,
    Plan,
    Problem,
    Status,
    budget_at,
    graph_of,
    plain_plan,
    problem_digest,
    verify,
    verify_answer,
)
from remat_ir.restrictions import NO_TRANSFERS, ONE_PER_STAGE
from remat_solver import solve
from service.serving import training_graph


def chain(layers: int = 6, fixed: int = 0) -> Graph:
    return graph_of(
        [3] * 2 * layers, [2] * 2 * layers, layered(layers, read_inputs=False), backward_from=layers, fixed_bytes=fixed
    )


PROBLEM = Problem(chain(), 10)


def answered(problem: Problem = PROBLEM, **more: object) -> Answer:
    return replace(greedy_answer(problem), method="auto", **more)


@pytest.fixture
def memo(tmp_path: Path) -> Memo:
    return Memo(tmp_path)


def entry(memo: Memo) -> Path:
    (path,) = memo.folder.glob("*/*.json")
    return path


def test_what_is_put_is_got_unless_there_is_more_time_and_a_gap(memo: Memo) -> None:
    answer = answered(limit="time")
    assert memo.get(PROBLEM, "auto", 5, 0.0) is None
    memo.put(PROBLEM, "auto", answer, 5.0)
    got = memo.get(PROBLEM, "auto", 5, 0.0)
    assert (got.plan, got.cost_ns, got.cache) == (answer.plan, answer.cost_ns, "hit")
    assert memo.get(PROBLEM, "chen-sqrt", 5, 0.0) is None
    assert memo.get(Problem(PROBLEM.graph, 11), "auto", 5, 0.0) is None
    assert answer.gap > 0
    assert memo.get(PROBLEM, "auto", 6, 0.0) is None
    assert memo.get(PROBLEM, "auto", None, 0.0) is None
    assert memo.get(PROBLEM, "auto", 6, answer.gap) is not None


def test_what_was_said_without_transfers_is_no_answer_where_they_are_looked_at(memo: Memo) -> None:
    """An entry of a solver that looked at recomputations only: "optimal" there, and given out for good."""
    problem = Problem(chain().with_link(Link(10**9, 10**9)), 10)
    found = solve(problem, method="milp-tight", max_gap=0.0, time_limit_s=60)
    assert (found.status, found.restricted_to) == (Status.OPTIMAL, (ONE_PER_STAGE, NO_TRANSFERS))
    memo.put(problem, "milp-tight", found, 5.0)
    assert memo.get(problem, "milp-tight", 5, 0.0) is not None
    memo.put(problem, "auto", replace(found, method="auto", restricted_to=(NO_TRANSFERS,)), 5.0)
    assert memo.get(problem, "auto", 5, 0.5) is None
    memo.put(problem, "auto", answered(problem), 5.0)
    kept = memo.get(problem, "auto", 5, 0.5)
    assert kept.restricted_to == ()


def test_fixed_bytes_do_not_part_equal_problems(memo: Memo) -> None:
    answer = answered()
    memo.put(PROBLEM, "auto", answer, 5.0)
    moved = Problem(chain(fixed=1000), 1010)
    got = memo.get(moved, "auto", 0.000001, 0.99)
    assert got.peak_bytes == answer.peak_bytes + 1000
    assert (got.budget_bytes, got.digest) == (1010, problem_digest(moved))
    verify(moved, got.plan, cost_ns=got.cost_ns, peak_bytes=got.peak_bytes)


def test_a_worse_answer_does_not_take_the_place_of_a_better(memo: Memo) -> None:
    best = answered()
    memo.put(PROBLEM, "auto", best, 5.0)
    worse = replace(best, cost_ns=best.cost_ns + 1)
    memo.put(PROBLEM, "auto", worse, 50.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99).cost_ns == best.cost_ns
    memo.put(PROBLEM, "auto", Answer(Status.INFEASIBLE, "auto", PROBLEM.budget_bytes), 1.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99).cost_ns == best.cost_ns  # a claim without a certificate
    tight = replace(PROBLEM, budget_bytes=0)
    memo.put(tight, "auto", Answer(Status.INFEASIBLE, "auto", 0), 1.0)
    assert memo.get(tight, "auto", 100.0, 0.0).status is Status.INFEASIBLE


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_file_cut_off_anywhere_is_a_miss(memo: Memo, cut: int) -> None:
    memo.put(PROBLEM, "auto", answered(), 5.0)
    path = entry(memo)
    path.write_bytes(path.read_bytes()[:cut])
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is None
    memo.put(PROBLEM, "auto", answered(), 5.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is not None


def test_any_flipped_bit_is_a_miss_or_changes_nothing(memo: Memo) -> None:
    answer = answered()
    memo.put(PROBLEM, "auto", answer, 5.0)
    path = entry(memo)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        got = memo.get(PROBLEM, "auto", 0.0001, 0.99)
        assert got is None or (got.plan, got.cost_ns) == (answer.plan, answer.cost_ns)


def test_a_plan_that_is_wrong_under_a_right_checksum_is_a_miss(tmp_path: Path, memo: Memo) -> None:
    memo.put(PROBLEM, "auto", replace(answered(), plan=plain_plan(PROBLEM.graph)), 5.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is None
    good = answered()
    memo = Memo(tmp_path / "other")
    memo.put(PROBLEM, "auto", replace(good, plan=Plan(good.plan.steps[:-3])), 5.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is None


def test_a_bound_above_the_cost_of_its_plan_is_an_error_and_never_a_result(
    memo: Memo, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answered()
    memo.put(PROBLEM, "auto", replace(answer, bound_ns=(answer.cost_ns or 0) + 1), 5.0)
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is None
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert f"is above the cost of its plan, {answer.cost_ns} ns" in record.getMessage()
    assert str(entry(memo)) in record.getMessage()


def test_an_entry_under_another_problems_name_is_a_miss(memo: Memo) -> None:
    memo.put(PROBLEM, "auto", answered(), 5.0)
    other = Problem(chain(7), 12)
    memo.put(other, "auto", answered(other), 5.0)
    one, two = sorted(memo.folder.glob("*/*.json"))
    two.write_bytes(one.read_bytes())
    one.unlink()
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is None
    assert memo.get(other, "auto", 0.0001, 0.99) is None


def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path: Path, memo: Memo) -> None:
    memo.put(PROBLEM, "auto", answered(), 5.0)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    Memo(blocked).put(PROBLEM, "auto", answered(), 5.0)
    assert Memo(blocked).get(PROBLEM, "auto", 0.0001, 0.99) is None
    if os.geteuid() != 0:  # root writes everywhere
        os.chmod(tmp_path, 0o500)
        try:
            memo.put(Problem(PROBLEM.graph, 12), "auto", answered(), 5.0)
            assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is not None
        finally:
            os.chmod(tmp_path, 0o700)


def test_writers_and_readers_at_once_see_whole_entries(memo: Memo) -> None:
    answers = [answered(), replace(answered(), seconds=99.0)]

    def write() -> None:
        for i in range(40):
            memo.put(PROBLEM, "auto", answers[i % 2], float(i))

    def read() -> None:
        for _ in range(80):
            got = memo.get(PROBLEM, "auto", 0.0001, 0.99)
            assert got is None or got.plan == answers[0].plan

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda work: work(), (write, write, read, read)))
    assert memo.get(PROBLEM, "auto", 0.0001, 0.99) is not None
    assert not list(memo.folder.glob("*/.writing-*"))
    assert json.loads(entry(memo).read_text())["format"] == "remat-memo/1"


def test_an_entry_serves_other_costs_and_budgets_with_its_certificate(memo: Memo) -> None:
    """The plan is replayed and the certificate carried over to the problem at hand; beyond the gap it is a miss."""
    graph = training_graph(9)
    problem = Problem(graph, budget_at(graph, 0.7))
    solved = solve(problem, max_gap=0.01, time_limit_s=20)
    assert solved.proof is not None
    memo.put(problem, "auto", solved, 20.0)
    noisy = replace(graph, op_cost_ns=tuple(c + c * (i % 5 - 2) // 400 for i, c in enumerate(graph.op_cost_ns)))
    for other in (Problem(noisy, problem.budget_bytes), Problem(graph, problem.budget_bytes + 9)):
        assert memo.get(other, "auto", 1.0, 0.02) is None
        answer = memo.near(other, "auto", 0.02)
        assert answer.proof is not None
        verdict = verify_answer(other, answer)
        assert (verdict.bound_ns, verdict.cost_ns) == (answer.bound_ns, answer.cost_ns)
        assert memo.near(other, "auto", 0.0) is None
        assert memo.near(other, "greedy", 0.02) is None
    assert memo.near(Problem(training_graph(8), problem.budget_bytes), "auto", 0.9) is None
    wilder = replace(graph, op_cost_ns=tuple(c * (1 + 9 * (i % 2)) for i, c in enumerate(graph.op_cost_ns)))
    wild = memo.near(Problem(wilder, problem.budget_bytes), "auto", 0.01)
    assert wild is None or verify_answer(Problem(wilder, problem.budget_bytes), wild).bound_ns == wild.bound_ns


def test_an_entry_with_a_bound_that_nobody_certifies_is_not_optimal(memo: Memo) -> None:
    """Also under a right checksum: what a liar once said stays a claim."""
    answer = answered()
    memo.put(PROBLEM, "auto", replace(answer, status=Status.OPTIMAL, bound_ns=answer.cost_ns, gap=0.0), 5.0)
    again = memo.get(PROBLEM, "auto", 5.0, 0.0)
    assert again is None or (again.status is Status.FEASIBLE and again.claimed_bound_ns == answer.cost_ns)


WRITER = """
import os, sys, time
from pathlib import Path
from remat.planning.folder import write_whole
os.fsync = lambda _: (print("writing", flush=True), time.sleep(600))
write_whole(Path(sys.argv[1]) / "ab" / "entry.json", b"{}")
"""


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != ".trimmed")


def a_day_later(folder: Path) -> None:
    aged(folder / ".trimmed", EVERY_S + 1)


def test_what_a_killed_writer_leaves_is_deleted(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (left,) = files(tmp_path)
    assert left.startswith(".writing-")
    table = DiskProfiles(tmp_path)
    table.put("cpu", {"one": Profile(1000, 0)})
    assert left in files(tmp_path)  # it may be of a writer that is at work
    aged(tmp_path / "ab" / left, ABANDONED_S + 1)
    a_day_later(tmp_path)
    table.put("cpu", {"two": Profile(1000, 0)})
    assert left not in files(tmp_path)
    assert set(table.get("cpu", ["one", "two"])) == {"one", "two"}


def test_a_file_is_readable_as_any_other_new_one(tmp_path: Path) -> None:
    """By the users of a machine or of a shared folder, if the process's umask lets them."""
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "a", b"x")
        os.umask(0o007)
        write_whole(tmp_path / "b", b"x", replace_existing=False)
    finally:
        os.umask(before)
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in "ab"] == ["0o644", "0o660"]


def test_a_folder_that_is_full_loses_what_was_used_least_lately(tmp_path: Path) -> None:
    for number in range(20):
        write_whole(tmp_path / "ab" / f"{number:02}.json", b"x")
        aged(tmp_path / "ab" / f"{number:02}.json", 3 * EVERY_S - number)
    assert folders.used(tmp_path / "ab" / "03.json") == b"x"
    assert trim(tmp_path, most_bytes=16 * BLOCK) == 8
    assert files(tmp_path) == ["03.json", *(f"{n:02}.json" for n in range(9, 20))]
    write_whole(tmp_path / "ab" / "more.json", b"x" * 20 * BLOCK)
    assert trim(tmp_path, most_bytes=16 * BLOCK) == 0  # once a day
    a_day_later(tmp_path)
    assert trim(tmp_path, most_bytes=16 * BLOCK) > 0


def test_what_nobody_uses_is_deleted(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_whole(tmp_path / name, b"x")
    aged(tmp_path / "old", UNUSED_S + 1)
    assert trim(tmp_path) == 1
    assert files(tmp_path) == ["new"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    write_whole(tmp_path / "entry", b"x")
    tmp_path.chmod(0o500)
    try:
        assert trim(tmp_path, most_bytes=0) == 0
    finally:
        tmp_path.chmod(0o700)
    assert trim(tmp_path / "entry" / "none") == 0


def test_answers_of_the_memo_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "EVERY_S", -1)
    monkeypatch.setattr(folders.trim, "__defaults__", (12 * BLOCK,))
    memo = Memo(tmp_path)
    for size in range(1, 30):
        graph = Graph(op_cost_ns=(1, 1), op_inputs=((), (0,)), value_op=(0, 1), value_bytes=(size, 1), keep=(1,))
        problem = Problem(graph, 100)
        memo.put(problem, "greedy", greedy_answer(problem), None)
    assert len(files(tmp_path)) <= 12
    assert memo.get(problem, "greedy", None, 1.0) is not None


def test_profiles_are_written_without_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    table = DiskProfiles(tmp_path)
    offered = {f"kernel {n}": Profile(1000 + n, 0) for n in range(50)}
    assert table.put("cpu", offered) == offered
    assert not waits
    assert table.get("cpu", offered) == offered


def test_a_backend_remembers_the_graphs_that_dynamo_has() -> None:
    backend = remat.backend("100%", planner="greedy")
    model = torch.compile(nn.Linear(4, 4), backend=backend, dynamic=False)
    for rows in (2, 3, 4, 5):
        model(torch.ones(rows, 4)).sum().backward()
    assert len(backend.answers) == len(backend.graphs) == 4
    torch._dynamo.reset()
    gc.collect()
    assert len(backend.answers) == len(backend.graphs) == 0
