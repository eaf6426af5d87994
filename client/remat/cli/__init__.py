"""`remat`: plan a file, check a plan, look at either; the way in, and its errors in one line each."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from remat_ir import RematError

from ..planning.phases import Lines
from . import doctor, model, service, show, solve  # noqa: F401  their commands join the app
from .app import BAD_INPUT, INTERRUPTED, app, error_code

ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _version(asked: bool) -> None:
    if asked:
        try:
            found = version("remat")
        except PackageNotFoundError:
            found = "unknown"
        print(f"remat {found}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log on standard error what is done; full tracebacks.")
    ] = False,
    version_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Optimal tensor rematerialization: plan a training step inside a memory budget, prove the plan, look at it.

    Exit codes: 0 a plan, 2 bad input, 3 infeasible, 4 nothing found in time, 5 the service could not be reached or
    failed.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    log = logging.getLogger("remat")
    log.handlers = [Lines()]
    log.setLevel(logging.INFO if verbose else logging.WARNING)


def main() -> None:
    """The entry point: what is refused is one line on standard error."""
    code: object = 0
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # what fails while the interpreter ends is a traceback
    except ClickException as error:
        sys.exit(_complain(error.format_message(), error.exit_code))
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", INTERRUPTED))
    except RematError as error:
        if logging.getLogger("remat").isEnabledFor(logging.INFO):  # --verbose
            traceback.print_exception(error)
        sys.exit(_complain(". ".join([str(error).rstrip("."), *getattr(error, "__notes__", ())]), error_code(error)))
    except (BrokenPipeError, SystemExit) as error:  # the latter is typer's word for the former
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _print_no_more()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _print_no_more()
        sys.exit(_complain(f"the output cannot be written: {error.strerror}", BAD_INPUT))
    sys.exit(code if isinstance(code, int) else 0)


def _print_no_more() -> None:
    """Let what is still to be printed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split()) or "refused"
    print(f"remat: {line}", file=sys.stderr)
    return code
