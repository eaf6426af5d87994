"""What can be seen from outside: Prometheus metrics, structured logs, and both traces and metrics for a collector.

Names of metrics are part of the contract with operators. Logs are one line an event, never the content of a graph,
never a secret. Traces and metrics go over OpenTelemetry's protocol where `OTEL_EXPORTER_OTLP_ENDPOINT` names a
collector. A solve's span belongs to the trace of the request that queued it, in whichever process it runs. The metrics
are those of `/metrics`, under the same names. The standard variables (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, …)
hold.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from .errors import ServiceError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.metrics.export import Metric

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_OBJECTIVES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""With the two that the objective names: hits within 0.05 s, misses accepted within 0.5 s."""
_GAPS = (0.0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES, _METRICS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_PARENT = "traceparent"
ASKED_BY = ("tenant", "key", "request")
"""Every line of the log about a request, or about the solve that it has queued, names these."""
_QUIET = "livez,readyz,metrics"
"""Routes that no trace is made of."""

_tracer = trace.get_tracer("remat_service")
_propagator = TraceContextTextMapPropagator()


class Metrics:
    """One registry an app, so that several apps in one process don't meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        of_tenant = ("tenant",)
        self.requests = counter("remat_http_requests", "HTTP requests answered", ("route", "method", "status"))
        self.request_seconds = histogram("remat_http_request_seconds", "Seconds to answer, waits included", ("route",))
        answers = histogram(
            "remat_answer_seconds",
            "Seconds until a POST of a solve was answered from the store, or queued",
            ("result",),
            buckets=_OBJECTIVES,
        )
        self.hit_seconds, self.miss_seconds = answers.labels("hit"), answers.labels("miss")
        self.cache = counter("remat_cache_results", "Lookups by result", ("result",))
        self.look_seconds = histogram(
            "remat_store_look_seconds",
            "Seconds of looks for what answers a problem, all of it or as the time allowed",
            ("found",),
        )
        self.recalls = counter(
            "remat_recalls", "Plans given from memory: to a body posted before, or under an id", ("by",)
        )
        self.queued = gauge("remat_queue_depth", "Solves waiting")
        self.running = gauge("remat_solves_running", "Solves running in this process")
        self.in_progress = gauge("remat_solves_in_progress", "Solves running in all processes")
        self.workers_alive = gauge("remat_workers_alive", "Processes that could solve")
        self.workers_busy = gauge("remat_workers_busy", "Processes that solve")
        self.taken_over = counter("remat_solves_taken_over", "Solves whose worker fell silent")
        self.saved_seconds = counter(
            "remat_saved_solver_seconds", "Seconds of solving that stored answers have saved", of_tenant
        )
        self.saved_bytes = counter(
            "remat_saved_memory_bytes", "Bytes that answered plans need less than plain training", of_tenant
        )
        self.build = Info("remat_build", "Version of the program and its solver", registry=self.registry)
        ProcessCollector(registry=self.registry)
        self.tenant_queued = gauge("remat_tenant_queue_depth", "Solves waiting", of_tenant)
        self.tenant_running = gauge("remat_tenant_solves_running", "Solves running", of_tenant)
        self.tenant_oldest_seconds = gauge(
            "remat_tenant_oldest_queued_seconds", "Seconds that the oldest waiting solve has waited", of_tenant
        )
        self.tenant_seconds = counter("remat_tenant_solver_seconds", "Seconds of solving in this process", of_tenant)
        self.queue_seconds = histogram("remat_queue_wait_seconds", "Seconds from queued to started")
        self.solve_seconds = histogram("remat_solve_seconds", "Seconds that solves took", ("method", "status"))
        self.overhead_seconds = histogram(
            "remat_solve_overhead_seconds", "Seconds of a solve's time that its child was not solving"
        )
        self.gap = histogram("remat_solve_gap_ratio", "Gap at the end of solves", buckets=_GAPS)
        self.rejections = counter("remat_verifier_rejections", "Plans that the verifier refused", ("where",))
        self.kills = counter("remat_solver_kills", "Solver children ended from outside", ("reason",))
        self.damaged = counter(
            "remat_store_damaged", "Rows that are not what was stored, and are not believed", ("kind",)
        )
        self.mended = counter("remat_store_mended", "Damaged rows written anew", ("kind",))
        self.evicted = counter("remat_store_evicted", "Rows evicted", ("kind",))
        for counted, labels in (
            (self.rejections, ("solver", "store")),
            (self.kills, ("deadline", "terminated", "killed", "memory")),
            (self.damaged, ("claim", "floor", "effort", "proof", "answer", "profile")),
            (self.mended, ("graph",)),
        ):
            for label in labels:  # at 0 from the start: Prometheus sees no increase in a series that begins with 1
                counted.labels(label)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def set_up_logs(level: str, form: str) -> None:
    """Send structlog and the standard library's loggers to standard error, as JSON lines or for people."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                last,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("alembic", "procrastinate"):
        logging.getLogger(name).setLevel("WARNING")


def traceparent() -> str | None:
    """The span under way as W3C's `traceparent`; None where nothing is traced."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(_PARENT)


@contextmanager
def span(name: str, parent: str | None, attributes: Mapping[str, Any]) -> Iterator[Callable[[str, Any], None]]:
    """A span below `parent`, up to the end of the block; yields what adds an attribute to it."""
    context = _propagator.extract({_PARENT: parent}) if parent else None
    with _tracer.start_as_current_span(name, context, attributes=dict(attributes)) as under_way:
        yield under_way.set_attribute


@contextmanager
def exported(registry: CollectorRegistry, app: FastAPI | None = None) -> Iterator[None]:
    """Export the spans of this process, those of `app`'s requests among them, and `registry`'s metrics.

    Without an endpoint in the environment nothing is done.

    Raises:
        ServiceError: there is an endpoint, and OpenTelemetry's SDK is not installed.
    """
    traces, metrics = (os.environ.get(name) or os.environ.get(_ENDPOINT) for name in (_TRACES, _METRICS))
    if not (traces or metrics):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ServiceError(
            f"{_ENDPOINT} is set, and {error.name} is not installed: run pip install '.[telemetry]' in a clone of remat"
        ) from None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "remat-service")})
    with ExitStack() as closing:
        if traces:
            provider = TracerProvider(resource=resource)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(provider)
            if app is not None:
                FastAPIInstrumentor.instrument_app(
                    app, tracer_provider=provider, excluded_urls=_QUIET, exclude_spans=["receive", "send"]
                )
            closing.callback(provider.shutdown)
        if metrics:
            closing.callback(_MetricsExport(registry, resource).stop)
        yield


def metrics_exported_every_s() -> float | None:
    """Seconds between two exports of metrics; None where no collector is named."""
    return _export_interval_s() if os.environ.get(_METRICS) or os.environ.get(_ENDPOINT) else None


def _export_interval_s() -> float:
    return float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", 60_000)) / 1000


class _MetricsExport:
    """Sends a registry's metrics every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (60,000), and once at the end."""

    def __init__(self, registry: CollectorRegistry, resource: Any) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        self._registry, self._resource = registry, resource
        self._exporter = OTLPMetricExporter()
        self._begun_ns = time.time_ns()
        self._interval_s = _export_interval_s()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remat metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send what there is, and end."""
        self._stopping.set()
        self._thread.join(10.0)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = list(as_metrics(self._registry, self._begun_ns, time.time_ns()))
        scope = ScopeMetrics(InstrumentationScope("remat_service"), metrics, "")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))


def as_metrics(registry: CollectorRegistry, begun_ns: int, now_ns: int) -> Iterator[Metric]:
    """What stands in a registry in OpenTelemetry's data model: cumulative sums, gauges and histograms."""
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum

    for family in registry.collect():
        data: Any
        if family.type == "histogram":
            data = _histogram(family, begun_ns, now_ns)
        else:
            samples = [s for s in family.samples if not s.name.endswith("_created")]
            points = [NumberDataPoint(dict(s.labels), begun_ns, now_ns, s.value) for s in samples]
            data = Sum(points, AggregationTemporality.CUMULATIVE, True) if family.type == "counter" else Gauge(points)
        yield Metric(family.name, family.documentation, "", data)


def _histogram(family: Any, begun_ns: int, now_ns: int) -> Any:
    """Prometheus counts what lies below a bound, OpenTelemetry what lies between two."""
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint

    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, below in sorted(buckets.items()):
        counts = [count for _, count in sorted(below)]
        between = [count - before for before, count in zip([0, *counts], counts, strict=False)]
        bounds = [bound for bound, _ in sorted(below)][:-1]  # the last is infinity, which goes without saying
        unknown: Any = None  # the extremes: Prometheus keeps none
        points.append(
            HistogramDataPoint(
                dict(labels), begun_ns, now_ns, counts[-1], sums[labels], between, bounds, unknown, unknown
            )
        )
    return Histogram(points, AggregationTemporality.CUMULATIVE)
