"""`remat-service`: serve, and look after what is served."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from .commands import operate
from .commands.tenants import groups_app, keys_app, tenants_app
from .errors import ServiceError
from .processes.sandbox import hide
from .settings import Settings
from .tenants.keys import acts

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DatabaseUrl = Annotated[str | None, typer.Option(help="sqlite:///PATH or postgresql://…")]
Workers = Annotated[int | None, typer.Option(help="Solves run at once.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"remat-service {version('remat')}")
        raise typer.Exit


@app.callback()
def root(
    version_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run and operate the service: each problem is solved once, verified, stored and shared."""


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one and prints it.")] = None,
    database_url: DatabaseUrl = None,
    workers: Workers = None,
) -> None:
    """Run the service until a signal; the line `remat-service ready on URL` says where."""
    settings = _settings(host=host, port=port, database_url=database_url, workers=workers)
    from .telemetry import set_up_logs  # what is wrong with the settings is said before the imports take their time
    from .web.server import serve as run

    set_up_logs(settings.log_level, settings.log_format)
    run(settings)


@app.command()
def worker(
    database_url: Annotated[str | None, typer.Option(help="postgresql://…, shared with the servers.")] = None,
    workers: Workers = None,
    metrics_port: Annotated[int, typer.Option(help="Port for Prometheus metrics; 0 for none.")] = 0,
) -> None:
    """Run a worker, which solves what servers queue, until a signal."""
    settings = _settings(database_url=database_url, workers=workers, dispatcher="cluster")
    from .solving.cluster import work
    from .telemetry import set_up_logs

    set_up_logs(settings.log_level, settings.log_format)
    asyncio.run(work(settings, metrics_port))


@app.command()
def migrate(database_url: DatabaseUrl = None) -> None:
    """Bring the database's schema up to date."""
    operate.upgrade(_settings(database_url=database_url))


@app.command()
def openapi() -> None:
    """Print the OpenAPI document as YAML."""
    from .web.app import as_yaml, create_app

    sys.stdout.write(as_yaml(create_app(_settings(database_url="sqlite://"))))


@app.command()
def backup(target: Annotated[Path, typer.Argument(help="The new file.")]) -> None:
    """Copy a SQLite database, also while a service runs on it."""
    operate.backup(target)


@app.command()
def audit(
    sample: Annotated[int, typer.Option(min=0, help="Stored problems to solve again.")] = 0,
    seconds: Annotated[float, typer.Option(help="For each of them, and no more than it took.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Which problems are in the sample.")] = 0,
    instances: Annotated[Path, typer.Option(help="Folder for the instances of contradictions.")] = Path("audited"),
    apply: Annotated[bool, typer.Option("--apply", help="Repair and drop what is damaged; can't be undone.")] = False,
) -> None:
    """Read everything in the store again, also while a service runs: what is damaged, and which bounds a plan refutes.

    Exit code 1 where something is wrong; plans that got worse with this version of the solver are only reported.
    """
    from .commands.audit import audit as run

    found = run(sample, seconds, seed, instances, typer.echo, apply)
    typer.echo("  ".join(f"{what} {count}" for what, count in found.items()))
    if not apply and any(what.endswith((" dropped", " mended")) for what in found):
        typer.echo("nothing was changed: `remat-service audit --apply` drops and mends what is named", err=True)
    if found["wrong"]:
        raise typer.Exit(1)


@app.command()
def history(
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest acts.")] = 100,
) -> None:
    """Print who has changed tenants, keys, groups or the store: one JSON object per line, oldest first."""
    for row in operate.in_database(lambda connection: acts(connection, limit)):
        typer.echo(json.dumps({"at": row.at.isoformat(), "actor": row.actor, "act": row.act, **row.about}))


@app.command()
def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
) -> None:
    """Show who works, what waits and runs of each tenant, and the store, until it is interrupted."""
    operate.top(every, 1 if once else 0)


app.add_typer(operate.store_app, name="store")
app.add_typer(groups_app, name="groups")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(operate.solves_app, name="solves")


def _settings(**given: Any) -> Settings:
    return Settings(**{name: value for name, value in given.items() if value is not None})


def main() -> None:
    """The entry point: what is refused is one line on standard error, exit code 2."""
    hide()
    try:
        app()
    except (ServiceError, ValueError, OSError) as error:
        message = getattr(error, "detail", None) or str(error).replace("\n", "; ")
        if isinstance(error, ValidationError):
            message = "; ".join(_said(each) for each in error.errors())
        print(f"remat-service: {message}", file=sys.stderr)
        sys.exit(2)


def _said(error: Any) -> str:
    """A setting that is wrong, as the variable that it is read from."""
    name = "_".join(("REMAT", *(str(part).upper() for part in error["loc"])))
    return f"{name}: {error['msg']}" if error["loc"] else str(error["msg"]).removeprefix("Value error, ")


if __name__ == "__main__":
    main()
