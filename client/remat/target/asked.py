"""What is asked about training a model on a device that is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from .devices import Target
from .parallel import Parallel


@dataclass(frozen=True, eq=False)
class Asked:
    """The arguments of `remat.target.fit.predict`, read: see there."""

    make_model: Callable[..., Any]
    target: Target
    parallel: Parallel
    optimizer: str | None
    batch: int | None
    max_overhead: float
    planner: CoordinatedPlanner
    options: SolveOptions
    phase: Callable[[str], None]

    @property
    def memory_bytes(self) -> int:
        """What a job may fill of the device."""
        return self.target.usable_bytes

    @property
    def batch_is_free(self) -> bool:
        """Whether the function takes a batch, of which the largest can be looked for."""
        return "batch" in inspect.signature(self.make_model).parameters

    @property
    def known_batch(self) -> int | None:
        """The batch of what is made where none other is asked for; None: nobody knows."""
        if self.batch is not None or not self.batch_is_free:
            return self.batch
        default = inspect.signature(self.make_model).parameters["batch"].default
        return default if isinstance(default, int) else None
