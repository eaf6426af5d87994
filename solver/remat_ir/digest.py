"""What makes two problems the same problem.

In the problem key, field by field:
    format            a later format may mean something else by the same fields
    op_cost_ns, op_workspace_bytes, op_inputs, value_op, value_bytes, optional, once, keep, backward_from
                      exactly as sent: another order of ops is another problem, since plans name ops by index
    budget − fixed    fixed bytes are charged at every moment, so only what they leave matters
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

from .graph import Graph
from .problem import Problem


def problem_digest(problem: Problem) -> str:
    """The problem key: 64 hexadecimal digits of SHA-256."""
    data = _canonical(problem.graph)
    data["budget_bytes"] = problem.budget_bytes - problem.graph.fixed_bytes
    return _sha256(data)


def graph_digest(graph: Graph) -> str:
    """The graph alone: what problems at different budgets share."""
    return _sha256(_canonical(graph))


def structure_digest(graph: Graph) -> str:
    """The graph without its costs: what two measurements of the same step share."""
    data = _canonical(graph)
    del data["op_cost_ns"]
    return _sha256(data)


def _canonical(graph: Graph) -> dict[str, Any]:
    data = graph.to_json()
    del data["fixed_bytes"]
    return data


def _sha256(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
