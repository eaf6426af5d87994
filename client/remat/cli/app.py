"""What the commands of `remat` share: the app that they join, their options, and the exit codes.

Exit codes: 0 a plan (or what was asked for), 2 bad input, 3 infeasible, 4 nothing found in time, 5 the service could
not be reached or failed, 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from remat_ir import Answer, RematError, Status

from ..errors import BudgetTooSmall, NothingFound, Refused, ServiceError

BAD_INPUT, INFEASIBLE, NOTHING_FOUND, SERVICE, INTERRUPTED = 2, 3, 4, 5, 130

ORDER = (
    *(
        "capture",
        "plan",
        "fit",
        "compare",
        "solve",
        "verify",
        "sweep",
        "max-batch",
        "show",
        "explain",
        "export",
        "import-solution",
    ),
    *("attach", "cancel", "ls", "doctor", "warm"),
)


class InOrder(TyperGroup):
    """The commands in the order in which one comes to need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return sorted(super().list_commands(ctx), key=lambda name: (name not in ORDER, (*ORDER, name).index(name)))


app = typer.Typer(
    cls=InOrder,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A graph, chain or join file; - is standard input.")]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="SIZE", help="4GiB, bytes, or 50% of what plain training needs."),
]
FractionOption = Annotated[
    float | None,
    typer.Option("--budget-fraction", "-f", metavar="F", help="Share of the plain activation peak, 0 to 1."),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="LINK",
        help="Plan transfers to the host over this link: pcie4, pcie5, nvlink-c2c, a device such as h100, bytes a "
        "second each way such as 25GB, or a JSON file.",
    ),
]
MethodOption = Annotated[str, typer.Option("--method", "-m", help="A method of the solver; auto combines them.")]
TimeOption = Annotated[float, typer.Option("--time-limit", "-t", metavar="S", help="Seconds to solve for.")]
GapOption = Annotated[
    float, typer.Option("--max-gap", "-g", metavar="G", help="Stop at this gap, (cost − bound) / cost.")
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        help="Stop when a better plan could save less in N steps of training than the time already spent.",
    ),
]
UrlOption = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="URL of the service, instead of REMAT_BASE_URL.")
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the solve in the service's lists; it is sent there."),
]
LocalOption = Annotated[bool, typer.Option("--local", help="Solve here, whatever REMAT_BASE_URL says.")]
MethodOptions = Annotated[
    list[str] | None, typer.Option("--option", "-O", metavar="KEY=VALUE", help="An option of the method.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]


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
