"""Checkmate's program once more, from the paper's equations alone, in PuLP: for the test of `milp`.

It shares no code with the solver. For graphs of one value an op, without workspaces, as the paper has them.
"""

from __future__ import annotations

import warnings

import pulp

from remat_ir import Problem


def paper_optimum(problem: Problem) -> int | None:
    """The optimum of the program of equations 1 to 8, in ns; None where it has no solution."""
    graph = problem.graph
    n, cost, size = graph.ops, graph.op_cost_ns, graph.value_bytes
    assert graph.value_op == tuple(range(n))
    deps = [sorted(set(inputs)) for inputs in graph.op_inputs]
    users = [[k for k in range(n) if i in deps[k]] for i in range(n)]
    program, nothing = pulp.LpProblem("checkmate", pulp.LpMinimize), pulp.LpAffineExpression()

    # (1d), (1e): R is lower triangular with a diagonal of ones, S strictly lower triangular
    r = [[_binary(f"R_{t}_{i}") if i <= t else nothing for i in range(n)] for t in range(n)]
    s = [[_binary(f"S_{t}_{i}") if i < t else nothing for i in range(n)] for t in range(n + 1)]
    program += pulp.lpSum(cost[i] * r[t][i] for t in range(n) for i in range(t + 1))  # (1a)
    for t in range(n):
        program += r[t][t] == 1
        for j in range(t + 1):
            for i in deps[j]:
                program += r[t][j] <= r[t][i] + s[t][i]  # (1b)
        if t:
            for i in range(t):
                program += s[t][i] <= r[t - 1][i] + s[t - 1][i]  # (1c)
    for t in range(n):
        last = s[t + 1] if t + 1 < n else [nothing] * n
        free: dict[tuple[int, int], pulp.LpVariable] = {}
        for k in range(t + 1):
            for i in deps[k]:
                later = [j for j in users[i] if k < j <= t]
                hazards = 1 - r[t][k] + last[i] + pulp.lpSum(r[t][j] for j in later)  # (6)
                most = 2 + len(later)
                free[i, k] = _binary(f"FREE_{t}_{i}_{k}")
                program += 1 - free[i, k] <= hazards  # (7b)
                program += most * (1 - free[i, k]) >= hazards  # (7c)
        used = graph.fixed_bytes + pulp.lpSum(size[i] * s[t][i] for i in range(t)) + size[0] * r[t][0]  # (2)
        program += used <= problem.budget_bytes  # (8)
        for k in range(t):
            freed = pulp.lpSum(size[i] * free[i, k] for i in deps[k])  # (5)
            used = used - freed + size[k + 1] * r[t][k + 1]  # (3)
            program += used <= problem.budget_bytes
    status = program.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0, gapAbs=0, threads=1))
    return round(pulp.value(program.objective)) if status == pulp.LpStatusOptimal else None


def _binary(name: str) -> pulp.LpVariable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of PuLP 4, which has another way
        return pulp.LpVariable(name, cat="Binary")
