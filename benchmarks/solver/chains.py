"""How long the chain programs take, against plain numpy in the same run (`python -m benchmarks.solver.chains`).

CPU seconds of one process, the compile cache warm; the numpy version is the recursion of RR-9302, Theorem 1, vectorised
over s' and m. Makespans and bounds of the offload program are in units of all steps once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from benchmarks.harness.table import Report
from benchmarks.solver.fluid import fluid_makespan
from remat_ir import Chain, InvalidPlan, Problem, budget_at, verify
from remat_solver import solve
from remat_solver.chain.table import Needs, Table
from remat_solver.offload.table import OffloadTable

Made = TypeVar("Made")
Cells = tuple[object, ...]
ROTOR = ("L", "S", "budget", "rotor s", "numpy s", "ratio", "table MB", "ten smaller budgets s", "cost over numpy's")
POFO = ("L", "N", "budget", "table s", "pofo s", "fluid makespan", "makespan", "bound")
_FINE = 150


def random_chain(stages: int, seed: int, link: bool = False) -> Chain:
    """A chain of log-normal times and sizes, backward steps twice as long as forward ones."""
    draw = random.Random(seed)
    forward = [int(2e5 * draw.lognormvariate(0, 0.5)) for _ in range(stages)]
    activation = [int(8e6 * draw.lognormvariate(0, 0.7)) for _ in range(stages)] + [4]
    return Chain(
        forward_ns=tuple(forward),
        backward_ns=tuple(2 * time_ns for time_ns in forward),
        forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=(0,) * stages,
        tape_bytes=tuple(int(size * draw.uniform(1.5, 4)) for size in activation[1:]),
        activation_bytes=tuple(activation),
        gradient_bytes=tuple(activation),
        link_bytes_per_s=12_000_000_000 if link else None,
    )


def numpy_cost(chain: Chain, budget_bytes: int, slots: int) -> float:
    """The persistent optimum with sizes rounded up, in float32, with two dense tables."""
    count = chain.stages
    slot = -(-(budget_bytes - chain.fixed_bytes) // slots)

    def rounded(sizes: Any) -> Any:
        return -(-np.asarray(sizes, np.int64) // slot)

    needs = Needs(chain)
    none, both = rounded(needs.none), rounded(needs.all)
    activation, tape = rounded(chain.activation_bytes), rounded((0, *chain.tape_bytes))
    forward = np.array((0, *chain.forward_ns), np.float32)
    pair = forward + np.array((0, *chain.backward_ns), np.float32)
    prefix = np.cumsum(forward, dtype=np.float32)
    table = np.full((count + 2, count + 2, slots + 1), np.inf, np.float32)
    shifted = np.full((count + 2, count + 2, slots + 1), np.inf, np.float32)
    for length in range(count):
        for s in range(1, count - length + 1):
            t, row = s + length, table[s, s + length]
            if length == 0:
                row[min(both[s, t], slots + 1) :] = pair[s]
            else:
                sums = shifted[t, s + 1 : t + 1] + table[s, s:t] + (prefix[s:t] - prefix[s - 1])[:, None]
                row[:] = sums.min(0)
                row[: none[s, t]] = np.inf
                low = max(both[s, t], tape[s])
                if low <= slots:
                    row[low:] = np.minimum(row[low:], pair[s] + table[s + 1, t, low - tape[s] : slots + 1 - tape[s]])
            if activation[s - 1] <= slots:
                shifted[t, s, activation[s - 1] :] = row[: slots + 1 - activation[s - 1]]
    return float(table[1, count, slots])


def rotor(stages: int, slots: int, fraction: float) -> tuple[float, Cells]:
    """Time one table of the compiled program, ten smaller budgets from it, and numpy; its seconds, and a row."""
    chain = random_chain(stages, seed=0)
    budget = budget_at(chain, fraction)
    table, filled = _timed(lambda: Table(chain, budget, slots))

    def smaller() -> None:
        for part in range(10, 0, -1):
            plan = table.plan(table.slots_within(budget * part // 10))
            if plan is not None:
                verify(Problem(chain, budget * part // 10), plan)

    _, again = _timed(smaller)
    reference, plain = _timed(lambda: numpy_cost(chain, budget, slots))
    own = table.bound_ns(table.slots) or float("inf")
    cells = (stages, slots, f"{fraction:.0%}", f"{filled:.2f}", f"{plain:.2f}", f"{plain / filled:.1f}")
    more = (f"{table.table_bytes / 1e6:.0f}", f"{again:.2f}", f"{own / reference:.5f}")
    return filled, (*cells, *more)


def offloading(stages: int, slots: int, fraction: float) -> tuple[float, Cells]:
    """Time one table of the offload program and the whole method, whose plan is made of two; as `rotor`."""
    chain = random_chain(stages, seed=0, link=True)
    problem = Problem(chain, budget_at(chain, fraction))
    table, filled = _timed(lambda: OffloadTable(chain, problem.budget_bytes, slots))
    schedule = table.schedule()
    total = chain.total_cost_ns
    fluid = float("nan") if schedule is None else float(fluid_makespan(chain, problem.budget_bytes, schedule)) / total
    answer, whole = _timed(
        lambda: solve(problem, method="pofo", options={"slots": slots}, time_limit_s=None, max_gap=0)
    )
    bound = (answer.bound_ns or 0) / total
    cost = (answer.cost_ns or float("nan")) / total
    cells = (stages, slots, f"{fraction:.0%}", f"{filled:.2f}", f"{whole:.2f}", f"{fluid:.4f}", f"{cost:.4f}")
    return filled, (*cells, f"{bound:.4f}")


def gap(stages: int, gigabytes_per_s: int, fraction: float, seconds: float) -> Cells:
    """Where the gap of the offload program's plan is: what 50 slots lose, what whole tensors do, and the rest."""
    chain = replace(random_chain(stages, seed=0, link=True), link_bytes_per_s=gigabytes_per_s * 10**9)
    problem = Problem(chain, budget_at(chain, fraction))
    fifty = solve(problem, method="pofo", options={"slots": 50}, time_limit_s=seconds, max_gap=0)
    most = solve(problem, method="pofo", time_limit_s=seconds, max_gap=0)
    fluid = float("inf")
    for nearest in (False, True):
        schedule = OffloadTable(chain, problem.budget_bytes, _FINE, nearest=nearest).schedule()
        if schedule is not None:
            with contextlib.suppress(InvalidPlan):
                fluid = min(fluid, float(fluid_makespan(chain, problem.budget_bytes, schedule)))
    bound = most.bound_ns or 0
    costs = (fifty.cost_ns or math.nan, most.cost_ns or math.nan, fluid)
    over = (f"{100 * (cost / bound - 1):.1f}" for cost in costs)
    return stages, gigabytes_per_s, f"{fraction:.0%}", f"{bound / chain.total_cost_ns:.4f}", *over


def cold(stages: int = 339, slots: int = 500) -> float:
    """The CPU seconds of the first table of a fresh installation, compiling included."""
    script = (
        "import time; from benchmarks.solver.chains import random_chain, budget_at, Table; "
        f"chain = random_chain({stages}, seed=0); budget = budget_at(chain, 0.5); "
        f"start = time.process_time(); Table(chain, budget, {slots}); print(time.process_time() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True
        )
    return float(ran.stdout)


def _timed(run: Callable[[], Made]) -> tuple[Made, float]:
    start = time.process_time()
    made = run()
    return made, time.process_time() - start


def _growth(
    names: tuple[str, str], seconds: dict[tuple[int, int], float], pairs: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    for one, other in pairs:
        what = 0 if one[1] == other[1] else 1
        power = math.log(seconds[other] / seconds[one]) / math.log(other[what] / one[what])
        name, sizes = names[what], f"{one[what]} to {other[what]}"
        print(f"from {name} = {sizes}, {names[1 - what]} = {one[1 - what]}: as {name} to the power of {power:.1f}")


def main() -> None:
    """Warm the compile cache, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--gaps", metavar="S", type=float, help="only where pofo's gap is, with S seconds a solve")
    args = parser.parse_args()
    quick = args.quick
    if args.gaps:
        columns = ("L", "GB/s", "budget", "bound", "50 slots +%", "more slots +%", "150 slots, fluid +%")
        with Report("Where the gap of pofo is", columns, None) as report:
            for stages, speed in itertools.product((16, 24, 32, 48), (25, 50, 100)):
                report.add(*gap(stages, speed, 0.4, args.gaps))
        return
    tiny = random_chain(4, seed=1, link=True)
    Table(tiny, budget_at(tiny, 0.9), 20)
    OffloadTable(tiny, budget_at(tiny, 0.9), 8)
    if not quick:
        print(f"The first table of a fresh installation (L = 339, S = 500), compiling included: {cold():.2f} s")
    found: dict[tuple[int, int], float] = {}
    with Report("rotor", ROTOR, None) as report:
        for stages in (50, 100) if quick else (50, 100, 200, 339):
            for fraction in (0.2, 0.5):
                found[stages, 500], cells = rotor(stages, 500, fraction)
                report.add(*cells)
    if not quick:
        _growth(("L", "S"), found, [((100, 500), (200, 500)), ((200, 500), (339, 500))])
    found = {}
    with Report("pofo", POFO, None) as report:
        for stages, slots in ((30, 50),) if quick else ((25, 50), (50, 50), (100, 50), (50, 25), (50, 100)):
            found[stages, slots], cells = offloading(stages, slots, 0.4)
            report.add(*cells)
    if not quick:
        _growth(
            ("L", "N"),
            found,
            [((25, 50), (50, 50)), ((50, 50), (100, 50)), ((50, 25), (50, 50)), ((50, 50), (50, 100))],
        )


if __name__ == "__main__":
    main()
