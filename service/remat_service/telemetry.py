"""Traces and metrics over OpenTelemetry's protocol, where `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector.

A solve's span belongs to the trace of the request that queued it, in whichever process it runs. The metrics are those
of `/metrics`, under the same names. The standard variables (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, …) hold.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry

from .errors import ServiceError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.metrics.export import Metric

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES, _METRICS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_PARENT = "traceparent"
_QUIET = "livez,readyz,metrics"
"""Routes that no trace is made of."""

_tracer = trace.get_tracer("remat_service")
_propagator = TraceContextTextMapPropagator()


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
        raise ServiceError(f"{_ENDPOINT} is set, and {error.name} is not installed: install remat[telemetry]") from None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "remat-service")})
    closing: list[Callable[[], object]] = []
    if traces:
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
        if app is not None:
            FastAPIInstrumentor.instrument_app(
                app, tracer_provider=provider, excluded_urls=_QUIET, exclude_spans=["receive", "send"]
            )
        closing.append(provider.shutdown)
    if metrics:
        closing.append(_MetricsExport(registry, resource).stop)
    try:
        yield
    finally:
        for close in closing:
            close()


class _MetricsExport:
    """Sends a registry's metrics every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (60,000), and once at the end."""

    def __init__(self, registry: CollectorRegistry, resource: Any) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        self._registry, self._resource = registry, resource
        self._exporter = OTLPMetricExporter()
        self._begun_ns = time.time_ns()
        self._interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", 60_000)) / 1000
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
