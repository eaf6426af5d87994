"""What the commands of `remat` share: the app that they join, their files, and the exit codes.

Exit codes: 0 a plan (or what was asked for), 2 bad input, 3 infeasible, 4 nothing found in time, 5 the service could
not be reached or failed, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from remat_ir import SUBJECTS, Answer, AnyPlan, InvalidData, RematError, Status, Subject, is_node_link, read_plan
from remat_ir.read import parse

from ..errors import BudgetTooSmall, NothingFound, Refused, ServiceError
from ..planning.folder import write_named

BAD_INPUT, INFEASIBLE, NOTHING_FOUND, SERVICE, INTERRUPTED = 2, 3, 4, 5, 130

ORDER = (
    *("capture", "plan", "fit", "compare", "solve", "verify", "sweep", "max-batch", "show", "explain", "export"),
    *("import-solution", "attach", "cancel", "ls", "doctor", "warm"),
)


class InOrder(TyperGroup):
    """The commands in the order in which one comes to need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return list(ORDER)


app = typer.Typer(
    cls=InOrder,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def text_console(*, stderr: bool = False) -> Console:
    """Prints names as they are: of ops, models and files, which may have brackets that mean a style to rich."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def code_of(answer: Answer) -> int:
    """The exit code that an answer's ending stands for."""
    if answer.plan is not None:
        return 0
    if answer.status is Status.INFEASIBLE:
        return INFEASIBLE
    return SERVICE if answer.status is Status.FAILED else NOTHING_FOUND


def error_code(error: RematError) -> int:
    """The exit code that an error stands for."""
    if isinstance(error, BudgetTooSmall):
        return INFEASIBLE
    if isinstance(error, NothingFound):
        return NOTHING_FOUND
    if isinstance(error, Refused) and error.status in (400, 404, 410, 413, 422):
        return BAD_INPUT
    return SERVICE if isinstance(error, ServiceError) else BAD_INPUT


T = TypeVar("T")

FORMATS = {"remat-graph/1": "graph", "remat-chain/1": "chain", "remat-join/1": "join"}


def read_subject(path: Path) -> Subject:
    """A graph, a chain or a join, told apart by `format`; node-link data has none. "-" is standard input.

    Raises:
        InvalidData: unreadable or malformed; the message names the file and the place.
    """

    def read(data: Any) -> Subject:
        form = data.get("format") if isinstance(data, dict) else None
        if isinstance(data, dict) and form not in FORMATS and not is_node_link(data):
            forms = f"{', '.join(FORMATS)}, or absent from node-link data"
            raise InvalidData(f"format must be one of {forms}, not {form!r}", "/format")
        subject: Subject = SUBJECTS[FORMATS.get(str(form), "graph")].make(data)
        return subject

    return _reading(path, read)


def read_plan_file(path: Path) -> tuple[AnyPlan, Answer | None]:
    """A plan, or an answer that has one; "-" is standard input.

    Raises:
        InvalidData: unreadable or malformed; the message names the file and the place.
    """
    found = read_plan_or_infeasible(path)
    if isinstance(found, Answer):
        raise InvalidData(f"{path}: the answer is {found.status.value} and has no plan", "/plan")
    return found


def read_plan_or_infeasible(path: Path) -> tuple[AnyPlan, Answer | None] | Answer:
    """A plan, with the answer that has it, or an answer that says that there is none; "-" is standard input.

    Raises:
        InvalidData: unreadable or malformed, or an answer of another status without a plan.
    """

    def read(data: Any) -> tuple[AnyPlan, Answer | None] | Answer:
        if not (isinstance(data, dict) and "status" in data):
            return read_plan(data), None
        answer = Answer.from_json(data)
        if answer.plan is not None:
            return answer.plan, answer
        if answer.status is not Status.INFEASIBLE:
            raise InvalidData(f"the answer is {answer.status.value} and has no plan", "/plan")
        return answer

    return _reading(path, read)


def write_json(path: Path, data: object) -> None:
    """Write JSON so that no reader sees a part of it; "-" is standard output.

    Raises:
        InvalidData: the file cannot be written.
    """
    write_text(path, json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text so that no reader sees a part of it; "-" is standard output.

    Raises:
        InvalidData: the file cannot be written.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        return
    check_writable(path)
    try:
        write_named(path, text.encode())
    except OSError as error:
        raise InvalidData(f"{path} cannot be written: {error.strerror or error}") from None


def check_writable(path: Path | None, *, printed: bool = True) -> None:
    """Refuse a file whose folder is not there or takes none, before hours are spent on what would go into it.

    Args:
        printed: whether "-" is standard output; else it is refused.

    Raises:
        InvalidData: there is no such folder, or nothing may be written to it; or the path is a folder itself.
    """
    if path is None:
        return
    if str(path) == "-":
        if printed:
            return
        raise InvalidData("this is written to a file, not to standard output: give its name in place of -")
    if not path.parent.is_dir():
        raise InvalidData(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidData(f"{path} cannot be written: it is a folder")
    folder = Path(os.path.realpath(path)).parent
    if not (os.access(folder, os.W_OK | os.X_OK) or (path.exists() and os.access(path, os.W_OK))):
        raise InvalidData(f"{path} cannot be written: the folder {folder} is not to be written to")


def read_text(path: Path) -> str:
    """The text of a file; "-" is standard input.

    Raises:
        InvalidData: unreadable, or not UTF-8.
    """
    try:
        return _bytes_of(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidData(f"{_name_of(path)} is not text: not UTF-8 at byte {error.start}") from None


def _name_of(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _bytes_of(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InvalidData(f"{_name_of(path)} cannot be read: {error.strerror or error}") from None


def _reading(path: Path, read: Callable[[Any], T]) -> T:
    name, text = _name_of(path), _bytes_of(path)
    try:
        return read(parse(text))
    except InvalidData as error:
        where = f" (at {error.pointer})" if error.pointer else ""
        raise InvalidData(f"{name}: {error}{where}", error.pointer) from None
