"""Large JSON is read in little memory: its long arrays of integers as columns of machine integers.

Long arrays of integers, and of such arrays, are cut out of the text and decoded a piece at a time; what is left of the
text is parsed as ever.
"""

from __future__ import annotations

import json
import re
from array import array as packed
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from remat_ir import InvalidData, readable
from remat_ir.read import LARGEST_INTEGER, Rows, parse, refused_constant

Column: TypeAlias = "packed[int] | range"

_LONG = 1024
_CUT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\[[-0-9,\s\[\]]{%d,}' % _LONG, re.DOTALL)
"""A string, which is passed over, or a run of what arrays of integers are written with."""
_END_OF_ROWS = re.compile(rb"\]\s*\]")
_COMMA, _NEVER = re.compile(rb","), re.compile(rb"(?!)")
_NEXT_ROW = re.compile(rb"\]\s*,")
_NESTED = re.compile(rb"\[\s*\[")
_NOT_SPACE = re.compile(rb"[^\s]")
_CONTINUED = bytes(range(0x80, 0xC0))  # the bytes of a character in UTF-8 but for its first
_STEP = 1 << 17
_LARGE = LARGEST_INTEGER + 1
_STAND_IN = "-Infinity"  # no JSON: where somebody sends it, one too many is found


@dataclass(frozen=True)
class Separated:
    """A JSON text without its long arrays of integers, and these as columns in their order.

    Attributes:
        rest: the text, with a stand-in for each column.
        taken: the bytes of the columns.
    """

    rest: bytes
    taken: int
    _columns: list[Column | Rows]
    _cuts: list[tuple[int, int]]  # where in `rest` each stand-in ends, and where in the text its array does
    _text: bytes | bytearray

    def parse(self) -> Any:
        """The JSON value, with columns in place of long arrays.

        Raises:
            InvalidData: as `remat_ir.read.parse`, with lines and columns of the whole text.
        """
        columns = deque(self._columns)

        def stand_in(name: str) -> Any:
            if name != _STAND_IN or not columns:
                return refused_constant(name)
            return columns.popleft()

        return parse(self.rest, stand_in, self._place)

    def _place(self, position: int) -> tuple[int, int]:
        """Line and column of the whole text at a character of the rest."""
        at = len(self.rest.decode("utf-8", "replace")[:position].encode())
        for here, there in reversed(self._cuts):
            if at >= here:
                at += there - here
                break
        return _line_and_column(self._text, at)


def separate(text: bytes | bytearray, longest: int, most_bytes: int) -> Separated:
    """Cut the long arrays of integers out of a JSON text.

    Args:
        longest: entries of an array, its rows' together, above which only its length is kept: no reader takes it.
        most_bytes: what all columns may take.

    Raises:
        InvalidData: a long array begins with integers and goes on with something else, or is no JSON; or the columns
            would take more than `most_bytes`.
    """
    pieces: list[bytes] = []
    columns: list[Column | Rows] = []
    cuts: list[tuple[int, int]] = []
    done = taken = length = 0
    for match in _CUT.finditer(text):
        start = match.start()
        if text[start] == 0x22:
            continue
        column, end = _column(text, start, match.end(), longest)
        taken += _size(column)
        if taken > most_bytes:
            raise InvalidData(f"the arrays of integers take more than {readable(most_bytes)}")
        columns.append(column)
        pieces += (bytes(memoryview(text)[done:start]), _STAND_IN.encode())
        done = end
        length += len(pieces[-2]) + len(pieces[-1])
        cuts.append((length, end))
    pieces.append(bytes(memoryview(text)[done:]))
    return Separated(b"".join(pieces), taken, columns, cuts, text)


def _column(text: bytes | bytearray, start: int, end_of_run: int, longest: int) -> tuple[Column | Rows, int]:
    """The array at a place of the text as a column, and where it ends."""
    first = _NOT_SPACE.search(text, start + 1, end_of_run)
    nested = first is not None and first.group() == b"["
    if nested:
        closing = _END_OF_ROWS.search(text, start, end_of_run)
        end = -1 if closing is None or _NESTED.search(text, start + 1, closing.end()) else closing.end()
    else:
        end = text.find(b"]", start, end_of_run) + 1 or -1
        if text.find(b"[", start + 1, end) >= 0:
            end = -1
    if end < 0:
        raise _broken(text, start, "integers, or rows of them")
    if nested:
        return _rows(text, start + 1, end - 1, longest), end
    if text.count(b",", start, end) >= longest:
        return range(text.count(b",", start, end) + 1), end
    found = packed("i")
    for part in _parts(text, start + 1, end - 1, _COMMA):
        found = _extended(found, part)
    return found, end


def _rows(text: bytes | bytearray, start: int, end: int, longest: int) -> Rows:
    found, ends = packed("i"), packed("q")
    total = 0
    for rows, whole in _parts_of_rows(text, start, end):
        for i, row in enumerate(rows):
            if type(row) is not list or any(type(number) is not int for number in row):
                raise _broken(text, start - 1, "rows of integers")
            total += len(row)
            if whole or i < len(rows) - 1:
                ends.append(total)
            if total <= longest:
                found = _extended(found, row)
    return Rows(found if total <= longest else range(total), ends)


def _parts_of_rows(text: bytes | bytearray, start: int, end: int) -> Iterator[tuple[list[Any], bool]]:
    """The rows of an array some at a time, and whether the last of them is whole: a long one comes in parts."""
    begin = start - 1
    while start < end:
        step = min(start + _STEP, end)
        close = text.rfind(b"]", start, step)
        whole = close >= 0
        if not whole:
            close = text.find(b"]", step, end)
        border = _NEXT_ROW.match(text, close, end)
        after = None if border is not None else _NOT_SPACE.search(text, close + 1, end)
        stop = end if border is None else border.end() - 1
        if whole:  # with what must not follow, so that it is said where
            yield from ((rows, True) for rows in _parts(text, start, stop if after is None else after.end(), _NEVER))
        else:
            opening = text.find(b"[", start, close)
            if opening < 0 or after or text.find(b"[", opening + 1, close) >= 0 or text[start:opening].strip():
                raise _broken(text, begin, "rows of integers")
            yield from (([numbers], False) for numbers in _parts(text, opening + 1, close, _COMMA))
            yield [[]], True
        start = stop + 1
        if start == end:  # a comma, and nothing after it
            raise _no_value(text, end)


def _extended(found: packed[int], numbers: list[int]) -> packed[int]:
    """The array with more numbers, in more bytes each where it takes them; what no reader takes is made smaller."""
    try:
        found.extend(packed(found.typecode, numbers))
        return found
    except OverflowError:
        wide = packed("q", found)
        wide.extend(max(-_LARGE, min(_LARGE, number)) for number in numbers)
        return wide


def _parts(text: bytes | bytearray, start: int, end: int, border: re.Pattern[bytes]) -> Iterator[list[Any]]:
    """The entries of an array, decoded some at a time.

    Raises:
        InvalidData: they are no JSON.
    """
    view = memoryview(text)
    while True:
        found = border.search(text, min(start + _STEP, end), end)
        stop = end if found is None else found.end() - 1
        try:
            yield json.loads(b"[" + bytes(view[start:stop]) + b"]")
        except json.JSONDecodeError as error:
            line, column = _line_and_column(text, start + error.pos - 1)
            raise InvalidData(f"not JSON: {error.msg} at line {line} column {column}") from None
        except ValueError as error:  # an integer literal of thousands of digits
            raise InvalidData(f"not JSON that remat reads: {error}") from None
        if found is None:
            return
        start = found.end()
        if start == end:  # a comma, and nothing after it
            raise _no_value(text, end)


def _broken(text: bytes | bytearray, at: int, what: str) -> InvalidData:
    line, column = _line_and_column(text, at)
    return InvalidData(f"the array at line {line} column {column} holds something else than {what}")


def _no_value(text: bytes | bytearray, at: int) -> InvalidData:
    line, column = _line_and_column(text, at)
    return InvalidData(f"not JSON: Expecting value at line {line} column {column}")


def _size(column: Column | Rows) -> int:
    if isinstance(column, Rows):
        return _size(column.values) + _size(column.ends)
    return 0 if isinstance(column, range) else column.itemsize * len(column)


def _line_and_column(text: bytes | bytearray, at: int) -> tuple[int, int]:
    """As `json` counts them, in characters."""
    begin, view = text.rfind(b"\n", 0, at) + 1, memoryview(text)
    parts = (bytes(view[i : min(i + _STEP, at)]) for i in range(begin, at, _STEP))
    return text.count(b"\n", 0, at) + 1, 1 + sum(len(part.translate(None, _CONTINUED)) for part in parts)
