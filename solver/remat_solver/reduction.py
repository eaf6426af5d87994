"""Problems taken as problems of another kind, and plans taken back: both made together, as cvxpy's reductions are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

from remat_ir import AnyPlan, Subject

P = TypeVar("P")
"""What a plan is there: a plan of the other kind of problem, or a sequence of ops."""


class Reduction(ABC, Generic[P]):
    """A subject taken as a problem of another kind, and the way back.

    Verification always takes place on the subject itself, so that a wrong reduction cannot hide.
    """

    @classmethod
    def accepts(cls, subject: Subject) -> bool:
        """Whether a subject can be taken so."""
        return cls.apply(subject) is not None

    @classmethod
    @abstractmethod
    def apply(cls, subject: Subject) -> Self | None:
        """The subject taken so, or None."""

    @property
    @abstractmethod
    def within(self) -> tuple[str, ...] | None:
        """The restrictions inside which a bound proved there holds for the subject; None where it is none at all."""

    @abstractmethod
    def invert(self, plan: P) -> AnyPlan:
        """The plan of the subject that does what a plan does there."""
