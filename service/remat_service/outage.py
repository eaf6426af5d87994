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
    """One loop's view of the database; as a context, it goes round one round of the loop and lets no error out.

    Args:
        log: where it is said.
        what: fails meanwhile.
        passes: an error that is no failure, and is let out.
        about: what is said with it.

    Attributes:
        failing: whether the last round has failed.
    """

    def __init__(self, log: Any, what: str, passes: type[Exception] | tuple[()] = (), **about: object) -> None:
        self._log, self._what, self._passes, self._about = log, what, passes, about
        self._lasts = self.failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self.over()
        elif isinstance(error, self._passes) or not isinstance(error, Exception):
            return False
        else:
            self.failed(error)
        return True

    def failed(self, error: Exception) -> None:
        """A round has failed and is tried again: an outage is said once, any other error with its traceback."""
        self.failing = True
        if not is_outage(error):
            self._log.exception(f"{self._what} failed; trying again", **self._about)
        elif not self._lasts:
            self._lasts = True
            said = f"{self._what} fails while the database does not answer; trying again"
            self._log.warning(said, error=first_line(error), **self._about)

    def over(self) -> None:
        """A round has come to its end."""
        self.failing = False
        if self._lasts:
            self._lasts = False
            self._log.info(f"{self._what} goes on: the database answers again")
