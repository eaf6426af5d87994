"""What is kept on a machine: nothing of a killed writer, nothing that is not used, and no more than a bound."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.planning import folder as folders
from remat.planning.folder import ABANDONED_S, BLOCK, EVERY_S, UNUSED_S, trim, write_whole
from remat.planning.greedy import greedy_answer
from remat.planning.memo import Memo
from remat.planning.profiles import DiskProfiles, Profile
from remat_ir import Graph, Problem

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
    for path in tmp_path.rglob("*.json"):
        path.write_bytes(b"")  # as after a loss of power
    assert table.get("cpu", offered) == {}
    assert table.put("cpu", offered) == offered
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
