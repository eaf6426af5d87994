"""Bodies about a graph that was read before: read as any other, or refused as any other, whatever is in them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Chain, Graph, Join, Link, Problem, Written, graph_of, problem_digest, subject_kind
from remat_service.errors import ServiceError
from remat_service.identity import with_fixed
from remat_service.requests.parse import Ask, Body, KnownSubjects, from_body, read_ask
from remat_service.settings import Settings
from service.serving import training_graph

_SETTINGS = Settings(most_ops=1000)
_CHAIN = Chain((1, 2), (3, 4), (0, 0), (0, 0), (8, 9), (5, 6, 7), (8, 9, 10))
_SUBJECTS = (
    training_graph(6, fixed=11),
    graph_of([1, 2, 3], [4, 8, 2], [[], [0], []]).with_link(Link(10, 10)),
    _CHAIN,
)


class _Bodies:
    """One service's bodies; `whole` counts those that were read whole."""

    def __init__(self) -> None:
        self.known, self.whole = KnownSubjects(), 0

    def read(self, text: bytes, tenant: str = "a") -> Ask | str:
        """The request, or what is said against it."""
        return _outcome(self.known.read(tenant, self._body(text), _SETTINGS))

    def _body(self, text: bytes) -> Body:
        return Body(bytearray(text), self._hold, hashlib.sha256(text).digest())

    def _hold(self, size: int) -> None:
        self.whole += 1


def _outcome(reading: Any) -> Ask | str:
    try:
        ask: Ask = asyncio.run(reading)
    except (ServiceError, ValueError) as error:
        return repr((type(error), str(error), getattr(error, "pointer", None)))
    return ask


def _alone(text: bytes) -> Ask | str:
    """What a reader without a memory makes of it."""
    return _outcome(from_body(Body(bytearray(text), lambda size: None, b""), read_ask, _SETTINGS))


def _same(found: Ask | str, expected: Ask | str) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    assert found.problem == expected.problem
    assert (found.net, found.digests, found.method, found.options, found.name, found.time_limit_s) == (
        expected.net, expected.digests, expected.method, expected.options, expected.name, expected.time_limit_s,
    )  # fmt: skip


def _text(subject: Graph | Chain | Join, budget: object = 10_000, **more: Any) -> bytes:
    problem = {**Problem(subject, 0).to_json(), "budget_bytes": budget}
    return json.dumps({"problem": problem, **more}).encode()


@pytest.mark.parametrize("subject", _SUBJECTS, ids=["graph", "link", "chain"])
def test_a_graph_in_another_body_is_not_read_again(subject: Graph | Chain) -> None:
    """Other budgets, limits, fixed bytes and spaces: the same subject, the request's own digests."""
    bodies = _Bodies()
    bodies.read(_text(subject))
    for text in (
        _text(subject, time_limit_s=7.0, name="x", method="greedy"),
        _text(subject, 9_999),
        _text(subject, 0),
    ):
        _same(bodies.read(text), _alone(text))
        assert bodies.whole == 1
    bodies.read(_text(subject), "b")  # another tenant's is read whole
    assert bodies.whole == 2
    for text in (_text(subject).replace(b", ", b","), json.dumps(json.loads(_text(subject)), sort_keys=True).encode()):
        _same(bodies.read(text), _alone(text))  # and so is what is written otherwise


_GRAPH = training_graph(3, fixed=5)
_PLAIN = _text(_GRAPH)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"budget_bytes": 10000', b'"budget_bytes": true'),
        (b'"budget_bytes": 10000', b'"budget_bytes": [1]'),
        (b'"budget_bytes": 10000', b'"budget_bytes": -Infinity'),
        (b'"budget_bytes": 10000', b'"budget_bytes": 3, "budget_bytes": 10000'),
        (b'"budget_bytes": 10000', b'"budget_bytes": 10000, "more": [1]'),
        (b'"keep": [', b'"keep": 1, "more": ['),
        (b'"keep": [', b'"keep": ['),
        (b'"keep": [', b'"keep": [ '),
        (b'"keep": [', b'"keep": [1 2'),
        (b'"keep": [', b'"keep": [-'),
        (b'"keep": [', b'"keep": "[", "once": ['),
        (b'"op_cost_ns": [', b'"op_cost_ns": [[0], '),
        (b'"op_cost_ns": [', b'"op_cost_ns": ['),
        (b'"op_inputs": [[]', b'"op_inputs": [[[]]'),
        (b'"op_inputs": [[]', b'"op_inputs": [[]]'),
        (b'"problem"', b'"name": [1], "problem"'),
        (b'"problem"', b'"name": "[1]", "problem"'),
        (b'"problem"', b'"name": "a\\"[1]", "problem"'),
        (b'"problem"', b'"options": {"x": [1, 2]}, "problem"'),
        (b'"graph"', b'"graph": 1, "graph"'),
        (b'"graph"', b'"chain"'),
        (b'"fixed_bytes": 5', b'"fixed_bytes": 5.0'),
        (b'"fixed_bytes": 5', b'"fixed_bytes": 6'),
        (b"remat-graph/1", b"remat-graph/2"),
    ],
)
def test_what_is_written_otherwise_is_read_whole(old: bytes, new: bytes) -> None:
    """Whatever differs in the subject, or is no JSON, is answered as by a reader that remembers nothing."""
    bodies = _Bodies()
    bodies.read(_PLAIN)
    text = _PLAIN.replace(old, new, 1)
    assert old in _PLAIN
    _same(bodies.read(text), _alone(text))
    _same(bodies.read(text), _alone(text))


@pytest.mark.parametrize(
    "more",
    [
        b'"name": "-Infinity"',
        b'"name": "\\"graph\\": {}"',
        b'"name": "\\u0022graph"',
        b'"options": {"graph": {"a": 1}}',
        b'"options": {"problem": {"budget_bytes": 1, "graph": {}}}',
        b'"problem": {"budget_bytes": 1, "graph": {"format": "remat-graph/1"}}',
    ],
)
def test_only_the_problems_subject_is_cut_out(more: bytes) -> None:
    """Before it or behind it stands what looks like another one, or like its stand-in."""
    bodies = _Bodies()
    bodies.read(_PLAIN)
    for text in (b"{" + more + b", " + _PLAIN[1:], _PLAIN[:-1] + b", " + more + b"}"):
        for _ in range(2):
            _same(bodies.read(text), _alone(text))


def test_a_text_of_many_beginnings_is_read_as_any_other() -> None:
    """The search for a subject is linear, whatever is repeated."""
    for piece in (
        b'"graph":{',
        b'"graph":{"a',
        b'"graph":{}',
        b'"graph":{"b":{"',
        b'"graph"   ',
        b'"graph":{{}',
        b'{"graph":[[1,',
    ):
        bodies = _Bodies()
        text = piece * (4_000_000 // len(piece))
        _same(bodies.read(text), _alone(text))


_PIECES = (b"", b"[", b"]", b"[]", b'"', b" ", b",", b"1", b"0", b"}")


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_any_body_is_read_as_without_a_memory(data: st.DataObject) -> None:
    """Bytes of remembered bodies taken out, doubled or replaced."""
    bodies = _Bodies()
    for subject in (_GRAPH, _CHAIN):
        bodies.read(_text(subject))
    text = bytearray(data.draw(st.sampled_from([_PLAIN, _text(_CHAIN)])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 3))
        text[at : at + length] = data.draw(st.sampled_from(_PIECES))
    _same(bodies.read(bytes(text)), _alone(bytes(text)))


def test_written_down_once() -> None:
    """The digests at any budget are those of the problem, and the text is read as the subject without fixed bytes."""
    for subject in (*_SUBJECTS, replace(_CHAIN, link_bytes_per_s=10, input_may_leave=True)):
        written, net = Written(subject), with_fixed(subject, 0)
        for budget in (0, 7, 900):
            assert written.digests(budget).problem == problem_digest(Problem(subject, budget))
        text = json.loads(Written(net).text())
        assert Problem.from_json({subject_kind(net): text, "budget_bytes": 0}).subject == net
