"""Retention intervals: the program of Moccasin (Bartan et al., ICML 2023) for OR-Tools' CP-SAT, with its stages.

Time has a moment for each pair of a stage and an op up to it: stage j computes op j for the first time, and may compute
earlier ops again before it, in their order. Each op has COPIES runs (C of the paper's Section 2.1); each run of a value
is an interval in which the value is held. What a run reads is held by an interval that contains its moment, and the
sizes of what is held at a moment are within the budget (one cumulative constraint). There are O(n) integer variables.

As in the paper, memory is made to fit first (from the plan without recomputations, by the least excess over the
budget), and time is minimized from there. What differs: a value has an interval, not a node, since ops here give
several values; workspaces are held at their moment; an op is computed again only up to the last stage that the graph
allows; what is kept is computed once. Bytes are rounded up to parts of the budget, as CP-SAT wants small integers.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.rematbench import Unanswered
from remat_ir import Graph, Plan, Problem, plan_of

COPIES = 2
_UNITS = 1 << 20
"""Into how many parts the budget is divided."""
_WORKERS = 2


@dataclass
class _Model:
    """The program and its variables: of each op's run its moment and whether it is there, of each value's its end."""

    model: Any
    moment: dict[tuple[int, int], Any]
    active: dict[tuple[int, int], Any]
    end: dict[tuple[int, int], Any]
    peak: Any


def alone() -> ProcessPoolExecutor:
    """A process of its own: OR-Tools' library and highspy's define the same symbols, and one process loads one."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def moccasin(problem: Problem, seconds: float) -> Plan:
    """The method: the best plan in these seconds, at most COPIES runs an op.

    Raises:
        Unanswered: OR-Tools is not installed; no plan was found, or none is in the program's space.
    """
    with alone() as process:
        return process.submit(retained, problem, seconds).result()


def retained(problem: Problem, seconds: float) -> Plan:
    """The same in this process, where highspy is not loaded."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise Unanswered(f"needs ortools: pip install '.[bench]' ({error})") from None
    graph = problem.graph
    until = time.monotonic() + seconds
    free = problem.budget_bytes - graph.fixed_bytes
    if free < 0:
        raise Unanswered("what is always there exceeds the budget")
    unit = max(1, -(-free // _UNITS))
    made = _written(cp_model, graph, unit)
    excess = made.model.new_int_var(0, sum(-(-size // unit) for size in graph.value_bytes) + _UNITS, "excess")
    made.model.add(made.peak <= free // unit + excess)
    _hint(made, graph)
    solver = _solve(cp_model, made, excess, until, enough=0)
    if solver is None or solver.value(excess):
        raise Unanswered("no plan found that fits")
    hinted = {key: solver.value(variable) for key, variable in _variables(made).items()}
    made.model.clear_hints()
    for key, variable in _variables(made).items():
        made.model.add_hint(variable, hinted[key])
    made.model.add(excess == 0)
    again = sum(graph.op_cost_ns[op] * made.active[op, copy] for op, copy in made.active if copy)
    better = _solve(cp_model, made, again, until)
    return plan_of(graph, _order(made, better or solver))


def _written(cp_model: Any, graph: Graph, unit: int) -> _Model:
    model = cp_model.CpModel()
    count = graph.ops
    horizon = _at(count, 0)
    kept = {graph.value_op[value] for value in graph.keep}
    moment: dict[tuple[int, int], Any] = {}
    active: dict[tuple[int, int], Any] = {}
    end: dict[tuple[int, int], Any] = {}
    held: list[tuple[Any, int]] = []
    for op in range(count):
        stages = range(op + 1, min(count, graph.last_stage[op] + 1))
        for copy in range(1 if op in kept or not stages else COPIES):
            active[op, copy] = model.new_bool_var(f"a{op},{copy}")
            if copy:
                among = cp_model.Domain.from_values([_at(stage, op) for stage in stages])
                moment[op, copy] = model.new_int_var_from_domain(among, f"s{op},{copy}")
            else:
                moment[op, copy] = model.new_constant(_at(op, op))
                model.add(active[op, copy] == 1)
            there, start = active[op, copy], moment[op, copy]
            for value in graph.op_values[op]:
                end[value, copy] = model.new_int_var(_at(op, op) + 1, horizon, f"e{value},{copy}")
                if value in graph.keep:
                    model.add(end[value, copy] == horizon)
                size = model.new_int_var(1, horizon, "")
                interval = model.new_optional_interval_var(start, size, end[value, copy], there, "")
                held.append((interval, -(-graph.value_bytes[value] // unit)))
                if copy:  # the runs of an op come one after the other
                    model.add(end[value, copy - 1] <= start).only_enforce_if(there)
            if graph.op_workspace_bytes[op]:
                during = model.new_optional_fixed_size_interval_var(start, 1, there, "")
                held.append((during, -(-graph.op_workspace_bytes[op] // unit)))
            if copy > 1:
                model.add_implication(there, active[op, copy - 1])
    for (op, copy), there in active.items():
        for value in graph.op_inputs[op]:
            maker, read_from = graph.value_op[value], []
            for run in range(COPIES):
                if (maker, run) in active:
                    reads = model.new_bool_var("")
                    model.add_implication(reads, active[maker, run])
                    model.add(moment[maker, run] < moment[op, copy]).only_enforce_if(reads)
                    model.add(end[value, run] > moment[op, copy]).only_enforce_if(reads)
                    read_from.append(reads)
            model.add_bool_or(read_from).only_enforce_if(there)
    peak = model.new_int_var(0, sum(size for _, size in held), "peak")
    model.add_cumulative([interval for interval, _ in held], [size for _, size in held], peak)
    return _Model(model, moment, active, end, peak)


def _at(stage: int, op: int) -> int:
    """The moment at which a stage may run an op."""
    return stage * (stage + 1) // 2 + op


def _hint(made: _Model, graph: Graph) -> None:
    """Begin with the plan that computes everything once."""
    for (value, copy), variable in made.end.items():
        op = graph.value_op[value]
        users = graph.users[value]
        last = _at(users[-1], users[-1]) + 1 if users else _at(op, op) + 1
        made.model.add_hint(variable, last if copy == 0 and value not in graph.keep else _at(graph.ops, 0))
    for (_, copy), variable in made.active.items():
        made.model.add_hint(variable, copy == 0)


def _variables(made: _Model) -> dict[tuple[str, int, int], Any]:
    groups = (("moment", made.moment), ("active", made.active), ("end", made.end))
    return {(name, *key): variable for name, group in groups for key, variable in group.items()}


def _solve(cp_model: Any, made: _Model, objective: Any, until: float, enough: int | None = None) -> Any:
    """A solver with a solution, or None; it stops at an objective of `enough`."""
    left = until - time.monotonic()
    if left <= 0:
        return None
    made.model.minimize(objective)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = left
    solver.parameters.num_workers = _WORKERS
    stop = _stop_at(cp_model, enough) if enough is not None else None
    status = solver.solve(made.model, stop)
    return solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def _stop_at(cp_model: Any, enough: int) -> Any:
    class StopAt(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if self.objective_value <= enough:
                self.stop_search()

    return StopAt()


def _order(made: _Model, solver: Any) -> list[int]:
    """The ops in the order of the moments of the runs that are there."""
    runs = [(solver.value(made.moment[key]), key[0]) for key, there in made.active.items() if solver.value(there)]
    return [op for _, op in sorted(runs)]
