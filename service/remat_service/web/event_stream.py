"""Server-sent events of a request: every improvement, then its end; resumable, since all of it is stored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ..context import Context
from ..errors import ServiceError
from ..identity import Caller
from ..requests import read

_ALIVE_S = 10.0
_KEY_S = 1.0
"""Seconds between looks at the key, which cost no query while it is remembered; the database is read at a change."""


async def stream(
    context: Context, who: Callable[[], Awaitable[Caller]], request_id: str, after: int
) -> AsyncIterator[bytes]:
    """Events above `after`, as they come: `progress` with its seq as id, then `end` with the answer but its plan.

    `who` is asked every second, so that a stream ends with its key.
    """
    yield b"retry: 1000\n\n"
    quiet_since = context.clock.monotonic()
    solve_id = (await read.find_request(context, await who(), request_id)).solve_id
    with context.notifier.subscribe(request_id, *([solve_id] if solve_id else [])) as changes:
        changed = True
        while True:
            try:
                caller = await who()
            except ServiceError:
                return
            if changed:
                changes.reset()
                row = await read.find_request(context, caller, request_id)
                for point in await read.progress_of(context, row, after):
                    after = point["seq"]
                    yield event("progress", point, after)
                    quiet_since = context.clock.monotonic()
                if row.ended:
                    yield event("end", read.listed_answer(context, row), after)
                    return
            if context.leaving:
                return  # the client comes back with Last-Event-ID
            if context.clock.monotonic() - quiet_since >= _ALIVE_S:
                yield b": alive\n\n"
                quiet_since = context.clock.monotonic()
            changed = await changes.wait(_KEY_S)


def event(name: str, data: Any, number: int) -> bytes:
    """One event in the format of the HTML standard."""
    text = json.dumps(data, separators=(",", ":"))
    return f"id: {number}\nevent: {name}\ndata: {text}\n\n".encode()
