"""What a loop that never ends says of a database that does not answer: a line at the beginning, a line at the end."""

from __future__ import annotations

from typing import Any

import psycopg
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

_OUTAGE = (OperationalError, InterfaceError, PoolTimeout, psycopg.OperationalError, OSError, TimeoutError)


NO_ANSWER, NO_WRITES = "the database does not answer", "the database takes no writes"


def is_outage(error: BaseException) -> bool:
    """Whether an error says that the database, its disk or the network is in trouble, and not the program."""
    return isinstance(error, _OUTAGE)


def what_fails(error: BaseException) -> str:
    """What of the database is in trouble: it does not answer, or it answers and takes no writes."""
    origin = getattr(error, "orig", None) or error
    if isinstance(origin, psycopg.Error):
        away = origin.sqlstate is None or origin.sqlstate.startswith(("08", "57"))  # no connection, or a shutdown
    else:
        away = isinstance(origin, (PoolTimeout, OSError, TimeoutError))
    return NO_ANSWER if away else NO_WRITES


def first_line(error: BaseException) -> str:
    """What an error says, without the statement and the traceback."""
    said = str(getattr(error, "orig", None) or error).strip()
    return (said.splitlines() or [type(error).__name__])[0][:200]


class Outage:
    """One loop's view of the database.

    Args:
        log: where it is said.
        what: fails meanwhile.
    """

    def __init__(self, log: Any, what: str) -> None:
        self._log, self._what = log, what
        self._lasts = False

    def failed(self, error: BaseException, **about: object) -> None:
        """A round has failed and is tried again: an outage is said once, any other error with its traceback."""
        if not is_outage(error):
            self._log.exception(f"{self._what} failed; trying again", **about)
        elif not self._lasts:
            self._lasts = True
            self._log.warning(
                f"{self._what} fails while the database does not answer; trying again", error=first_line(error), **about
            )

    def over(self) -> None:
        """A round has come to its end."""
        if self._lasts:
            self._lasts = False
            self._log.info(f"{self._what} goes on: the database answers again")
