"""The staged proof as a method of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ..incumbent import Incumbent
from ..staged.prove import Proof, Switches


@dataclass(frozen=True)
class StagedOptions:
    """Which engine solves the integer programs, and which parts of the proof are on; see `remat_solver.staged`."""

    engine: str = "cpsat"
    linear: bool = True
    reruns: bool = True
    loose: bool = True
    single: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ("cpsat", "highs"):
            raise ValueError(f"engine must be 'cpsat' or 'highs', not {self.engine!r}")
        for name in ("linear", "reruns", "loose", "single"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false")


def run_staged(incumbent: Incumbent, options: StagedOptions) -> None:
    """Prove with coarse stages, refined where their solution breaks the memory."""
    switches = Switches(options.engine, options.linear, options.reruns, options.loose, options.single)
    Proof(incumbent, switches).run()
