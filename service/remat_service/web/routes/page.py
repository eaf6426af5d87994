"""The page at `/`: files of this package, and nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FILES = Path(__file__).parents[1] / "page" / "static"

GUARDS = {
    # uPlot and the canvas draw with script; nothing is inline, nothing is fetched from elsewhere, nobody may frame it
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The page; what it shows, it asks of the API like anybody else."""
    return FileResponse(FILES / "index.html", headers=GUARDS)


class Files(StaticFiles):
    """The page's scripts and styles, under the page's own guards."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file."""
        response = await super().get_response(path, scope)
        response.headers.update(GUARDS)
        return response


def static_files() -> Any:
    """The application that serves the page's files, to be mounted at `/static`."""
    return Files(directory=FILES)
