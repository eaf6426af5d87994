"""A `stop` that counts, so that no test of what ends in time needs a clock."""

from __future__ import annotations


class After:
    """Says stop from the poll after so many on; `polls` is how often it was asked."""

    def __init__(self, most: float = float("inf")) -> None:
        self.most, self.polls = most, 0

    def __call__(self) -> bool:
        self.polls += 1
        return self.polls > self.most
