"""Revolve, for heterogeneous chains: activations are saved, tapes never (RR-9302, Section 5.3)."""

from __future__ import annotations

from ..incumbent import Incumbent
from .rotor import RotorOptions, run_chain_program


def revolve(incumbent: Incumbent, options: RotorOptions) -> None:
    """Offer the best plan that saves activations only, with an F_all right before each backward step: a baseline."""
    run_chain_program(incumbent, options.slots, tapes=False)
