"""`remat-service`: serve, and look after what is served."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from .commands import operate
from .commands.audit import audit
from .commands.tenants import groups_app, keys_app, tenants_app
from .errors import ServiceError
from .processes.sandbox import hide
from .settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    database_url: operate.DatabaseUrl = None,
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
def openapi() -> None:
    """Print the OpenAPI document as YAML."""
    from .web.app import as_yaml, create_app

    sys.stdout.write(as_yaml(create_app(_settings(database_url="sqlite://"))))


for command in (operate.migrate, operate.backup, audit, operate.history, operate.top):
    app.command()(command)
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
