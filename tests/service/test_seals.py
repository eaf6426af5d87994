"""The key that seals what nobody can prove anew: where it lies, how it rotates, what is left without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remat_ir import Answer, Problem, budget_at, verify_answer
from remat_service.errors import ServiceError
from remat_service.settings import Settings
from remat_service.storage.database import Database
from remat_service.storage.seals import Seals, seals_of
from remat_service.tenants.keys import make_key
from service.serving import serving, training_graph


def _settings(**more: Any) -> Settings:
    return Settings(**{"seal_key": None} | more)


def test_the_key_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, for its owner alone; the same at the next start; one that others may read is refused."""
    monkeypatch.delenv("REMAT_SEAL_KEY", raising=False)
    settings = _settings(database_url=f"sqlite:///{tmp_path}/s.sqlite")
    database = Database(settings.database_url.get_secret_value())
    row = seals_of(settings, database).sealed("floors", {"least_bytes": 3})
    path = tmp_path / "s.sqlite.seal-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert seals_of(settings, database).holds("floors", row)
    path.chmod(0o644)
    with pytest.raises(ServiceError, match="chmod 600"):
        seals_of(settings, database)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(ServiceError, match="holds no seal key"):
        seals_of(settings, database)
    path.unlink()
    assert not seals_of(settings, database).holds("floors", row)


def test_postgresql_needs_a_key_and_keys_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are accepted, the first one signs."""
    monkeypatch.delenv("REMAT_SEAL_KEY", raising=False)
    url = "postgresql://u@127.0.0.1:1/none"
    database = Database(url)
    with pytest.raises(ServiceError, match="REMAT_SEAL_KEY"):
        seals_of(_settings(database_url=url), database)
    with pytest.raises(ServiceError, match="32 characters"):
        seals_of(_settings(database_url=url, seal_key="short"), database)
    old, new = make_key(), make_key()
    row = seals_of(_settings(seal_key=old), database).sealed("bounds", {"bound_ns": 7})
    both = seals_of(_settings(seal_key=f"{new},{old}"), database)
    assert both.holds("bounds", row)
    assert not both.holds("bounds", row | {"bound_ns": 8})
    fresh = both.sealed("bounds", {"bound_ns": 7})
    assert seals_of(_settings(seal_key=new), database).holds("bounds", fresh)
    assert not seals_of(_settings(seal_key=old), database).holds("bounds", fresh)
    assert not Seals([b"x" * 32]).holds("bounds", {"bound_ns": 7})


def test_another_key_forgets_claims_and_keeps_what_is_certified(tmp_path: Path) -> None:
    """With the key lost, sealed rows are misses; plans and certificates still answer."""
    graph = training_graph(9, cost=91)
    problem = Problem(graph, budget_at(graph, 0.7))
    with serving(tmp_path, workers=1) as own:
        _, first = own.post(problem, time_limit_s=20, max_gap=0.01)
        own.stop()
        own.settings["seal_key"] = "k" * 40
        own.start()
        assert own.get(first["id"], 0)[0] == 410
        _, again = own.post(problem, time_limit_s=20, max_gap=0.01)
        assert again["cache"] == "hit"
        assert again["cost_ns"] == first["cost_ns"]
        assert verify_answer(problem, Answer.from_json(again)).bound_ns == again["bound_ns"]
