"""`remat-proof/1`: what a certificate says. What its rows mean stands in `rows`, what it proves in `check`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..errors import InvalidData
from ..read import LARGEST_INTEGER, array, integer, integers, kind, members, parsed

FORMAT = "remat-proof/1"
MOST_ROWS = 200_000
MOST_NODES = 100_000
MOST_NUMBERS = 4_000_000
"""Integers in all rows and leaves of a certificate together."""
MOST_CUTS = 10_000
MOST_PAIRS = 4_000_000
MOST_PARTS = 1_000
MOST_WINDOWS = 100_000

Row: TypeAlias = tuple[str | int, ...]
"""The kind of a row, then the numbers that say which one; see `rows.KINDS` and `check.Rounding`."""
Column: TypeAlias = tuple[str | int, ...]
"""("run", a, b, op), ("hold", c, value) or ("through", c, value); see `rows`."""


class Branch(NamedTuple):
    """A node that tells apart the points where a column is 0 from those where it is 1; its two subtrees follow."""

    column: Column


class Leaf(NamedTuple):
    """A multiplier for each of some rows: `duals` are pairs (row, multiplier over the denominator), multipliers > 0.

    `empty`: the multipliers prove that no point of this part of the space satisfies the rows.
    """

    duals: tuple[tuple[int, int], ...]
    empty: bool = False


@dataclass(frozen=True)
class _AnyProof:
    """What certificates of every kind have: `by`, the kind, and the digest of the problem that one is about."""

    by: ClassVar[str]

    digest: str

    def to_json(self) -> dict[str, Any]:
        """The `remat-proof/1` object."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        listed = {name: list(map(_entry, v)) if isinstance(v, tuple) else v for name, v in found.items()}
        return {"format": FORMAT, "by": self.by, "problem": listed.pop("digest"), **listed}


def _entry(item: Any) -> Any:
    """An entry of one of a certificate's tuples as JSON."""
    if isinstance(item, Branch):
        return ["branch", list(item.column)]
    if isinstance(item, Leaf):
        return ["empty" if item.empty else "bound", [number for pair in item.duals for number in pair]]
    if isinstance(item, StageProof):
        return item.to_json()
    return list(item) if isinstance(item, tuple) else item


@dataclass(frozen=True)
class StageProof(_AnyProof):
    """A bound by linear relaxations over coarse stages, one for each leaf of a tree.

    Attributes:
        cuts: the ops that end coarse stages, ascending; the last op of the graph is the last of them.
        spans: (a, b), the coarse stages a … b that are taken as one as well.
        rows: those that leaves refer to by position.
        denominator: of all multipliers.
        nodes: the tree in preorder; after a `Branch` comes the subtree where its column is 0, then the one where it
            is 1.
    """

    by = "stages"

    cuts: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...]
    denominator: int
    nodes: tuple[Branch | Leaf, ...]


@dataclass(frozen=True)
class PairProof(_AnyProof):
    """No plan fits: op `op` can't run, since it needs too much, or needs two values that are never resident together.

    Attributes:
        op: the op that cannot run for the first time.
        pairs: (u, v), u ≤ v, ascending: values that are never resident at one moment; (v, v) is never resident at all.
    """

    by = "pairs"

    op: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class WindowProof(_AnyProof):
    """A bound by windows of a deep network, each with a certificate of its own; see `windows`.

    Attributes:
        turn: the op at whose first computation little fits.
        firsts: [segments + 1] the first op before the turn of each segment, and where the last one ends, ascending.
        laters: [segments + 1] segment i has the ops laters[i + 1] … laters[i] − 1 after the turn, descending.
        small_bytes: values of at most so many bytes count as held.
        parts: certificates of windows as graphs, under the problem's capacity; their digest is the problem's.
        windows: (start, end, spare, part): what a part proves of segments start … end − 1 of which no more than `spare`
            bytes are held at the turn; more than 0 for single segments alone.
    """

    by = "windows"

    turn: int
    firsts: tuple[int, ...]
    laters: tuple[int, ...]
    small_bytes: int
    parts: tuple[StageProof, ...]
    windows: tuple[tuple[int, int, int, int], ...]


Proof: TypeAlias = StageProof | PairProof | WindowProof


def read_proof(data: object) -> Proof:
    """Read a `remat-proof/1` object, or its text.

    Raises:
        InvalidData: malformed in any way; the message and the pointer say where.
    """
    data = parsed(data)
    if isinstance(data, dict) and data.get("by") == "pairs":
        found = members(data, "proof", required=("by", "problem", "op", "pairs"), format_name=FORMAT)
        pairs = _rows(found["pairs"], "pairs", MOST_PAIRS, 2, "two")
        return PairProof(_digest(found["problem"]), integer(found["op"], "op", "/op"), pairs)
    if isinstance(data, dict) and data.get("by") == "windows":
        return _read_windows(data)
    return _read_stages(data)


def _read_windows(data: dict[str, Any]) -> WindowProof:
    required = ("by", "problem", "turn", "firsts", "laters", "small_bytes", "parts", "windows")
    found = members(data, "proof", required=required, format_name=FORMAT)
    parts = array(found["parts"], "parts", "/parts", MOST_PARTS)
    windows = array(found["windows"], "windows", "/windows", MOST_WINDOWS)
    read = tuple(_read_part(part, i) for i, part in enumerate(parts))
    # together, as many as of a certificate without parts
    _few((row for part in read for row in part.rows), len, "/parts")
    _few((node for part in parts for node in part["nodes"]), lambda node: 2 * len(node[1]), "/parts")
    return WindowProof(
        digest=_digest(found["problem"]),
        turn=integer(found["turn"], "turn", "/turn"),
        firsts=integers(found["firsts"], "firsts", "/firsts", MOST_CUTS),
        laters=integers(found["laters"], "laters", "/laters", MOST_CUTS),
        small_bytes=integer(found["small_bytes"], "small_bytes", "/small_bytes"),
        parts=read,
        windows=_rows(windows, "windows", MOST_WINDOWS, 4, "four"),
    )


def _read_part(data: object, i: int) -> StageProof:
    try:
        return _read_stages(data)
    except InvalidData as error:
        raise InvalidData(f"parts[{i}]: {error}", f"/parts/{i}{error.pointer}") from None


def _read_stages(data: object) -> StageProof:
    required = ("by", "problem", "cuts", "spans", "rows", "denominator", "nodes")
    found = members(data, "proof", required=required, format_name=FORMAT)
    if found["by"] != "stages":
        raise InvalidData("proof: by must be 'stages', 'pairs' or 'windows'", "/by")
    rows = array(found["rows"], "rows", "/rows", MOST_ROWS)
    nodes = array(found["nodes"], "nodes", "/nodes", MOST_NODES)
    _few(rows, lambda row: len(row), "/rows")
    _few(nodes, lambda node: 2 * len(node[1]), "/nodes")
    return StageProof(
        digest=_digest(found["problem"]),
        cuts=integers(found["cuts"], "cuts", "/cuts", MOST_CUTS),
        spans=_rows(found["spans"], "spans", MOST_CUTS, 2, "two"),
        rows=tuple(_tagged(row, f"rows[{i}]", f"/rows/{i}") for i, row in enumerate(rows)),
        denominator=integer(found["denominator"], "denominator", "/denominator", least=1),
        nodes=tuple(_read_node(node, i) for i, node in enumerate(nodes)),
    )


def _few(items: Iterable[Any], size: Any, pointer: str) -> None:
    """Refuse, before anything is copied, what is more than `MOST_NUMBERS` together; malformed items count nothing."""
    total = 0
    for item in items:
        try:
            total += size(item)
        except (TypeError, IndexError, KeyError):
            continue
        if total > MOST_NUMBERS:
            raise InvalidData(f"proof: more than {MOST_NUMBERS} numbers", pointer)


def _digest(value: object) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise InvalidData("proof: problem must be a digest of 64 hexadecimal digits", "/problem")
    return value


def _rows(data: object, what: str, longest: int, width: int, word: str) -> tuple[Any, ...]:
    """Rows of so many integers each."""
    found: list[tuple[int, ...]] = []
    for i, item in enumerate(array(data, what, f"/{what}", longest)):
        row = integers(item, f"{what}[{i}]", f"/{what}/{i}", width)
        if len(row) != width:
            raise InvalidData(f"{what}[{i}] must have {word} entries", f"/{what}/{i}")
        found.append(row)
    return tuple(found)


def _tagged(data: object, what: str, pointer: str) -> tuple[str | int, ...]:
    """A word, then integers from −2^53 to 2^53."""
    items = array(data, what, pointer, MOST_NUMBERS)
    if not items or not isinstance(items[0], str):
        raise InvalidData(f"{what} must begin with a word, not {kind(items[0]) if items else 'nothing'}", pointer)
    for number in items[1:]:
        if type(number) is not int or not -LARGEST_INTEGER <= number <= LARGEST_INTEGER:
            raise InvalidData(f"{what}: {str(number)[:60]} must be an integer from −2^53 to 2^53", pointer)
    return tuple(items)


def _read_node(data: object, i: int) -> Branch | Leaf:
    here = f"/nodes/{i}"
    items = array(data, f"nodes[{i}]", here, 2)
    if len(items) != 2 or items[0] not in ("branch", "bound", "empty"):
        raise InvalidData(f"nodes[{i}] must be ['branch', column], ['bound', duals] or ['empty', duals]", here)
    if items[0] == "branch":
        return Branch(_tagged(items[1], f"nodes[{i}]: column", here + "/1"))
    flat = integers(items[1], f"nodes[{i}]", here + "/1", 2 * MOST_ROWS)
    if len(flat) % 2:
        raise InvalidData(f"nodes[{i}] must list rows and multipliers in turn", here + "/1")
    return Leaf(tuple(zip(flat[::2], flat[1::2], strict=True)), items[0] == "empty")
