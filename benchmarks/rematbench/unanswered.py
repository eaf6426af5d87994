"""What a method raises that gives no plan."""

from __future__ import annotations


class Unanswered(Exception):
    """Why a method gives no plan."""
