"""A text with its long arrays as columns reads as the text does, and is refused as it is."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat_ir import Chain, Graph, InvalidData
from remat_ir.read import Rows, parse
from remat_service.requests import columns
from remat_service.requests.columns import separate

SETTINGS = settings(max_examples=examples(200), deadline=None, derandomize=True)
MOST = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def _short() -> Any:
    """Arrays count as long from two characters on, and are decoded a few bytes at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_CUT", re.compile(columns._CUT.pattern.replace(b"1024", b"2"), re.DOTALL))
        patch.setattr(columns, "_STEP", 20)
        yield


def _plain(value: Any) -> Any:
    if isinstance(value, Rows):
        return [list(row) for row in value]
    if isinstance(value, (array, range)):
        return list(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


INTEGERS = st.lists(st.integers(-3, 300) | st.integers(-(2**53), 2**53))
VALUES = st.recursive(
    st.none() | st.text('a[]{}1,\\"', max_size=6) | st.integers(-5, 5) | INTEGERS | st.lists(INTEGERS),
    lambda inner: st.dictionaries(st.text("ab[1", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@SETTINGS
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_reads_as_the_text_does(value: Any, indent: int | None, spaces: bool) -> None:
    """Whatever stands between long arrays, brackets in strings included."""
    text = json.dumps(value, indent=indent, separators=None if spaces else (",", ":")).encode()
    assert _plain(separate(text, 10**6, MOST).parse()) == parse(text)


@SETTINGS
@given(graphs(most_ops=6), st.integers(0, 2**32))
def test_refuses_what_the_text_is_refused_for(graph: Graph, seed: int) -> None:
    """With characters changed: the same value, or a refusal of both; at the same place where no array broke off."""
    rng = random.Random(seed)
    text = bytearray(json.dumps(graph.to_json(), indent=rng.choice([None, 1])).encode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 1)] = rng.choice(
            [b"[", b"]", b",", b"-", b"1", b"9", b".5", b" ", b'"', b"x", b"}"]
        )
    expected, refusal = _outcome(lambda: parse(text))
    found, found_refusal = _outcome(lambda: _plain(separate(text, 10**6, MOST).parse()))
    if "the array at line" in found_refusal:  # no reader takes it
        assert refusal or _outcome(lambda: Graph.from_json(expected))[1]
    else:
        assert (found, found_refusal[:8]) == (expected, refusal[:8])


def _outcome(made: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return made(), ""
    except InvalidData as error:
        return None, str(error)


@SETTINGS
@given(graphs(most_ops=6))
def test_a_graph_is_the_same(graph: Graph) -> None:
    """Tuples all through, once it is made."""
    text = json.dumps(graph.to_json()).encode()
    read = Graph.from_json(separate(text, 10**6, MOST).parse())
    assert read == graph
    assert all(type(row) is tuple for row in read.op_inputs)
    assert json.dumps(read.to_json()) == text.decode()


def test_a_chain_is_the_same() -> None:
    chain = Chain((3, 1), (4, 1), (0, 0), (0, 2), (9, 5), (4, 4, 5), (4, 4, 5))
    assert Chain.from_json(separate(json.dumps(chain.to_json()).encode(), 10**6, MOST).parse()) == chain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op_cost_ns": [120, 2**70, 0]}, "op 1: cost_ns must be at most 2^53"),
        ({"op_cost_ns": [120, -1, 0]}, "op 1: cost_ns must not be negative"),
        ({"op_cost_ns": [[1], [2]]}, "op_cost_ns[0] must be an integer, not an array"),
        ({"op_inputs": [[], [0], [0, 5]]}, "op 2: input 5 is not a value"),
        ({"op_inputs": [[], [0], [0, 2]]}, "op 2: reads value 2, which op 2 makes"),
        ({"op_inputs": [[], [0], [0, 0]]}, "op 2: reads value 0 twice"),
        ({"op_inputs": [[], [0]]}, "op_inputs has 2 entries where op_cost_ns has 3"),
        ({"op_inputs": [1, 2, 3]}, "op_inputs[0] must be an array, not an integer"),
        ({"keep": [2, 1]}, "keep[1]: 1 follows 2"),
        ({"once": [7]}, "once[0]: 7 is not op 0 to 2"),
        ({"value_op": [0, 1, 9]}, "value 2: value_op 9 is not an op"),
    ],
)
def test_a_graph_is_refused_as_ever(change: dict[str, Any], message: str) -> None:
    graph = {
        "format": "remat-graph/1",
        "op_cost_ns": [120, 80, 200],
        "op_inputs": [[], [0], [0, 1]],
        "value_op": [0, 1, 2],
        "value_bytes": [1024, 4096, 256],
        **change,
    }
    with pytest.raises(InvalidData, match=re.escape(message)):
        Graph.from_json(separate(json.dumps(graph).encode(), 10**6, MOST).parse())


def test_what_is_too_long_has_a_length_only() -> None:
    assert separate(b"[1,2,3,4]", 3, MOST).parse() == range(4)
    rows = separate(b"[[1,2],[3],[4]]", 3, MOST).parse()
    assert (len(rows), rows.values) == (3, range(4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": -Infinity, "b": [1, 2, 3]}', "-Infinity is not a number"),
        (b'{"a": [1, 2, 3], "b": -Infinity}', "-Infinity is not a number"),
        (b'{"a": [1, 2, 3], "b": NaN}', "NaN is not a number"),
        (b'{"a": [1, 2, 3], "a": 1}', "key 'a' appears twice"),
        (b'{"a": [1, 2, 3],\n "b": [4, 5, 6] 7}', "Expecting ',' delimiter at line 2 column 17"),
        (b'{"a": [1, 2,, 3]}', "Expecting value at line 1 column 13"),
        (b'{"a": [1, 2, 3,]}', "Expecting value at line 1 column 16"),
        (b'{"a": [01, 2, 3]}', "Expecting ',' delimiter at line 1 column 9"),
        (b'{"a":\n [1, 2, 3.5, 4]}', "the array at line 2 column 2 holds something else"),
        (b'{"a": [[1, 2], [[3]]]}', "the array at line 1 column 7 holds something else"),
        (b'{"a": [[1, 2], 3, []]}', "the array at line 1 column 7"),
    ],
)
def test_refusals(text: bytes, message: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)):
        separate(text, 10**6, MOST).parse()


def test_columns_have_a_most() -> None:
    with pytest.raises(InvalidData, match="the arrays of integers take more than 10 B"):
        separate(b"[1,2,3,4]", 10, 10)
