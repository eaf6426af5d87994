"""`remat`: plan a file, check a plan, look at either; the way in, its exit codes, and its errors in one line each.

Exit codes: 0 a plan (or what was asked for), 2 bad input, 3 infeasible, 4 nothing found in time, 5 the service could
not be reached or failed, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_ir import Answer, RematError, Status

from .errors import BudgetTooSmall, NothingFound, Refused, ServiceError

BAD_INPUT, INFEASIBLE, NOTHING_FOUND, SERVICE, INTERRUPTED = 2, 3, 4, 5, 130

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)

ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A graph, chain or join file; - is standard input.")]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", "-b", metavar="BYTES", help="Bytes, or text such as 4GiB.")
]
FractionOption = Annotated[
    float | None,
    typer.Option("--budget-fraction", "-f", metavar="F", help="Share of the plain activation peak, 0 to 1."),
]
MethodOption = Annotated[str, typer.Option("--method", "-m", help="A method of the solver; auto combines them.")]
TimeOption = Annotated[float, typer.Option("--time-limit", "-t", metavar="S", help="Seconds to solve for.")]
GapOption = Annotated[float, typer.Option("--max-gap", "-g", metavar="G", help="Stop at this (cost − bound) / cost.")]
UrlOption = Annotated[str | None, typer.Option("--base-url", metavar="URL", help="The service; over REMAT_BASE_URL.")]
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


def _version(asked: bool) -> None:
    if asked:
        try:
            found = version("remat")
        except PackageNotFoundError:
            found = "unknown"
        print(f"remat {found}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell on standard error what is done.")] = False,
    version_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Optimal tensor rematerialization: plan a training step inside a memory budget, prove the plan, look at it.

    Exit codes: 0 a plan, 2 bad input, 3 infeasible, 4 nothing found in time, 5 the service could not be reached or
    failed.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="remat: %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)


def main() -> None:
    """The entry point: what is refused is one line on standard error."""
    from . import cli_look, cli_service, cli_solve, cli_sweep  # their commands join the app on import

    del cli_look, cli_service, cli_solve, cli_sweep
    try:
        code = app(standalone_mode=False)
    except ClickException as error:
        sys.exit(_complain(error.format_message(), error.exit_code))
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", INTERRUPTED))
    except RematError as error:
        sys.exit(_complain(str(error), error_code(error)))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split()) or "refused"
    print(f"remat: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
