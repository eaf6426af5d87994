"""The report of the acceptance test on a GPU: judged from its samples, and never green for want of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.commands import remat as remat  # the entry point, as a fixture
from remat.cli.doctor import FORMAT, STAND_IN, expected, verdicts
from remat_ir import InvalidData

MIB = 2**20
BITS = {"plain": [{"loss": "a"}, {"loss": "a"}], "plan": {"loss": "a"}, "broken": {"loss": "b"}}
SAMPLES: dict[str, dict[str, Any]] = {
    "bits": BITS,
    "inductor": {"plain": BITS["plain"], "plan": BITS["plan"]},
    "spread": {"plain": [1e-4] * 5, "plan": [2e-4] * 5},
    "memory": {
        "predicted": 1000 * MIB,
        "requested": 1004 * MIB,
        "allocated": 1010 * MIB,
        "reserved": 1100 * MIB,
        "device": 2000 * MIB,
    },
    "limit": {
        "budget": 900 * MIB,
        "outside": 400 * MIB,
        "predicted_reserved": 500 * MIB,
        "reserved": 498 * MIB,
        "plan": 20,
        "plain": 0,
    },
    "time": {"predicted_ns": {"plain": 100, "plan": 120}, "seconds": {"plain": [1.0] * 10, "plan": [1.25] * 10}},
    "transfers": {"sent": ["a", "b"], "back": ["a", "b"], "broken": ["a", "c"]},
    "ranks": {"plain": ["a", "b"], "plan": ["a", "b"]},
}


def report(devices: int = 2) -> dict[str, Any]:
    record = {"commit": "0" * 40, "torch": "2.13.0", "device": "a GPU", "devices": devices}
    cases = [{"name": n, "samples": copy.deepcopy(SAMPLES[n.split()[0]])} for n in expected(record)]
    return {"format": FORMAT, "record": record, "cases": cases}


def test_a_whole_report_holds_in_each_case() -> None:
    for devices in (1, 2):
        found = verdicts(report(devices))
        assert [v.case for v in found if not v.fine] == []
        assert [v.case for v in found] == ["record", *expected({"devices": devices})]
    assert len(expected({"devices": 2})) > len(expected({"devices": 1}))


def samples(of: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(case for case in of["cases"] if case["name"].startswith(kind))["samples"]


BROKEN: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("bits", "void", lambda s: s["plain"][1].update(loss="z")),
    ("bits", "the plan differs", lambda s: s["plan"].update(loss="z")),
    ("bits", "went unnoticed", lambda s: s["broken"].update(loss="a")),
    ("bits", "void", lambda s: s.update(plain=[{}, {}], plan={})),
    ("inductor", "the plan differs", lambda s: s["plan"].update(other="z")),
    ("spread", "plan from plain", lambda s: s["plan"].append(1.0)),
    ("spread", "plan from plain", lambda s: s["plan"].__setitem__(0, 3e-4)),
    ("memory", "predicted", lambda s: s.update(predicted=1010 * MIB)),
    ("limit", "out of memory", lambda s: s.update(plan=19)),
    ("limit", "shows nothing", lambda s: s.update(plain=20)),
    ("time", "predicted", lambda s: s["predicted_ns"].update(plan=200)),
    ("time", "not whole", lambda s: s["seconds"].update(plan=[1.0], plain=[1.0])),
    ("transfers", "not what was sent", lambda s: s["back"].reverse()),
    ("transfers", "went unnoticed", lambda s: s.update(broken=s["sent"])),
    ("transfers", "not what was sent", lambda s: s.update(sent=[], back=[])),
    ("ranks", "differ", lambda s: s["plan"].reverse()),
    ("ranks", "not whole", lambda s: s.clear()),
]


@pytest.mark.parametrize(("kind", "said", "change"), BROKEN)
def test_what_does_not_hold_is_said(kind: str, said: str, change: Callable[[dict[str, Any]], object]) -> None:
    made = report()
    change(samples(made, kind))
    failed = [verdict for verdict in verdicts(made) if not verdict.fine]
    assert len(failed) == 1
    assert failed[0].case.startswith(kind)
    assert said in failed[0].found


def test_a_case_that_did_not_run_fails_and_so_does_one_that_raised() -> None:
    made = report()
    gone = made["cases"].pop(3)["name"]
    made["cases"][0] = {"name": made["cases"][0]["name"], "error": "RuntimeError: a kernel failed"}
    found = {verdict.case: verdict for verdict in verdicts(made) if not verdict.fine}
    assert found.keys() == {gone, made["cases"][0]["name"]}
    assert found[gone].found == "did not run"
    assert not all(verdict.fine for verdict in verdicts({**report(), "cases": []}))


def test_a_report_of_the_stand_in_shows_nothing_about_a_gpu() -> None:
    made = report()
    made["record"]["device"] = STAND_IN
    assert [v.case for v in verdicts(made) if not v.fine] == ["record"]


@pytest.mark.parametrize("wrong", [[], {}, {"format": "x"}, {"format": FORMAT, "record": 3, "cases": []}, "text"])
def test_what_is_no_report_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidData, match="report"):
        verdicts(wrong)


def test_a_case_twice_is_refused() -> None:
    made = report()
    made["cases"].append(made["cases"][0])
    with pytest.raises(InvalidData, match="once"):
        verdicts(made)


def test_doctor_judges_a_report_and_looks_for_gpus(remat: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert remat("doctor", "--gpu-report", str(path)).code == 0
    made = report()
    samples(made, "limit")["plain"] = 20
    path.write_text(json.dumps(made))
    ran = remat("doctor", "--gpu-report", str(path), "--json")
    assert ran.code == 2
    assert [row["what"] for row in ran.data if row["fine"] is False] == ["limit attention"]
    path.write_text("{")
    assert remat("doctor", "--gpu-report", str(path)).code == 2
    found = {row["what"]: row for row in remat("doctor", "--json").data}
    assert found["gpu"] == {"what": "gpu", "fine": None, "found": "torch finds none here"}
    assert remat("doctor", "--budget", "1GiB").code == 2
