"""What a job tells its service of a plan: what its ops are called, and what the first steps by it came to.

Each only where the settings allow it, from a thread of its own, and never at the cost of a step. A kernel's time that a
step contradicts is forgotten on this machine, so that the next plan measures it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .. import _compat
from ..capture.operations import op_name
from ..capture.refused import line_of
from ..errors import NotAllowed, RematError
from ..planning import service
from ..planning.http import Http
from ..planning.planner import CoordinatedPlanner, service_of
from ..profiling.profile import device_kind
from ..settings import settings
from .memory import StepPeak, device_of_step
from .step import Planned

log = logging.getLogger("remat")

_LONGEST = 300
"""Characters of a name that the service stores."""


def send_names(planner: CoordinatedPlanner, planned: Planned) -> None:
    """Send what the plan's ops are called and where in the model's code they stand, with `REMAT_SEND_NAMES=1`."""
    if not settings().send_names:
        return
    ops = planned.step.operations.ops
    names = [op_name(op)[-_LONGEST:] for op in ops]
    where = [next((line for node in op.nodes if (line := line_of(node))), "–")[-_LONGEST:] for op in ops]
    _tell(planner, planned, "names of ops", lambda http, solve_id: service.put_names(http, solve_id, names, where))


def measured(planner: CoordinatedPlanner, planned: Planned, found: StepPeak) -> None:
    """Report what the first steps by a plan came to, with `REMAT_REPORT_RUNS=1`, and forget what they contradict."""
    if found.contradicts_profile:
        profiled = planned.step.profiled
        with _compat.only_real_tensors():
            planner.profiles.forget(device_kind(profiled.kernels), sorted(profiled.known))
    if settings().report_runs:
        run = {**found._asdict(), "device": device_of_step(planned.step).describe()[:200]}
        _tell(planner, planned, "the measured run", lambda http, solve_id: service.put_run(http, solve_id, run))


def _tell(planner: CoordinatedPlanner, planned: Planned, what: str, send: Callable[[Http, str], None]) -> None:
    """Send something about a plan's solve from a thread; the first process of a job speaks for all."""
    asked, solve_id = service_of(planner.asked), planned.answer.id
    if asked is None or solve_id is None or not planner.coordinator.first:
        return

    def run() -> None:
        try:
            send(asked.http, solve_id)
        except NotAllowed as error:
            log.info("%s were not stored: %s", what, error)
        except RematError as error:
            log.warning("%s could not be sent: %s", what, error)

    threading.Thread(target=run, name="remat-report", daemon=True).start()
