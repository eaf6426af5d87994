"""`remat warm`: the solver's kernels compiled before the first plan is asked for."""

from __future__ import annotations

import subprocess
import sys

import typer

from ..planning.sources import solver_door
from .app import app


@app.command()
def warm() -> None:
    """Compile the local solver's kernels now, once for an installation: some 20 seconds.

    Otherwise the first plan waits for it.
    """
    package = solver_door("local").__module__.partition(".")[0]
    done = subprocess.run([sys.executable, "-P", "-m", f"{package}.warm"], check=False)
    raise typer.Exit(done.returncode)
