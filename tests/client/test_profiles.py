"""The tables of measured costs: the first writer wins, on disk and at the service, and a broken entry is a miss."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client.liar import Asked, Said, in_turn, lying
from remat.planning.http import Http, Timeouts
from remat.planning.planner import planner_for
from remat.planning.profiles import DiskProfiles, Profile, ProfileTable, SharedProfiles
from remat.planning.sources import ServicePlanner
from remat.settings import settings

A, B, C = Profile(10, 0), Profile(20, 5), Profile(30, 7)


def table_of(rows: dict[str, list[int]]) -> Any:
    """A service's table, as the contract has it: the first writer wins."""

    def script(asked: Asked) -> Said:
        if asked.path == "/v1/profiles:lookup":
            found = {key: rows[key] for key in asked.body["signatures"] if key in rows}
        else:
            found = {key: rows.setdefault(key, row) for key, row in asked.body["profiles"].items()}
        return Said(200, {"profiles": found})

    return script


@pytest.fixture
def table(tmp_path: Path) -> ProfileTable:
    return DiskProfiles(tmp_path)


def test_the_first_writer_wins(table: ProfileTable) -> None:
    assert table.get("cpu", ["a"]) == {}
    assert table.put("cpu", {"a": A, "b": B}) == {"a": A, "b": B}
    assert table.put("cpu", {"a": C, "c": C}) == {"a": A, "c": C}
    assert table.get("cpu", ["a", "b", "c", "d"]) == {"a": A, "b": B, "c": C}
    assert table.get("cuda", ["a"]) == {}


def test_many_writers_agree_on_one(tmp_path: Path) -> None:
    def write(number: int) -> Profile:
        return DiskProfiles(tmp_path).put("cpu", {"a": Profile(number, 0)})["a"]

    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(write, range(20)))) == 1
    assert not list(tmp_path.glob("*/.writing-*"))


def test_a_file_system_without_links_keeps_profiles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As object storage and shares of Windows are mounted."""

    def link(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    assert DiskProfiles(tmp_path).put("cpu", {"a": A}) == {"a": A}
    assert DiskProfiles(tmp_path).put("cpu", {"a": B, "b": B}) == {"a": A, "b": B}
    assert DiskProfiles(tmp_path).get("cpu", ["a", "b"]) == {"a": A, "b": B}
    assert not list(tmp_path.glob("*/.writing-*"))


@pytest.mark.parametrize("text", ["", "{", '{"format": "remat-profile/1"}', '{"format": "other"}'])
def test_a_broken_entry_is_a_miss_and_is_mended(tmp_path: Path, text: str) -> None:
    disk = DiskProfiles(tmp_path)
    disk.put("cpu", {"a": A})
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(text)
    assert disk.get("cpu", ["a"]) == {}
    assert disk.put("cpu", {"a": B}) == {"a": B}
    assert disk.get("cpu", ["a"]) == {"a": B}


def test_numbers_out_of_range_are_a_miss(tmp_path: Path) -> None:
    disk = DiskProfiles(tmp_path)
    disk.put("cpu", {"a": A})
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(path.read_text().replace("10", "-10"))
    assert disk.get("cpu", ["a"]) == {}


async def _at_once(_: float) -> None:
    pass


def shared(url: str, folder: Path) -> SharedProfiles:
    quick = Timeouts(connect=0.5, read=0.5, write=0.5)
    return SharedProfiles(Http(url, timeouts=quick, sleep=_at_once), DiskProfiles(folder))


def test_what_the_service_has_stands_over_this_machine(tmp_path: Path) -> None:
    rows: dict[str, list[int]] = {"a": [1, 2]}
    DiskProfiles(tmp_path).put("cpu", {"a": A, "b": B})
    with lying(table_of(rows)) as server:
        table = shared(server.url, tmp_path)
        assert table.get("cpu", ["a", "b", "c"]) == {"a": Profile(1, 2), "b": B}
        assert rows["b"] == [20, 5]  # what only this machine knew is shared from now on
        assert table.put("cpu", {"a": C, "c": C}) == {"a": Profile(1, 2), "c": C}


def test_without_the_service_the_disk_serves(tmp_path: Path) -> None:
    with lying(table_of({})) as server:
        table = shared(server.url, tmp_path)
        table.put("cpu", {"a": A})
    assert table.get("cpu", ["a", "b"]) == {"a": A}
    assert table.put("cpu", {"b": B}) == {"b": B}
    assert table.get("cpu", ["a", "b"]) == {"a": A, "b": B}


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"profiles": 3},
        {"profiles": {"a": [1]}},
        {"profiles": {"a": [1, -2]}},
        {"profiles": {"a": [1.5, 2]}},
        {"profiles": {"stranger": [1, 2]}},
    ],
)
def test_nonsense_from_the_service_is_passed_over(tmp_path: Path, body: object) -> None:
    DiskProfiles(tmp_path).put("cpu", {"a": A})
    with lying(in_turn(Said(200, body))) as server:
        assert shared(server.url, tmp_path).get("cpu", ["a"]) == {"a": A}


def test_each_planner_has_its_table(tmp_path: Path) -> None:
    here = settings(cache_dir=tmp_path, environ={})
    assert isinstance(planner_for("greedy", given=here).profiles, DiskProfiles)
    assert isinstance(planner_for("http://127.0.0.1:9", given=here).profiles, SharedProfiles)
    assert isinstance(planner_for(ServicePlanner("http://127.0.0.1:9"), given=here).profiles, SharedProfiles)


def test_a_profile_of_the_service_is_held_against_what_is_measured_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten times more or less than here is another device; beyond that ours counts, on disk too, where it was before."""
    rows = {"free": [0, 0], "late": [10**12, 0], "small": [2_000, 0], "fine": [9_000, 2**20]}
    measured = dict.fromkeys(rows, Profile(2_000, 0)) | {"small": Profile(2_000, 2**30)}
    with lying(table_of(rows)) as server:
        table = shared(server.url, tmp_path)
        assert table.get("cpu", ["free"]) == {"free": Profile(0, 0)}
        assert table.put("cpu", measured) == measured | {"fine": Profile(9_000, 2**20)}
    assert "of 3 such kernels our own count" in caplog.text
    assert DiskProfiles(tmp_path).get("cpu", ["free", "late"]) == {"free": Profile(2_000, 0), "late": Profile(2_000, 0)}
