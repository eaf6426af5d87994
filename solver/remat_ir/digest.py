"""What makes two problems the same problem.

In the problem key, field by field:
    format            a later format may mean something else by the same fields
    op_cost_ns, op_workspace_bytes, op_inputs, value_op, value_bytes, optional, once, keep, backward_from
                      exactly as sent: another order of ops is another problem, since plans name ops by index
    consumes          likewise, and absent where nothing is consumed: problems that cannot say it keep their digests
    link              of a graph that has one: what copies cost, and what the host holds, decides which plans are valid
    every array of a chain, its link and host limit; every number of a join    a chain is another problem than its lift
    budget − fixed    fixed bytes (a chain's input) are charged at every moment, so only what they leave matters; of a
                      chain whose input may leave, the whole budget, the input, and that it may
Not in it:
    op_names, value_names, fixed_bytes    they change nothing about which plans are valid or what they cost
    ranks, device indices                 equal steps on two devices are one problem
    time limit, gap, threads, seed        they say how long to look, not what for; a stored answer says what it reached
    solver version                        a verified plan outlives its solver; bounds carry the version next to them
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from .chain import Chain
from .graph import Graph
from .problem import Problem, Subject


class Digests(NamedTuple):
    """The digests of a problem, of its subject, and of its subject without costs."""

    problem: str
    graph: str
    structure: str


class Written:
    """A subject with each of its arrays written down once, for its text and its digests at any budget.

    Example:
        >>> from remat_ir import Problem, graph_of
        >>> graph = graph_of([1, 2], [4, 8], [[], [0]])
        >>> Written(graph).digests(12).problem == problem_digest(Problem(graph, 12))
        True
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._parts = _parts(subject)
        self._graph, self._structure = _sha256(self._parts), _sha256(_without_costs(self._parts))

    def text(self) -> bytes:
        """JSON as it is digested: what is read from it is the subject without names and fixed bytes."""
        return b"{" + b",".join(self._parts[key] for key in sorted(self._parts)) + b"}"

    def digests(self, budget_bytes: int) -> Digests:
        """All three, of the problem with this budget."""
        return Digests(_problem(self._parts, Problem(self.subject, budget_bytes)), self._graph, self._structure)


def problem_digest(problem: Problem) -> str:
    """The problem key: 64 hexadecimal digits of SHA-256."""
    return _problem(_parts(problem.subject), problem)


def graph_digest(subject: Subject) -> str:
    """The graph, chain or join alone: what problems at different budgets share."""
    return _sha256(_parts(subject))


def structure_digest(subject: Subject) -> str:
    """The subject without its costs: what two measurements of the same step share.

    What has a link keeps its costs: they decide what a transfer hides behind.
    """
    return _sha256(_without_costs(_parts(subject)))


_COSTS = frozenset(("op_cost_ns", "forward_ns", "backward_ns", "turn_ns"))  # of graphs, then of chains and joins

_Parts = dict[str, bytes]  # the members of the canonical JSON object, each with its key


def _parts(subject: Subject) -> _Parts:
    data = subject.to_json()
    if isinstance(subject, Graph):
        del data["fixed_bytes"]
    elif isinstance(subject, Chain) and not subject.input_may_leave:
        data["activation_bytes"][0] = 0
    return {key: f'"{key}":{_json(value)}'.encode() for key, value in data.items()}


_json = json.JSONEncoder(separators=(",", ":")).encode


def _problem(parts: _Parts, problem: Problem) -> str:
    subject = problem.subject
    budget = problem.budget_bytes - (subject.staying_bytes if isinstance(subject, Chain) else subject.fixed_bytes)
    return _sha256(parts | {"budget_bytes": f'"budget_bytes":{budget}'.encode()})


def _without_costs(parts: _Parts) -> _Parts:
    if {"link", "link_bytes_per_s"} & parts.keys():
        return parts
    return {key: part for key, part in parts.items() if key not in _COSTS}


def _sha256(parts: _Parts) -> str:
    """Of the object with its members in order, without spaces."""
    digest, before = hashlib.sha256(b"{"), b""
    for key in sorted(parts):
        digest.update(before + parts[key])
        before = b","
    digest.update(b"}")
    return digest.hexdigest()
