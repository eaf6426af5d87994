"""Certificates of what the staged proof finds: duals of linear programs, and trees of them, in whole numbers."""

from .stages import Certified, Certifier

__all__ = ["Certified", "Certifier"]
