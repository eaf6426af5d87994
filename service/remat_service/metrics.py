"""What can be seen from outside, as Prometheus metrics; names of metrics are part of the contract with operators."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_OBJECTIVES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""With the two that the objective names: hits within 0.05 s, misses accepted within 0.5 s."""
_GAPS = (0.0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """One registry an app, so that several apps in one process don't meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        of_tenant = ("tenant",)
        self.requests = Counter(
            "remat_http_requests", "HTTP requests answered", ("route", "method", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "remat_http_request_seconds", "Seconds to answer, waits included", ("route",), buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        answers = Histogram(
            "remat_answer_seconds", "Seconds until a POST of a solve was answered from the store, or queued",
            ("result",), buckets=_OBJECTIVES, registry=registry,
        )  # fmt: skip
        self.hit_seconds, self.miss_seconds = answers.labels("hit"), answers.labels("miss")
        self.cache = Counter("remat_cache_results", "Lookups by result", ("result",), registry=registry)
        self.look_seconds = Histogram(
            "remat_store_look_seconds", "Seconds of looks for what answers a problem, all of it or as the time allowed",
            ("found",), buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.recalls = Counter(
            "remat_recalls", "Plans given from memory: to a body posted before, or under an id", ("by",),
            registry=registry,
        )  # fmt: skip
        self.queued = Gauge("remat_queue_depth", "Solves waiting", registry=registry)
        self.running = Gauge("remat_solves_running", "Solves running in this process", registry=registry)
        self.in_progress = Gauge("remat_solves_in_progress", "Solves running in all processes", registry=registry)
        self.workers_alive = Gauge("remat_workers_alive", "Processes that could solve", registry=registry)
        self.workers_busy = Gauge("remat_workers_busy", "Processes that solve", registry=registry)
        self.taken_over = Counter("remat_solves_taken_over", "Solves whose worker fell silent", registry=registry)
        self.saved_seconds = Counter(
            "remat_saved_solver_seconds", "Seconds of solving that stored answers have saved", of_tenant,
            registry=registry,
        )  # fmt: skip
        self.build = Info("remat_build", "Version of the program and its solver", registry=registry)
        ProcessCollector(registry=registry)
        self.tenant_queued = Gauge("remat_tenant_queue_depth", "Solves waiting", of_tenant, registry=registry)
        self.tenant_running = Gauge("remat_tenant_solves_running", "Solves running", of_tenant, registry=registry)
        self.tenant_oldest_seconds = Gauge(
            "remat_tenant_oldest_queued_seconds", "Seconds that the oldest waiting solve has waited", of_tenant,
            registry=registry,
        )  # fmt: skip
        self.tenant_seconds = Counter(
            "remat_tenant_solver_seconds", "Seconds of solving in this process", of_tenant, registry=registry
        )
        self.queue_seconds = Histogram(
            "remat_queue_wait_seconds", "Seconds from queued to started", buckets=_SECONDS, registry=registry
        )
        self.solve_seconds = Histogram(
            "remat_solve_seconds", "Seconds that solves took", ("method", "status"), buckets=_SECONDS, registry=registry
        )
        self.overhead_seconds = Histogram(
            "remat_solve_overhead_seconds", "Seconds of a solve's time that its child was not solving",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.gap = Histogram("remat_solve_gap_ratio", "Gap at the end of solves", buckets=_GAPS, registry=registry)
        self.rejections = Counter(
            "remat_verifier_rejections", "Plans that the verifier refused", ("where",), registry=registry
        )
        self.kills = Counter("remat_solver_kills", "Solver children ended from outside", ("reason",), registry=registry)
        self.damaged = Counter(
            "remat_store_damaged", "Rows that are not what was stored, and are not believed", ("kind",),
            registry=registry,
        )  # fmt: skip
        self.mended = Counter("remat_store_mended", "Damaged rows written anew", ("kind",), registry=registry)
        self.evicted = Counter("remat_store_evicted", "Rows evicted", ("kind",), registry=registry)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
