"""What can be wrong with data, and what it is called.

RematError
├── InvalidData      a graph, plan, problem or answer that cannot be one; says which index
└── InvalidPlan      a well-formed plan that breaks a rule of its problem; says which step
"""

from __future__ import annotations


class RematError(Exception):
    """Something that remat refuses, in one line that says what and where.

    Example:
        >>> from remat_ir import graph_of
        >>> try:
        ...     graph_of([-1], [4], [[]])
        ... except RematError as error:
        ...     print(error)
        op 0: cost_ns must not be negative
    """


class InvalidData(RematError, ValueError):
    """Data that cannot be what it claims to be.

    `pointer` is the JSON pointer (RFC 6901) of the offending place, relative to the object read.
    """

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer

    def under(self, prefix: str) -> InvalidData:
        """The same error, seen from an object that holds this one at `prefix`."""
        return InvalidData(str(self), prefix + self.pointer)


class InvalidPlan(RematError):
    """A plan that the verifier refuses; `step` is the index of the first wrong one, or None for the plan as a whole."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        super().__init__(reason if step is None else f"step {step}: {reason}")
        self.reason = reason
        self.step = step
