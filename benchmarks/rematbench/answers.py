"""The best plans and certificates as files: a folder that `check.py` confirms in one command."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

from benchmarks.rematbench import check
from benchmarks.rematbench.methods import Measured, Question

VERSION = "rematbench 0.1"


def keep_best(folder: Path, question: Question, method: str, found: Measured) -> None:
    """Take up a cheaper plan, or a greater certified bound, with who found it and in how many seconds.

    Of a graph with a link the bound stays out: `check.py` knows no certificates of it.
    """
    problem, path = question.problem, folder / "answers" / f"{question.key}.json.xz"
    graph_path = folder / "graphs" / f"{question.instance.name}.json.xz"
    if not graph_path.exists():
        _write(graph_path, problem.graph.to_json())
    if path.exists():
        answer: dict[str, Any] = check.load(path)
    else:
        document = json.loads(json.dumps(problem.graph.to_json()))
        answer = {"format": VERSION, "graph": question.instance.name, "budget_bytes": problem.budget_bytes}
        answer |= {"graph_digest": check.digest(check.read_graph(document))}
    before = dict(answer)
    if found.plan is not None and found.cost_ns is not None and found.cost_ns < answer.get("cost_ns", 2**63):
        answer |= {"plan": found.plan.to_json(), "cost_ns": found.cost_ns, "peak_bytes": found.peak_bytes}
        answer |= {"plan_by": method, "plan_seconds": found.seconds}
    if problem.graph.link is None and found.bound_ns > answer.get("bound_ns", -1):
        answer |= {"bound_ns": found.bound_ns, "proof": None if found.proof is None else found.proof.to_json()}
        answer |= {"bound_by": method, "bound_seconds": found.seconds}
    if answer != before and ("plan" in answer or "bound_ns" in answer):
        _write(path, answer)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    with lzma.open(aside, "wt") as file:
        json.dump(data, file, separators=(",", ":"))
    aside.replace(path)
