"""What is asked of a model, part by part: one that fails leaves the others as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from remat_ir import RematError

T = TypeVar("T")
U = TypeVar("U")


class Parts:
    """Parts of a prediction, one after the other: what failed is noted, and what is finished stays.

    After an interrupt no further part is begun.
    """

    def __init__(self) -> None:
        self._unknown: dict[str, str] = {}
        self._interrupted = False

    def part(self, name: str, make: Callable[[], T], otherwise: U) -> T | U:
        """What `make` gives, or `otherwise` with a note under this name of why it gave nothing."""
        why = "interrupted"
        if not self._interrupted:
            try:
                return make()
            except KeyboardInterrupt:
                self._interrupted = True
            except RematError as error:
                why = str(error)
        self._unknown[name] = why
        return otherwise

    def unknown(self) -> dict[str, str]:
        """The parts that failed since this was last asked, and why."""
        found, self._unknown = self._unknown, {}
        return found
