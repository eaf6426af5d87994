"""What a document's readers accept, its JSON Schema describes: the two are declared once."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat_ir import Answer, Chain, InvalidData, Join, Problem, plain_peak, plain_plan
from remat_ir.answer import ANSWER
from remat_ir.document import COMPONENTS, Document, Member, Number, Text
from remat_ir.problem import PROBLEMS

SETTINGS = settings(max_examples=examples(150), deadline=None, derandomize=True)

CHAIN = Chain((3, 1), (4, 1), (0, 0), (0, 2), (9, 5), (4, 4, 5), (4, 4, 5), link_bytes_per_s=7, host_bytes=40)
JOIN = Join((2, 0), 3, 4, 5, 6, 2)

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.sampled_from(
        [2**53, 2**53 + 1, 10**30, 0.5, -1.5, "", "x", [], {}, [[]], [0.5], [-1], ["1"], [[0, -1]], [[None]]]
    ),
)


def _schemas(document: Document) -> dict[str, Any]:
    found = {document.name: document.schema()}
    for inner in document.nested:
        found |= _schemas(inner)
    return found


def _valid(document: Document, data: Any) -> bool:
    schemas = _schemas(document)
    text = json.dumps({**schemas[document.name], "$defs": schemas}).replace(COMPONENTS, "#/$defs/")
    return jsonschema.Draft202012Validator(json.loads(text)).is_valid(data)


@SETTINGS
@given(st.data())
def test_what_is_read_is_described(data: st.DataObject) -> None:
    """A problem with members or entries changed, removed or added is refused, at a place, or its schema holds it."""
    graph = data.draw(graphs(most_ops=5))
    problem = data.draw(st.sampled_from([Problem(graph, plain_peak(graph)), Problem(CHAIN, 90), Problem(JOIN, 12)]))
    sent = copy.deepcopy(problem.to_json())
    assert _valid(PROBLEMS[problem.kind], sent)
    assert Problem.from_json(sent) == problem
    inner = sent[problem.kind]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([sent, inner]))
        name = data.draw(st.sampled_from([*sorted(place), "more"]))
        whole = place.get(name)
        if isinstance(whole, list) and whole and data.draw(st.booleans()):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(VALUES)
        elif name != problem.kind and data.draw(st.booleans()):
            place[name] = data.draw(VALUES)
        elif name != problem.kind:
            place.pop(name, None)
    refusal: InvalidData | None = None
    try:
        Problem.from_json(copy.deepcopy(sent))
    except InvalidData as error:
        refusal = error
    if refusal is None:
        assert _valid(PROBLEMS[problem.kind], sent)
    else:
        assert str(refusal)
        assert refusal.pointer.startswith("/")


@SETTINGS
@given(graphs(most_ops=5))
def test_an_answer_is_what_its_schema_says(graph: Any) -> None:
    """Every member, and no other."""
    answer = Answer.of_plan(Problem(graph, plain_peak(graph)), plain_plan(graph), method="greedy")
    written = answer.to_json()
    assert _valid(ANSWER, written)
    assert set(written) <= set(ANSWER.members)
    assert Answer.from_json(written) == answer


def test_every_member_of_an_answer_is_declared() -> None:
    """The object and its document."""
    assert set(Answer.__dataclass_fields__) == set(ANSWER.members)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Number(above=0), 0, "x must be positive, not 0.0"),
        (Number(least=0, below=1), 1, "x must be at least 0 and below 1, not 1.0"),
        (Number(), True, "x must be a number, not a boolean"),
        (Number(), 10**400, "x is too large"),
        (Text(longest=3), "", "x must have 1 to 3 characters"),
        (Text(longest=3), "a\x00", "x holds a character that can't be stored"),
        (Text(called="an id"), 1, "x must be an id, not an integer"),
    ],
)
def test_messages(kind: Any, value: object, message: str) -> None:
    """What is wrong, and with what."""
    with pytest.raises(InvalidData) as caught:
        Document("Name", "thing", "A thing.", {"x": Member(kind)}).read({"x": value})
    assert str(caught.value) == message
    assert caught.value.pointer == "/x"
