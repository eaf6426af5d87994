"""Starting and being ready: one line says what runs, one sentence says what is wrong, and ready means writable."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select

from remat_service.storage import migrations
from remat_service.storage.database import Database
from remat_service.storage.tables import graphs, requests
from remat_service.web.server import bound_socket
from service.serving import at_peak, command, commands_ended, eventually, serving, started, training_graph


def test_what_is_wrong_at_the_start_is_one_sentence(tmp_path: Path) -> None:
    """Exit code 2 and one line that names the setting or the database, without a secret."""
    serve, unreachable = ["serve", "--port", "0"], "postgresql://u:hunter2@127.0.0.1:1/none"
    wrong: list[tuple[list[str], dict[str, str], str]] = [
        (serve, {"workers": "none"}, "REMAT_WORKERS"),
        (serve, {"dispatcher": "cloud"}, "REMAT_DISPATCHER"),
        (serve, {"stale_after_s": "1"}, "three times REMAT_HEARTBEAT_S"),
        (serve, {"database_url": "mysql://x"}, "REMAT_DATABASE_URL must start with"),
        (serve, {"database_url": unreachable}, "can't use the database postgresql"),
        (serve, {"database_url": "sqlite:////proc/none/x.sqlite"}, "/proc/none"),
        (serve, {"dispatcher": "cluster"}, "needs a postgresql"),
        (serve, {"database_url": "sqlite:///x.sqlite?timeout=3"}, "no options after a ?"),
        (["worker"], {"database_url": unreachable}, "can't use the database"),
        (["backup", "copy.sqlite"], {"database_url": "sqlite:///none.sqlite"}, "there is no database none.sqlite"),
    ]
    ended = commands_ended(tmp_path, [(arguments, settings) for arguments, settings, _ in wrong])
    for (_, settings, expected), (code, said, _) in zip(wrong, ended, strict=True):
        assert (code, said.count("\n")) == (2, 1), (settings, said)
        assert expected in said
        assert "hunter2" not in said
    assert not [path for path in tmp_path.iterdir() if path.name in ("copy.sqlite", "none.sqlite")]


def test_what_a_command_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    """Dates that there are not."""
    given = {"database_url": f"sqlite:///{tmp_path}/s.sqlite"}
    key = "0" * 32
    wrong = (
        (["keys", "create", "made", "--new-tenant", "--days", "1e7"], "no date 1e+07 days from now"),
        (["keys", "create", "made", "--new-tenant", "--days", "1e300"], "no date 1e+300 days from now"),
        (["keys", "create", "made", "--new-tenant", "--days", "nan"], "no date nan days from now"),
        (["keys", "rotate", key, "--overlap-hours", "2.4e301"], "no date 1e+300 days from now"),
    )
    ended = commands_ended(tmp_path, [(arguments, given) for arguments, _ in wrong])
    for (arguments, expected), (code, said, _) in zip(wrong, ended, strict=True):
        assert (code, said.count("\n")) == (2, 1), (arguments, said)
        assert expected in said


@pytest.mark.thorough
def test_a_program_older_than_its_store_says_so(tmp_path: Path) -> None:
    """Such as after a rollback: one sentence that names both revisions, nothing is touched. One step does no harm."""
    path = tmp_path / "s.sqlite"
    given = {"database_url": f"sqlite:///{path}"}
    assert started(tmp_path, "migrate", **given).returncode == 0

    def at(revision: str) -> None:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        database.close()

    at(f"{int(migrations.head()) + 1:04}")
    assert [code for code, *_ in commands_ended(tmp_path, [(["migrate"], given), (["keys", "list"], given)])] == [0, 0]
    at("9999")
    commands = (["serve", "--port", "0"], ["migrate"], ["audit"], ["history"], ["keys", "list"], ["store", "adopt-key"])
    for code, said, printed in commands_ended(tmp_path, [(each, given) for each in commands]):
        assert (code, said.count("\n"), printed) == (2, 1, ""), said
        assert "the store is at revision 9999, and this version of remat-service" in said


@pytest.mark.thorough
def test_one_line_says_what_runs(tmp_path: Path) -> None:
    """Version, database, dispatcher, whether keys are required."""
    with serving(tmp_path, workers=1):
        lines = [json.loads(line) for line in (tmp_path / "service.log").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "started"]
    assert (line["dispatcher"], line["keys"], line["workers"]) == ("embedded", "not required", 1)
    assert line["database"].startswith("sqlite")
    assert line["version"]


@pytest.mark.thorough
def test_ready_means_writable(tmp_path: Path) -> None:
    """On a full disk, and with the file deleted: not ready, though reads go on; ready again once there is room."""
    with serving(tmp_path, workers=1) as own:
        assert own.http.get("/readyz").status_code == 200
        limits = resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))  # no file may grow, as on a full disk
        eventually(lambda: own.http.get("/readyz").status_code == 503, 5)
        assert own.http.get("/v1/solves").status_code == 200
        resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, limits)
        eventually(lambda: own.http.get("/readyz").status_code == 200, 5)
        (tmp_path / "service.sqlite").rename(tmp_path / "moved.sqlite")
        eventually(lambda: own.http.get("/readyz").status_code == 503, 5)
        (tmp_path / "moved.sqlite").rename(tmp_path / "service.sqlite")
        eventually(lambda: own.http.get("/readyz").status_code == 200, 5)


@pytest.mark.thorough
def test_one_owner_of_a_file_under_whatever_name(tmp_path: Path) -> None:
    """A second service is refused through a symbolic link too, and what lies next to the file does not matter."""
    with serving(tmp_path, workers=1):
        alias = tmp_path / "alias.sqlite"
        alias.symlink_to(tmp_path / "service.sqlite")
        for beside in tmp_path.glob("*.lock"):
            beside.unlink()
        for name in ("service.sqlite", "alias.sqlite"):
            done = started(tmp_path, "serve", "--port", "0", database_url=f"sqlite:///{tmp_path}/{name}")
            assert done.returncode != 0
            assert "another service has" in done.stdout + done.stderr


@pytest.mark.thorough
async def test_a_database_may_have_any_name_and_is_its_owners_alone(tmp_path: Path) -> None:
    """One file of that name, with what SQLite puts next to it; a backup; read by a connection of its own."""
    folder, name = tmp_path / "data", "a b#c?d%41"
    url = f"sqlite:///{folder}/{name}.sqlite"
    before = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("REMAT_SEAL_KEY", raising=False)
            with serving(tmp_path, database_url=url, workers=1) as own:
                _, posted = own.post(at_peak(training_graph(5)))
                copy = folder / f"{name}.copy"
                done = command(url, "backup", str(copy))
                assert done.exit_code == 0, done.output
                files = sorted(folder.iterdir())
                assert {path.name.removeprefix(name) for path in files} == {
                    ".sqlite", ".sqlite-shm", ".sqlite-wal", ".copy",
                }  # fmt: skip
                assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    finally:
        os.umask(before)
    database = Database(f"sqlite:///{copy}")
    async with database.read() as connection:
        assert await connection.scalar(select(requests.c.id)) == posted["id"]
    assert await database.first(select(graphs.c.data))
    await database.close()


@pytest.mark.thorough
def test_a_stop_that_was_asked_for_is_no_failure(tmp_path: Path) -> None:
    """A supervisor that sends SIGTERM, and Ctrl-C: status 0, once requests have ended."""
    with serving(tmp_path, workers=1) as own:
        assert own.stop(signal.SIGTERM) == 0
        own.start()
        assert own.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_answers_are_sent_without_waiting_for_an_acknowledgement(host: str) -> None:
    async def without_delay() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            seen.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bound_socket(host, 0)
        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.close()
            return await seen

    assert asyncio.run(without_delay())
