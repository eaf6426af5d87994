"""The page's table of errors is what their classes say, and each says what to do."""

from __future__ import annotations

from pathlib import Path

import remat.distributed
import remat.errors
import remat.planning.memo  # so that every class is there
from remat_ir import RematError

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"


def kinds(of: type[RematError] = RematError) -> list[type[RematError]]:
    """A class of errors, then what is derived from it, that a client meets, each before its own."""
    found = [
        each
        for each in sorted(of.__subclasses__(), key=lambda kind: kind.__name__)
        if each.__module__.split(".")[0] == "remat" or each.__module__ == "remat_ir.errors"
    ]
    return [kind for each in found for kind in (each, *kinds(each))]


def remedy(kind: type[RematError]) -> str:
    """What to do about a kind of error, by its own class."""
    return str(remat.errors.REMEDIES.get(kind) or vars(kind)["remedy"])


def row(kind: type[RematError]) -> str:
    """A kind's row of the table: the first sentence of its docstring, and its remedy."""
    first = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return f"| `{kind.__name__}` | {first} | {remedy(kind)} |"


def test_every_error_says_what_to_do() -> None:
    assert len(kinds()) >= 16
    for kind in kinds():
        assert remedy(kind).endswith("."), kind
        assert len(remedy(kind)) > 40, kind


def test_a_class_without_a_remedy_is_found() -> None:
    class Silent(remat.errors.ServiceError):
        """Says nothing of its own."""

    try:
        remedy(Silent)
    except KeyError:
        return
    raise AssertionError("the remedy of another class was taken for its own")


def test_the_page_has_the_table_of_the_classes() -> None:
    lines = ["| error | what it means | what to do |", "| --- | --- | --- |", *map(row, kinds())]
    text = PAGE.read_text()
    written = text.split("<!-- errors: begin -->\n\n")[1].split("\n\n<!-- errors: end -->")[0].split("\n")
    assert written == lines, "\n".join(lines)
