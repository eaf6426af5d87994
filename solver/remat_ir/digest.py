"""What makes two problems the same problem.

In the problem key, field by field:
    format            a later format may mean something else by the same fields
    op_cost_ns, op_workspace_bytes, op_inputs, value_op, value_bytes, optional, once, keep, backward_from
                      exactly as sent: another order of ops is another problem, since plans name ops by index
    every array of a chain, its link and host limit; every number of a join    a chain is another problem than its lift
    budget − fixed    fixed bytes (a chain's input) are charged at every moment, so only what they leave matters
Not in it:
    op_names, value_names, fixed_bytes    they change nothing about which plans are valid or what they cost
    ranks, device indices                 equal steps on two devices are one problem
    time limit, gap, threads, seed        they say how long to look, not what for; a stored answer says what it reached
    solver version                        a verified plan outlives its solver; bounds carry the version beside them
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .chain import Chain
from .problem import Problem
from .subject import Subject, subject_kind


def problem_digest(problem: Problem) -> str:
    """The problem key: 64 hexadecimal digits of SHA-256."""
    data = _canonical(problem.subject)
    data["budget_bytes"] = problem.budget_bytes - problem.subject.fixed_bytes
    return _sha256(data)


def graph_digest(subject: Subject) -> str:
    """The graph, chain or join alone: what problems at different budgets share."""
    return _sha256(_canonical(subject))


def structure_digest(subject: Subject) -> str:
    """The subject without its costs: what two measurements of the same step share.

    A chain with a link keeps its costs: they decide what a transfer hides behind.
    """
    data = _canonical(subject)
    for key in _COSTS[subject_kind(subject)]:
        if "link_bytes_per_s" not in data:
            del data[key]
    return _sha256(data)


_COSTS = {
    "graph": ("op_cost_ns",),
    "chain": ("forward_ns", "backward_ns"),
    "join": ("forward_ns", "backward_ns", "turn_ns"),
}


def _canonical(subject: Subject) -> dict[str, Any]:
    data = subject.to_json()
    if isinstance(subject, Chain):
        data["activation_bytes"][0] = 0
    data.pop("fixed_bytes", None)
    return data


def _sha256(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
