"""CP-SAT, fed with whole numbers; runs in the worker process only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from ..program import Floats, Program
from .rounding import WholeProgram, whole
from .worker import Link


def serve(kind: str, program: Program, members: dict[str, Any], arrays: Mapping[str, Any], link: Link) -> None:
    """Solve one message's program and say how it ended.

    Options are CP-SAT parameters, besides `weight_scale` and `cost_scale`, which are those of `whole`. One worker runs
    `max_lp` unless `subsolvers` says otherwise: on the coarse stage programs the default portfolio proved nothing in
    ten times the time.
    """
    if kind != "solve":
        raise ValueError("CP-SAT solves no linear programs")
    options = dict(members["options"])
    scales = {name: float(options.pop(name)) for name in ("weight_scale", "cost_scale") if name in options}
    rounded = whole(program, **scales)
    model = _model(rounded, arrays.get("start"))
    solver = cp_model.CpSolver()
    _set_parameters(solver.parameters, members, options, rounded)
    link.on_stop = solver.stop_search
    if link.stop.is_set():
        link.say("outcome", {"status": "nothing_found"})
        return
    solver.best_bound_callback = lambda proved: link.improved(bound=rounded.bound(proved))
    status = solver.solve(model, _Stream(rounded, link))
    _report(solver, status, rounded, link)


class _Stream(cp_model.CpSolverSolutionCallback):
    def __init__(self, rounded: WholeProgram, link: Link) -> None:
        super().__init__()
        self._rounded, self._link = rounded, link

    def on_solution_callback(self) -> None:
        x = np.array(list(self.response_proto.solution), dtype=np.float64)
        self._link.improved(x=x, bound=self._rounded.bound(self.best_objective_bound))


def _model(rounded: WholeProgram, start: Floats | None) -> Any:
    """The model, written straight into its proto: a modelling layer's expressions cost more than the solve."""
    model = cp_model.CpModel()
    proto = model.proto
    for low, high in zip(rounded.lower.tolist(), rounded.upper.tolist(), strict=True):
        proto.variables.add().domain.extend((low, high))
    starts, index, value = rounded.row_start.tolist(), rounded.row_index.tolist(), rounded.row_value.tolist()
    for row, (low, high) in enumerate(zip(rounded.row_lower.tolist(), rounded.row_upper.tolist(), strict=True)):
        linear = proto.constraints.add().linear
        linear.vars.extend(index[starts[row] : starts[row + 1]])
        linear.coeffs.extend(value[starts[row] : starts[row + 1]])
        linear.domain.extend((low, high))
    charged = np.flatnonzero(rounded.cost)
    proto.objective.vars.extend(charged.tolist())
    proto.objective.coeffs.extend(rounded.cost[charged].tolist())
    if start is not None:
        known = np.flatnonzero(~np.isnan(start))
        proto.solution_hint.vars.extend(known.tolist())
        proto.solution_hint.values.extend(np.round(start[known]).astype(np.int64).tolist())
    return model


def _set_parameters(parameters: Any, members: dict[str, Any], options: dict[str, Any], rounded: WholeProgram) -> None:
    threads = int(members["threads"])
    parameters.num_workers = threads
    parameters.random_seed = int(members["seed"])
    parameters.linearization_level = 2
    # google/or-tools#5293: this part of the presolve of 9.15 cut off optima of all-linear models and proved the rest
    parameters.presolve_inclusion_work_limit = 0
    if members["time_limit_s"] is not None:
        parameters.max_time_in_seconds = float(members["time_limit_s"])
    parameters.absolute_gap_limit = float(members["absolute_gap"]) / rounded.cost_unit
    parameters.relative_gap_limit = float(members["relative_gap"])
    if threads == 1:
        options.setdefault("subsolvers", ["max_lp"])
    for name, value in sorted(options.items()):
        if not hasattr(parameters, name):
            raise ValueError(f"there is no parameter {name!r}")
        if isinstance(value, list):
            getattr(parameters, name).extend(value)
        else:
            setattr(parameters, name, value)


def _report(solver: Any, status: Any, rounded: WholeProgram, link: Link) -> None:
    members: dict[str, Any] = {"message": f"CP-SAT: {solver.status_name(status)}"}
    if status == cp_model.INFEASIBLE:
        link.say("outcome", members | {"status": "infeasible"})
        return
    if status == cp_model.MODEL_INVALID:
        link.say("failed", members)
        return
    bound = rounded.bound(solver.best_objective_bound)
    if np.isfinite(bound) and abs(solver.best_objective_bound) < 2.0**60:
        members["bound"] = bound
    if status == cp_model.UNKNOWN:
        link.say("outcome", members | {"status": "nothing_found"})
        return
    x = np.array(list(solver.response_proto.solution), dtype=np.float64)
    members["status"] = "optimal" if status == cp_model.OPTIMAL else "feasible"
    members["work"] = solver.response_proto.deterministic_time
    link.say("outcome", members, {"x": x})
