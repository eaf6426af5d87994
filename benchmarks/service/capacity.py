"""What a cluster needs for its jobs, computed from measured costs: processes, connections, bytes, and the first limit.

`python -m benchmarks.service.capacity --jobs 10000 --burst 1000 --answers 10000000 --workers 100` prints the table.
Servers are a queue of Poisson arrivals at several cores (Erlang C), workers one whose burst is served in order. Costs
are the constants of `Costs`; each says how it was measured. Nothing is run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.table import Report

_DAY_S = 86_400.0


@dataclass(frozen=True)
class Costs:
    """Processor seconds and bytes, measured on two x86_64 cores shared with other work.

    Attributes:
        miss_s: of a server for a POST of a new problem of 300 ops on PostgreSQL (`benchmarks.load burst`, load average
            4).
        hit_s: of a server for a hit of a new body at 300 ops, likewise: its row is written before it is answered.
        solve_s: of a worker for a solve besides solving (docs/scale.md).
        claim_s: of PostgreSQL for a claim, for each 10,000 solves that wait (`EXPLAIN ANALYZE`, load average 7).
        answer_bytes: of a problem of 300 ops, with indexes, and of its request.
        hit_bytes: of the row of a hit.
        server_connections, worker_connections: that a process keeps open.
    """

    miss_s: float = 0.0116
    hit_s: float = 0.0058
    solve_s: float = 0.055
    claim_s: float = 0.022
    answer_bytes: int = 16_900
    hit_bytes: int = 1_256
    server_connections: int = 12
    worker_connections: int = 9


def waiting_s(rate: float, service_s: float, cores: int) -> float:
    """Mean seconds until one of some cores is free, by Erlang's C formula; infinite where they can't keep up.

    >>> waiting_s(0.5, 1.0, 1), round(waiting_s(1.0, 1.0, 2), 3), waiting_s(2.0, 1.0, 2)
    (1.0, 0.333, inf)
    """
    load = rate * service_s
    if load >= cores:
        return math.inf
    terms = [load**k / math.factorial(k) for k in range(cores)]
    last = load**cores / math.factorial(cores) * cores / (cores - load)
    return last / (sum(terms) + last) * service_s / (cores - load)


def cores_for(rate: float, service_s: float, most_wait_s: float) -> int:
    """The fewest cores at which the mean wait is no longer."""
    cores = 1
    while waiting_s(rate, service_s, cores) > most_wait_s:
        cores += 1
    return cores


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=float, default=10_000, help="jobs a day, each a problem of its own")
    parser.add_argument("--hits", type=float, default=20, help="hits a job: ranks, restarts, sweeps")
    parser.add_argument("--burst", type=float, default=1_000, help="jobs in the fullest minute")
    parser.add_argument("--solve", type=float, default=60.0, help="seconds of a solve")
    parser.add_argument("--answers", type=float, default=10_000_000, help="answers that are stored")
    parser.add_argument("--workers", type=int, default=100, help="solves at once")
    parser.add_argument("--out", type=Path, help="append the table to this file, as Markdown")
    asked, costs = parser.parse_args(), Costs()
    rate, burst = asked.jobs / _DAY_S, asked.burst / 60.0
    service_s = (costs.miss_s + asked.hits * costs.hit_s) / (1 + asked.hits)
    requests = burst * (1 + asked.hits)
    servers = cores_for(requests, service_s, 0.05)
    connections = servers * costs.server_connections + asked.workers * costs.worker_connections
    backlog = max(0.0, asked.burst - asked.workers * 60.0 / asked.solve)
    with Report("What a cluster needs", ("what", "needs", "from"), asked.out) as report:
        report.add(
            "workers, mean", f"{rate * asked.solve:.1f} slots busy", f"{rate:.3f} jobs a second of {asked.solve:g} s"
        )
        report.add(
            "workers, after a burst",
            f"{asked.burst * asked.solve / asked.workers / 60:.0f} min until it is solved",
            f"{asked.workers} slots, {backlog:.0f} waiting after the minute",
        )
        report.add(
            "workers, overhead", f"{100 * burst * costs.solve_s:.0f} % of a core", "all workers together, in the burst"
        )
        report.add(
            "servers",
            f"{servers} cores",
            f"{requests:.0f} requests a second, wait {1000 * waiting_s(requests, service_s, servers):.0f} ms",
        )
        report.add(
            "PostgreSQL, claims",
            f"{100 * asked.workers / asked.solve * costs.claim_s * backlog / 10_000:.1f} % of a core",
            f"{backlog:.0f} solves waiting",
        )
        report.add(
            "PostgreSQL, connections", f"{connections}", f"{servers} servers, {asked.workers} workers of one slot"
        )
        report.add(
            "PostgreSQL, answers",
            f"{asked.answers * costs.answer_bytes / 1e9:.0f} GB",
            f"{costs.answer_bytes} bytes each",
        )
        report.add(
            "PostgreSQL, rows of hits",
            f"{asked.jobs * asked.hits * costs.hit_bytes / 1e9:.2f} GB a day",
            f"{costs.hit_bytes} bytes each",
        )
        report.add(
            "object storage, if answers were there",
            f"{asked.answers * costs.answer_bytes / 1e9:.0f} GB, {rate * 3:.2f} writes a second",
            "three objects an answer",
        )
        first = "connections" if connections > 100 else "slots of workers"
        report.add("the first limit", first, "PostgreSQL allows 100 unless it is told otherwise")


if __name__ == "__main__":
    main()
