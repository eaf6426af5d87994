"""HiGHS, fed with arrays; runs in the worker process only."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import highspy
import numpy as np

from ..program import INFINITY, Booleans, Floats, Program
from .highs_tree import RUN_ITERATIONS, iteration_s, iterations_in, serve_tree
from .worker import Link

_STATUS = highspy.HighsModelStatus
_DONE = (_STATUS.kOptimal, _STATUS.kModelEmpty)
_STOPPED = (
    _STATUS.kTimeLimit,
    _STATUS.kIterationLimit,
    _STATUS.kSolutionLimit,
    _STATUS.kInterrupt,
    _STATUS.kObjectiveBound,
    _STATUS.kObjectiveTarget,
)

_START_TOLERANCE = 5e-7
"""By how much a start may break a row or a bound; below HiGHS's own 1e-6, within which it takes a start as it is."""
_COMPLETION_S = 2.0
"""Seconds at most to complete a partial start, and no more than a tenth of the run's."""

_threads = 1


def serve(kind: str, program: Program, members: dict[str, Any], arrays: Mapping[str, Any], link: Link) -> None:
    """Solve one message's program and say how it ended."""
    global _threads
    threads = int(members.get("threads", 1))
    if threads != _threads:
        # without this a second solve with another number of threads silently does nothing
        highspy.Highs.resetGlobalScheduler(True)
        _threads = threads
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    _set(solver, "output_flag", False)
    _set(solver, "threads", threads)
    _set(solver, "random_seed", int(members.get("seed", 0)))
    if members.get("time_limit_s") is not None:
        _set(solver, "time_limit", float(members["time_limit_s"]))
    if kind != "solve":
        # dual simplex; interior point took ten times as long on these programs
        _set(solver, "solver", "simplex")
        branchable, program = program, replace(program, integer=np.zeros(program.columns, dtype=np.bool_))
    else:
        _set(solver, "mip_abs_gap", float(members["absolute_gap"]))
        _set(solver, "mip_rel_gap", float(members["relative_gap"]))
    _pass(solver, program)
    work_s, price = members.get("work_s"), iteration_s(program.entries)
    if kind == "tree":
        serve_tree(solver, branchable, members, arrays.get("factor"), link)
        return
    if kind == "lp":
        _stop_by_callback(solver, link, simplex=True)
        if work_s is not None:
            _set(solver, "simplex_iteration_limit", iterations_in(work_s, price))
    else:
        limit = members.get("time_limit_s")
        start = arrays.get("start")
        _start_from(solver, program, start, _COMPLETION_S if limit is None else min(_COMPLETION_S, 0.1 * limit), link)
        _stream(solver, link)
        _stop_by_callback(solver, link, turn_s=members.get("turn_s"))
    solver.run()
    work = {} if work_s is None else {"work_s": price * (RUN_ITERATIONS + solver.getInfo().simplex_iteration_count)}
    _report(solver, kind, program, link, work)


def _set(solver: Any, name: str, value: object) -> None:
    if solver.setOptionValue(name, value) != highspy.HighsStatus.kOk:
        raise ValueError(f"option {name!r} cannot be {value!r}")


def _pass(solver: Any, program: Program) -> None:
    integrality = program.integer.astype(np.int32)
    status = solver.passModel(
        program.columns,
        program.rows,
        program.entries,
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        program.offset,
        program.cost,
        program.lower,
        program.upper,
        program.row_lower,
        program.row_upper,
        program.row_start,
        program.row_index,
        program.row_value,
        integrality,
    )
    if status == highspy.HighsStatus.kError:
        raise ValueError("HiGHS refused the program")


def _start_from(solver: Any, program: Program, start: Floats | None, seconds: float, link: Link) -> None:
    """Hand over a complete start, made from a partial one where it can be.

    HiGHS would complete a partial start itself, by a second program with what is known fixed, on the same solver: its
    callbacks then carry that program's bound, which is the start's own cost and not a bound of this one.
    """
    if start is None:
        return
    known = ~np.isnan(start)
    if not known.all():
        found = _completed(program, start, known, seconds, link)
        if found is None:
            return
        start = found
    start = np.where(program.integer, np.round(start), start)
    if program.violation(start) > _START_TOLERANCE:
        # HiGHS would look for a solution close by, again with callbacks that mean another program
        return
    solution = highspy.HighsSolution()
    solution.col_value = start.tolist()
    solver.setSolution(solution)


def _completed(program: Program, start: Floats, known: Booleans, seconds: float, link: Link) -> Floats | None:
    """The best completion of a partial start, by a solver of its own; None where there is none, or not soon."""
    if not known.any():
        return None
    lower, upper = np.where(known, start, program.lower), np.where(known, start, program.upper)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    _set(solver, "output_flag", False)
    _set(solver, "threads", _threads)
    _set(solver, "time_limit", seconds)
    _pass(solver, replace(program, lower=lower, upper=upper))

    def interrupt(event: Any) -> None:
        if link.stop.is_set():
            event.data_in.user_interrupt = True

    callback = solver.cbMipInterrupt
    callback += interrupt
    solver.run()
    solution, info = solver.getSolution(), solver.getInfo()
    if solution.value_valid and info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        return np.array(solution.col_value, dtype=np.float64)
    return None


def _stream(solver: Any, link: Link) -> None:
    def improving(event: Any) -> None:
        out = event.data_out
        link.improved(x=np.array(out.mip_solution), bound=_bound(out.mip_dual_bound))

    callback = solver.cbMipImprovingSolution
    callback += improving


def _stop_by_callback(solver: Any, link: Link, simplex: bool = False, turn_s: float | None = None) -> None:
    until = math.inf if turn_s is None else time.process_time() + turn_s

    def interrupt(event: Any) -> None:
        if not simplex:
            link.improved(bound=_bound(event.data_out.mip_dual_bound))
        if link.stop.is_set() or time.process_time() > until:
            event.data_in.user_interrupt = True

    callback = solver.cbSimplexInterrupt if simplex else solver.cbMipInterrupt
    callback += interrupt


def _bound(reported: float) -> float | None:
    """HiGHS reports −inf before it has a bound, and huge numbers in some early callbacks."""
    return reported if abs(reported) < 1e100 else None


def _report(solver: Any, kind: str, program: Program, link: Link, work: dict[str, float]) -> None:
    status, info = solver.getModelStatus(), solver.getInfo()
    members: dict[str, Any] = {"message": f"HiGHS: {solver.modelStatusToString(status)}", **work}
    arrays: dict[str, Any] = {}
    if not program.columns:
        # HiGHS calls it empty and looks at no row; any multipliers bound a linear program, so zeros do
        arrays = {"x": np.zeros(0), "row_dual": np.zeros(program.rows)}
        if program.violation(arrays["x"]) > 0:
            link.say("outcome", members | {"status": "infeasible"})
        else:
            link.say("outcome", members | {"status": "optimal", "bound": program.offset}, arrays)
        return
    bounded = bool(np.all(program.lower > -INFINITY) and np.all(program.upper < INFINITY))
    if status == _STATUS.kInfeasible or (status == _STATUS.kUnboundedOrInfeasible and bounded):
        link.say("outcome", members | {"status": "infeasible"})
        return
    if status not in _DONE and status not in _STOPPED:
        link.say("failed", members)
        return
    solution = solver.getSolution()
    if solution.value_valid and info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        arrays["x"] = np.array(solution.col_value, dtype=np.float64)
    if kind == "lp":
        if solution.dual_valid and info.dual_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            arrays["row_dual"] = np.array(solution.row_dual, dtype=np.float64)
            members["bound"] = program.dual_bound(arrays["row_dual"])
        if status not in _DONE:
            arrays.pop("x", None)  # a primal point of an unfinished simplex is of no use
    elif _bound(info.mip_dual_bound) is not None and not (status in _DONE and not program.integer.any()):
        members["bound"] = info.mip_dual_bound
    elif status in _DONE:
        members["bound"] = info.objective_function_value
    members["status"] = "optimal" if status in _DONE and "x" in arrays else "feasible" if arrays else "nothing_found"
    link.say("outcome", members, arrays)
