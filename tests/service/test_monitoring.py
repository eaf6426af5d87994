"""What operators see: routes in metrics, a key for them, spans and metrics at a collector, a dashboard, alerts."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
import promql_parser
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from sqlalchemy import event

from remat_service.identity import Caller
from remat_service.requests.completion import look
from remat_service.storage.tables import requests
from remat_service.telemetry import Metrics
from remat_service.web.routes.solves import event_stream
from service.database import default_tenant, process, request_row
from service.serving import (
    Listener,
    Service,
    at_peak,
    eventually,
    hard_graph,
    open_problem,
    posed,
    serving,
    training_graph,
)
from service.test_tenants import cli

MONITORING = Path(__file__).parents[2] / "docker" / "monitoring"
(_GROUP,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for rule in _GROUP["rules"]}


def test_metrics_name_the_route(service: Service) -> None:
    """Of reads and of posts, refused ones included; neither ids nor methods that somebody makes up become labels."""
    service.http.post("/v1/solves", json={})
    for made_up in ("BREW", "WHEN"):
        assert service.http.request(made_up, "/v1/solves").status_code == 405
    service.http.get("/v1/solves/" + "0" * 32)
    text = service.http.get("/metrics").text
    assert 'method="POST",route="/v1/solves",status="422"' in text
    assert 'method="GET",route="/v1/solves/{solve_id}",status="404"' in text
    assert "0" * 32 not in text
    assert 'remat_http_requests_total{method="other",route="/v1/solves",status="405"}' in text
    assert "BREW" not in text
    assert "WHEN" not in text


@pytest.mark.thorough
def test_metrics_can_want_a_key(tmp_path: Path) -> None:
    """Without the key, with another, with a longer one: 401, and no metric in the body."""
    with serving(tmp_path, workers=1, metrics_key="only for scrapers") as own:
        for given in (None, "Bearer other", "Bearer only for scrapersX", "Basic only for scrapers"):
            reply = own.http.get("/metrics", headers={} if given is None else {"Authorization": given})
            assert reply.status_code == 401
            assert "remat_" not in reply.text
        assert own.http.head("/metrics").status_code == 401
        key = {"Authorization": "Bearer only for scrapers"}
        assert own.http.head("/metrics", headers=key).status_code == 200
        assert "remat_queue_depth" in own.http.get("/metrics", headers=key).text


@pytest.mark.thorough
def test_streams_of_one_tenant_are_limited(tmp_path: Path) -> None:
    """With one stream open where one may be, a second is refused, other requests are not, and its end makes room."""
    with serving(tmp_path, workers=1, most_streams_per_tenant=1) as own:
        _, posted = own.post(open_problem(11), wait=0, method="staged", time_limit_s=60, max_gap=0)
        path = f"/v1/solves/{posted['id']}/events"
        with own.http.stream("GET", path) as first:
            assert first.status_code == 200
            refused = own.http.get(path)
            assert (refused.status_code, "event streams" in refused.json()["detail"]) == (429, True)
            assert own.http.get("/v1/solves").status_code == 200

        def opens() -> bool:
            with own.http.stream("GET", path) as again:
                return again.status_code == 200

        eventually(opens)


class Collector(Listener):
    """A collector of OpenTelemetry's protocol over HTTP, on a free port."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        super().__init__(Handler)

    def take(self, path: str, body: bytes) -> None:
        """One export."""
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        else:
            assert path == "/v1/metrics"
            for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for under in measured.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in under.metrics}


@pytest.mark.thorough
def test_a_request_and_its_solve_are_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solve's span is below the POST's, the client's `traceparent` above it; the metrics arrive as they are."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serving(tmp_path, workers=1) as own:
            body = {"problem": at_peak(training_graph(4)).to_json(), "time_limit_s": 5}
            headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "Prefer": "wait=20"}
            assert own.http.post("/v1/solves", json=body, headers=headers).status_code == 200
            own.http.get("/livez")
            answered = own.metric("remat_http_request_seconds_count")
        spans = {span.name: span for span in collector.spans}
        posted, solved = spans["POST /v1/solves"], spans["solve"]
        assert posted.trace_id.hex() == solved.trace_id.hex() == trace
        assert solved.parent_span_id == posted.span_id
        assert {"remat.method", "remat.status"} <= {attribute.key for attribute in solved.attributes}
        assert not any("livez" in name for name in spans)
        took = collector.metrics["remat_http_request_seconds"].histogram.data_points
        assert sum(point.count for point in took) >= answered
        assert all(sum(point.bucket_counts) == point.count for point in took)
        assert collector.metrics["remat_solve_seconds"].histogram.data_points[0].count == 1
        assert collector.metrics["remat_http_requests"].sum.is_monotonic


@pytest.mark.thorough
def test_a_collector_is_told_of_workers_and_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gauges are of the moment though nobody asks for `/metrics`."""

    def told(name: str) -> float | None:
        metric = collector.metrics.get(name)
        return metric.gauge.data_points[0].as_double if metric is not None else None

    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        with serving(tmp_path, workers=1) as own:
            eventually(lambda: told("remat_workers_alive") == 1)
            own.post(open_problem(12), wait=0, method="staged", time_limit_s=60, max_gap=0)
            own.post(open_problem(13), wait=0, method="staged", time_limit_s=60, max_gap=0)
            eventually(lambda: (told("remat_solves_in_progress"), told("remat_queue_depth")) == (1, 1))


@pytest.mark.thorough
async def test_the_cost_of_streams_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """Of forty streams of a request that does not change none asks the database; a lost change reaches them all."""
    async with process(f"sqlite:///{tmp_path}/s.sqlite") as context:
        caller = await default_tenant(context)
        async with context.database.write() as connection:
            waiting = {"id": "a" * 32, "cache": "miss", "ended": False, "epoch": caller.epoch}
            answer = {"cost_ns": None, "bound_ns": None, "restricted_to": []}
            await connection.execute(requests.insert().values(request_row(context, caller, **waiting, answer=answer)))
        asked: list[str] = []
        event.listen(
            context.database.engine.sync_engine, "before_cursor_execute", lambda *given: asked.append(given[2])
        )

        async def who() -> Caller:
            return caller

        ends: list[bytes] = []

        async def watch() -> None:
            ends.extend([chunk async for chunk in event_stream(context, who, "a" * 32, 0) if b"event: end" in chunk])

        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(watch())
            await asyncio.sleep(1.5)
            seen = await look(context, {})
            await asyncio.sleep(1.5)
            asked.clear()
            await asyncio.sleep(2.5)
            quiet = [text for text in asked if text.startswith("SELECT")]
            assert quiet == []
            assert await look(context, seen) == seen
            assert len([text for text in asked if text.startswith("SELECT")]) == 1
            async with context.database.write() as connection:  # by another process, whose note is lost
                await connection.execute(requests.update().values(ended=True))
            await look(context, seen)
        assert len(ends) == 40


def _metrics_of(expression: str) -> set[str]:
    """The names of the metrics in an expression, which Prometheus' grammar takes."""
    promql_parser.parse(expression)
    return set(re.findall(r"\bremat_[a-z_]+", expression))


def _known() -> set[str]:
    found = set()
    for family in Metrics().registry.collect():
        found |= {family.name + end for end in ("", "_total", "_bucket", "_sum", "_count", "_info")}
    return found


def test_alerts_are_rules_over_metrics_that_exist() -> None:
    """Each has an expression in Prometheus' grammar, a severity, and a sentence."""
    with pytest.raises(ValueError):
        promql_parser.parse("rate(remat_queue_depth[5m]")
    assert len(RULES) >= 5
    for alert, rule in RULES.items():
        assert _metrics_of(rule["expr"]) <= _known(), alert
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_dashboard_shows_every_metric_and_none_that_is_not_there() -> None:
    """Its expressions are in Prometheus' grammar; panels don't overlap."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    shown: set[str] = set()
    places = set()
    for panel in dashboard["panels"]:
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        for target in panel["targets"]:
            shown |= _metrics_of(target["expr"])
    assert len(places) == len(dashboard["panels"])
    assert shown <= _known()
    bare = {re.sub(r"_(total|bucket|sum|count|info)$", "", name) for name in shown}
    names = {family.name for family in Metrics().registry.collect()}
    assert bare == {name for name in names if name.startswith("remat_")}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("more", "code"),
    [("", 0), ("# HELP weight_kilobytes It.\n# TYPE weight_kilobytes counter\nweight_kilobytes 1\n", 3)],
)
def test_names_follow_the_conventions(more: str, code: int) -> None:
    """By promtool, with a sample of each: base units, `_total`, a sentence; what breaks them is found."""
    metrics = Metrics()
    for metric in vars(metrics).values():
        if (names := getattr(metric, "_labelnames", ())) and not metric._labelvalues:
            metric.labels(*names)
    text = metrics.text().decode() + more
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr


_QUICK = {"hit": ", le='0.05'", "miss": ", le='0.5'"}


def _answers(result: str, quick: int) -> dict[str, str]:
    """A thousand answers a minute, so many of them within the objective."""
    return {
        f"remat_answer_seconds_count{{result='{result}'}}": "0+1000x200",
        f"remat_answer_seconds_bucket{{result='{result}'{_QUICK[result]}}}": f"0+{quick}x200",
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("RematNothingRuns", {"remat_queue_depth": "5x200", "remat_solves_in_progress": "0x200"}, True),
        ("RematNothingRuns", {"remat_queue_depth": "5x200", "remat_solves_in_progress": "1x200"}, False),
        ("RematObjectiveMissed", _answers("hit", 985) | _answers("miss", 1000), True),
        ("RematObjectiveMissed", _answers("hit", 1000) | _answers("miss", 985), True),
        ("RematObjectiveMissed", _answers("hit", 1000) | _answers("miss", 995), False),
        ("RematObjectiveMissed", _answers("hit", 0), True),
    ],
)
def test_alerts_fire_where_they_should(alert: str, series: dict[str, str], fires: bool, tmp_path: Path) -> None:
    """By promtool: five solves that wait for three hours while nothing runs; one answer in fifty that comes late."""
    rule = RULES[alert]
    expected = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
    test = {
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "180m", "alertname": alert, "exp_alerts": [expected] if fires else []}
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_on_an_increase_see_the_first_one() -> None:
    """Each counter of such an alert is there at 0 before it counts: one that begins with 1 has no increase."""
    lines = Metrics().text().decode().splitlines()
    counters = {name for rule in RULES.values() for name in re.findall(r"increase\((\w+)", rule["expr"])}
    assert len(counters) == 4
    for counter in counters:
        found = [line for line in lines if line.startswith(counter + "{")]
        assert found, counter
        assert all(line.endswith(" 0.0") for line in found)
    assert 'remat_solver_kills_total{reason="memory"} 0.0' in lines


def test_every_alert_has_its_line() -> None:
    """Under "When something is wrong", and no line names an alert that there is not."""
    page = (MONITORING.parents[1] / "docs" / "runbook.md").read_text()
    section = page.split("## When something is wrong")[1].split("\n## ")[0]
    assert set(re.findall(r"`(Remat[A-Za-z]+)`", section)) == RULES.keys()


def _samples(service: Service, expression: str) -> float:
    """The sum of the samples that an alert's selectors find in the service's metrics now."""
    rows = service.http.get("/metrics").text.splitlines()
    found = 0.0
    for name, labels in re.findall(r"\b(remat_\w+)(?:\{([^}]*)\})?", expression):
        wanted = re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', labels)
        for row in rows:
            metric, _, value = row.rpartition(" ")
            given = dict(re.findall(r'(\w+)="([^"]*)"', metric))
            matched = {"=": str.__eq__, "!=": str.__ne__, "=~": lambda has, form: re.fullmatch(form, has) is not None}
            if metric.partition("{")[0] == name and all(matched[by](given[key], form) for key, by, form in wanted):
                found += float(value)
    return found


@pytest.mark.thorough
def test_every_alert_sees_what_it_is_about(tmp_path: Path) -> None:
    """Each is provoked on a running service, and its expression's samples grow; that of a second queue needs workers,
    and is in `test_cluster.py`.
    """
    rules = {alert: rule["expr"] for alert, rule in RULES.items()}
    errors = re.findall(r"rate\((.*?)\[", rules.pop("RematErrors"))[0]  # the numerator
    rules |= {"RematErrors": errors}
    problems = [posed(hard_graph(40, seed), 0.5) for seed in range(4)]

    def queue() -> None:
        for problem in problems[1:]:
            own.post(problem, wait=0, method="staged", max_gap=0, time_limit_s=2)

    def error() -> None:
        own.edit("CREATE TRIGGER broken BEFORE INSERT ON requests BEGIN SELECT RAISE(ABORT, 'broken'); END")
        assert own.post(problems[0], wait=0, method="rotor")[0] == 500
        own.edit("DROP TRIGGER broken")

    def damage() -> None:
        own.edit("UPDATE requests SET seal = 'x'")
        assert own.get(given["id"], 0)[0] == 410

    def refusal() -> None:
        own.edit("UPDATE plans SET cost_ns = cost_ns - 1")
        assert own.get(given["id"], 0)[0] == 410

    def kill() -> None:
        own.stop()
        own.settings["solver_memory_bytes"] = 2**26
        own.start()
        own.post(problems[3], time_limit_s=5, force=True)

    def held() -> bool:
        return _samples(own, "remat_queue_depth") > 0 and _samples(own, "remat_solves_in_progress") == 0

    with serving(tmp_path, workers=1) as own:
        given = own.post(problems[0], method="greedy", time_limit_s=5)[1]
        del rules["RematNothingRuns"]  # two gauges, not one that grows
        cli(own, "tenants", "quota", "default", "--running", "0")
        own.post(problems[0], wait=0, method="staged", max_gap=0, time_limit_s=2)
        eventually(held)
        cli(own, "tenants", "quota", "default", "--running", "none")
        eventually(lambda: not held())
        for alert, provoke in (
            ("RematQueueGrows", queue), ("RematWaitsLong", queue), ("RematErrors", error),
            ("RematObjectiveMissed", queue),
            ("RematPlanRefused", refusal), ("RematStoreDamaged", damage), ("RematSolversKilled", kill),
        ):  # fmt: skip
            before = _samples(own, rules[alert])
            provoke()
            before = 0 if provoke is kill else before  # another process
            eventually(lambda: _samples(own, rules[alert]) > before)  # noqa: B023
            del rules[alert]
    assert set(rules) == {"RematNotAnswering"}
    with pytest.raises(httpx2.ConnectError):  # what Prometheus' own `up` says
        httpx2.get(f"{own.url}/metrics", trust_env=False)
