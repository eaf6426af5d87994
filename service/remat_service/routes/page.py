"""The page: one document at `/`, its scripts and styles under `/static`; nothing comes from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

_STATIC = Path(__file__).parent.parent / "page" / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> FileResponse:
    """The page."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return FileResponse(_STATIC / "index.html", headers=headers)


def static_files() -> StaticFiles:
    """What the page loads."""
    return StaticFiles(directory=_STATIC)
