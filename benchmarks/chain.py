"""How long the chain programs take, against plain numpy in the same run (`python -m benchmarks.chain`).

CPU seconds of one process; the numpy version is the recursion of RR-9302, Theorem 1, vectorised over s' and m.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np

from remat_ir import Chain, Problem, budget_at, verify
from remat_solver.chain import Table
from remat_solver.chain.needs import Needs
from remat_solver.offload import OffloadTable, fluid_makespan, tensor_plan


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


def rotor(stages: int, slots: int, fraction: float) -> None:
    """Time one table of the compiled program, ten smaller budgets from it, and the numpy version."""
    chain = random_chain(stages, seed=0)
    budget = budget_at(chain, fraction)
    start = time.process_time()
    table = Table(chain, budget, slots)
    filled = time.process_time() - start
    start = time.process_time()
    for part in range(10, 0, -1):
        smaller = budget * part // 10
        plan = table.plan(table.slots_within(smaller))
        if plan is not None:
            verify(Problem(chain, smaller), plan)
    smaller_s = time.process_time() - start
    start = time.process_time()
    Table(chain, budget, slots, rounding="nearest")
    nearest = time.process_time() - start
    start = time.process_time()
    reference = numpy_cost(chain, budget, slots)
    plain = time.process_time() - start
    own = table.bound_ns(table.slots) or float("inf")
    print(
        f"rotor   L={stages:4} S={slots:4} budget {fraction:.0%}: {filled:6.2f} s, numpy {plain:6.2f} s, "
        f"ratio {plain / filled:5.1f}; table {table.table_bytes / 1e6:.0f} MB; ten smaller budgets {smaller_s:.2f} s; "
        f"rounded to nearest {nearest:.2f} s; cost {own / chain.total_cost_ns:.4f} (numpy "
        f"{reference / chain.total_cost_ns:.4f})",
        flush=True,
    )


def offloading(stages: int, slots: int, fraction: float) -> None:
    """Time one table of the offload program, and what its plan loses tensor by tensor."""
    chain = random_chain(stages, seed=0, link=True)
    budget = budget_at(chain, fraction)
    start = time.process_time()
    table = OffloadTable(chain, budget, slots)
    filled = time.process_time() - start
    schedule = table.schedule()
    total = chain.total_cost_ns
    text = "nothing fits"
    if schedule is not None:
        fluid = float(fluid_makespan(chain, budget, schedule)) / total
        whole = verify(Problem(chain, budget), tensor_plan(chain, budget, schedule)).cost_ns / total
        text = f"makespan {fluid:.4f} fluid, {whole:.4f} in whole tensors"
    print(f"offload L={stages:4} N={slots:4} budget {fraction:.0%}: {filled:6.2f} s; {text}", flush=True)


def main() -> None:
    """Warm the compile cache, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    quick = parser.parse_args().quick
    start = time.perf_counter()
    tiny = random_chain(4, seed=1, link=True)
    Table(tiny, budget_at(tiny, 0.9), 20)
    OffloadTable(tiny, budget_at(tiny, 0.9), 8)
    print(f"compiled, or loaded from the cache, in {time.perf_counter() - start:.2f} s", flush=True)
    for stages in (50, 100) if quick else (50, 100, 200, 339):
        for fraction in (0.2, 0.5):
            rotor(stages, 500, fraction)
    for stages, slots in ((30, 50),) if quick else ((30, 50), (50, 50), (100, 50), (50, 100)):
        offloading(stages, slots, 0.4)


if __name__ == "__main__":
    main()
