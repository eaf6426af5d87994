"""Reading JSON that somebody else wrote: every refusal names the place.

Large JSON is read in little memory: a list of a million integers takes 40 MB, the text of it a few. So long arrays of
integers, and of such arrays, are cut out of the text and decoded a piece at a time, into columns of machine integers;
what is left of the text is parsed as ever. The readers of documents take columns where they take lists, and so a large
graph is refused, wherever it is wrong, before its tuples are made.
"""

from __future__ import annotations

import json
import re
from array import array as packed
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from .errors import InvalidData

LARGEST_INTEGER = 2**53
"""Integers above this do not survive a reader that holds numbers as doubles."""


class Rows(Sequence[Any]):
    """Rows of integers: all of them in order, and where each row ends among them."""

    def __init__(self, values: packed[int] | range, ends: packed[int]) -> None:
        self.values, self.ends = values, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]


Integers: TypeAlias = "tuple[int, ...] | packed[int] | range"
IntegerRows: TypeAlias = "tuple[tuple[int, ...], ...] | Rows"


def refused_constant(name: str) -> Any:
    """What JSON has no numbers for."""
    raise InvalidData(f"{name} is not a number that remat accepts")


def parse(
    text: str | bytes | bytearray,
    constant: Callable[[str], Any] = refused_constant,
    place: Callable[[int], tuple[int, int]] | None = None,
) -> Any:
    """Parse JSON text, refusing NaN, infinities and duplicate keys.

    Args:
        constant: what to make of NaN, Infinity and -Infinity.
        place: line and column of a character, where the text is a part of another.

    Raises:
        InvalidData: the text is not JSON; the message gives line and column.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise InvalidData(f"key {key!r} appears twice")
                seen.add(key)
        return found

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        line, column = (error.lineno, error.colno) if place is None else place(error.pos)
        raise InvalidData(f"not JSON: {error.msg} at line {line} column {column}") from None
    except UnicodeDecodeError as error:
        raise InvalidData(f"not JSON: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidData("not JSON that remat reads: nested too deeply") from None
    except ValueError as error:  # an integer literal of thousands of digits
        raise InvalidData(f"not JSON that remat reads: {error}") from None


def parsed(data: object) -> Any:
    """What a JSON text says; what is no text as it is."""
    return parse(data) if isinstance(data, (str, bytes)) else data


def members(
    data: object, what: str, required: Iterable[str], optional: Iterable[str] = (), format_name: str | None = None
) -> Mapping[str, Any]:
    """The members of an object that has all `required` keys and no unknown one.

    Raises:
        InvalidData: not an object, a missing or unknown key, another format.
    """
    if not isinstance(data, Mapping):
        raise InvalidData(f"{what} must be an object, not {kind(data)}")
    if format_name is not None and data.get("format") != format_name:
        raise InvalidData(f"{what} must have format {format_name!r}, not {data.get('format')!r}", "/format")
    known = {*required, *optional, *(("format",) if format_name else ())}
    for key in data:
        if key not in known:
            raise InvalidData(f"{what} has an unknown key {str(key)[:60]!r}", "/" + escape(str(key)[:60]))
    for key in required:
        if key not in data:
            raise InvalidData(f"{what} lacks the key {key!r}", "/" + key)
    return data


def integer(value: object, what: str, pointer: str, least: int = 0, most: int = LARGEST_INTEGER) -> int:
    """An integer within [least, most]; booleans and floats are refused, also 1.0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidData(f"{what} must be an integer, not {kind(value)}", pointer)
    if value < least:
        bound = "must not be negative" if least == 0 else f"must be at least {least}"
        raise InvalidData(f"{what} {bound}", pointer)
    if value > most:
        raise InvalidData(f"{what} must be at most {'2^53' if most == LARGEST_INTEGER else most}", pointer)
    return value


def array(value: object, what: str, pointer: str, longest: int | None = None) -> Sequence[Any]:
    """A JSON array of at most `longest` entries."""
    if not isinstance(value, _ARRAYS):
        raise InvalidData(f"{what} must be an array, not {kind(value)}", pointer)
    _few(len(value), what, pointer, longest)
    return value


def integers(value: object, what: str, pointer: str, longest: int | None = None) -> tuple[int, ...]:
    """An array of integers; ranges are the caller's business."""
    return tuple(column(value, what, pointer, longest))


def column(value: object, what: str, pointer: str, longest: int | None = None) -> Integers:
    """The same, but for a column, which stays one."""
    items = array(value, what, pointer, longest)
    if isinstance(items, (packed, range)):
        return items
    if not _all_integers(items):
        i, item = next((i, item) for i, item in enumerate(items) if type(item) is not int)
        raise InvalidData(f"{what}[{i}] must be an integer, not {kind(item)}", f"{pointer}/{i}")
    return tuple(items)


def integer_rows(value: object, what: str, pointer: str, longest: int | None, longest_row: int | None) -> IntegerRows:
    """An array of arrays of integers; ranges are the caller's business."""
    rows = array(value, what, pointer, longest)
    if isinstance(rows, Rows):
        return rows
    plain = set(map(type, rows)) <= {list} and _all_integers(chain.from_iterable(rows))
    if plain and (longest_row is None or max(map(len, rows), default=0) <= longest_row):
        return tuple(map(tuple, rows))
    return tuple(integers(row, f"{what}[{i}]", f"{pointer}/{i}", longest_row) for i, row in enumerate(rows))


def length(value: object) -> int:
    """Entries of an array in whatever form it was parsed; 0 of anything else."""
    return len(value) if isinstance(value, _ARRAYS) else 0


def length_of_rows(value: object) -> int:
    """Entries of the arrays in an array together; what is no array counts nothing."""
    if isinstance(value, Rows):
        return len(value.values)
    if not isinstance(value, (list, tuple)):
        return 0
    return sum(map(len if set(map(type, value)) <= {list, tuple} else length, value))


def _all_integers(items: Iterable[object]) -> bool:
    return set(map(type, items)) <= {int}


def _few(count: int, what: str, pointer: str, longest: int | None) -> None:
    if longest is not None and count > longest:
        raise InvalidData(f"{what} has {count} entries, more than the {longest} allowed", pointer)


_ARRAYS = (list, tuple, packed, range, Rows)


def kind(value: object) -> str:
    """What a JSON value is called in a message to a person."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return f"the float {value!r}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, _ARRAYS):
        return "an array"
    if isinstance(value, Mapping):
        return "an object"
    return type(value).__name__


def escape(key: str) -> str:
    """A key as one segment of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


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
                raise InvalidData(f"{name} is not a number that remat accepts")
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
            raise InvalidData(f"the arrays of integers take more than {most_bytes} bytes")
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
