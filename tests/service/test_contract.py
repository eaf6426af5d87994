"""`openapi.yaml` is what the application says of itself, what it does, and all that a generated client needs."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest
import yaml

from remat_service.settings import Settings
from remat_service.telemetry import Metrics
from remat_service.web.app import as_yaml, create_app
from service.before import text_before
from service.database import postgres
from service.serving import Service, Worker, serving
from service.test_tenants import cli

HERE = Path(__file__).parent
COMMITTED = HERE.parents[1] / "openapi.yaml"


def test_openapi_is_committed() -> None:
    """Made anew with `remat-service openapi > openapi.yaml`."""
    assert COMMITTED.read_text() == as_yaml(create_app(Settings(database_url="sqlite://")))


def test_openapi_is_valid() -> None:
    """An OpenAPI 3.1 document that a validator passes."""
    openapi_spec_validator.validate(yaml.safe_load(COMMITTED.read_text()))


def test_nothing_breaks_within_v1() -> None:
    """A client of the version before meets nothing that it does not know."""
    assert _breaks(yaml.safe_load(text_before("openapi.yaml")), yaml.safe_load(COMMITTED.read_text())) == []


def test_every_operation_says_what_it_may_answer() -> None:
    """Whatever asks for a key may be over a limit; whatever looks at the database may find it away; ids are names."""
    document = yaml.safe_load(COMMITTED.read_text())
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", each["operationId"]) for each in operations)
    open_to_all = {"livez", "readyz", "metrics"}
    for each in operations:
        assert ("429" in each["responses"]) == (each["operationId"] not in open_to_all), each["operationId"]
        assert ("503" in each["responses"]) == (each["operationId"] != "livez"), each["operationId"]


def _breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every place where a client written against `old` would meet something that it does not know from `new`.

    A request may not lose a route, method, property, accepted value or become stricter; a response may not lose a
    status, a required property or the type of one. Additions are no breaks.
    """
    found: list[str] = []
    for path, operations in old["paths"].items():
        for method, operation in operations.items():
            where = f"{method.upper()} {path}"
            later = new["paths"].get(path, {}).get(method)
            if later is None:
                found.append(f"{where} is gone")
                continue
            found += _parameters(where, operation, later)
            found += _bodies(where, operation, later, old, new)
            for status, response in operation["responses"].items():
                if status not in later["responses"]:
                    found.append(f"{where}: response {status} is gone")
                    continue
                for kind, content in response.get("content", {}).items():
                    now = later["responses"][status].get("content", {}).get(kind)
                    if now is None:
                        found.append(f"{where}: response {status} is no longer {kind}")
                    elif "schema" in content:
                        place = f"{where} {status}"
                        found += _schema(place, content["schema"], now.get("schema", {}), old, new, sent=False)
    return found


def _parameters(where: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    before = {(p["in"], p["name"]): p for p in old.get("parameters", ())}
    after = {(p["in"], p["name"]): p for p in new.get("parameters", ())}
    for key in before.keys() - after.keys():
        yield f"{where}: parameter {key[1]} is gone"
    for key, parameter in after.items():
        if parameter.get("required") and not before.get(key, {}).get("required"):
            yield f"{where}: parameter {key[1]} is required now"


def _bodies(
    where: str, old: dict[str, Any], new: dict[str, Any], document: dict[str, Any], later: dict[str, Any]
) -> list[str]:
    before = old.get("requestBody", {}).get("content", {})
    after = new.get("requestBody", {}).get("content", {})
    if not before:
        return [f"{where}: a body is required now"] if new.get("requestBody", {}).get("required") else []
    found = []
    for kind, content in before.items():
        if kind not in after:
            found.append(f"{where}: {kind} is no longer accepted")
        else:
            found += _schema(where, content["schema"], after[kind]["schema"], document, later, sent=True)
    return found


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _schema(
    where: str, old: dict[str, Any], new: dict[str, Any], before: dict[str, Any], after: dict[str, Any], *, sent: bool
) -> list[str]:
    """Differences of one schema; `sent` by the client, or received by it."""
    old, new = _resolved(old, before), _resolved(new, after)
    if sent and "anyOf" in new and "anyOf" not in old:  # more is accepted, if what was accepted still is
        return min((_schema(where, old, one, before, after, sent=True) for one in new["anyOf"]), key=len)
    found = []
    if "type" in old and old["type"] != new.get("type"):
        found.append(f"{where}: was {old['type']}, is {new.get('type')}")
    values, later = set(map(str, old.get("enum", ()))), set(map(str, new.get("enum", ())))
    if sent and values - later and later:
        found.append(f"{where}: no longer accepts {sorted(values - later)}")
    if not sent and later - values and values:
        found.append(f"{where}: may now be {sorted(later - values)}")
    for limit, stricter in (("maximum", min), ("maxItems", min), ("minimum", max), ("minItems", max)):
        if sent and limit in new and (limit not in old or stricter(old[limit], new[limit]) != old[limit]):
            found.append(f"{where}: {limit} is stricter")
    for name, property_ in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            found.append(f"{where}: {name} is gone")
        else:
            found += _schema(f"{where}.{name}", property_, new["properties"][name], before, after, sent=sent)
    required, later = set(old.get("required", ())), set(new.get("required", ()))
    if sent and later - required:
        found.append(f"{where}: {sorted(later - required)} required now")
    if not sent and required - later:
        found.append(f"{where}: {sorted(required - later)} may be absent now")
    if "items" in old:
        found += _schema(f"{where}[]", old["items"], new.get("items", {}), before, after, sent=sent)
    if "anyOf" in old and len(new.get("anyOf", ())) < len(old["anyOf"]):
        found.append(f"{where}: fewer alternatives")
    for i, (a, b) in enumerate(zip(old.get("anyOf", ()), new.get("anyOf", ()), strict=False)):
        found += _schema(f"{where}|{i}", a, b, before, after, sent=sent)
    return found


def _without(path: str, method: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["paths"][path].pop(method)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("/v1/solves", "get"), "GET /v1/solves is gone"),
        (lambda d: d["components"]["schemas"]["AnswerDocument"]["properties"].pop("gap"), "gap is gone"),
        (lambda d: d["components"]["schemas"]["AnswerDocument"]["required"].remove("gap"), "may be absent"),
        (lambda d: d["components"]["schemas"]["SolveRequest"]["required"].append("method"), "required now"),
        (lambda d: d["components"]["schemas"]["SolveRequest"]["properties"].pop("force"), "force is gone"),
        (
            lambda d: d["components"]["schemas"]["SolveRequest"]["properties"]["priority"].update(maximum=10),
            "maximum is stricter",
        ),
        (
            lambda d: d["components"]["schemas"]["AnswerDocument"]["properties"]["status"]["enum"].append("lost"),
            "may now be",
        ),
        (lambda d: d["components"]["schemas"]["AnswerDocument"]["properties"]["seconds"].update(type="string"), "was"),
        (lambda d: d["paths"]["/v1/solves"]["post"]["responses"].pop("202"), "response 202 is gone"),
        (lambda d: d["components"]["schemas"]["SolveRequest"]["properties"]["problem"]["anyOf"].pop(), "fewer"),
        (
            lambda d: d["components"]["schemas"]["GraphDocument"]["properties"].update(
                value_op={"anyOf": [{"type": "string"}, {"type": "integer"}]}
            ),
            "was array",
        ),
    ],
)
def test_a_break_is_seen(change: Callable[[dict[str, Any]], object], said: str) -> None:
    """The comparison itself can fail."""
    old = yaml.safe_load(COMMITTED.read_text())
    new = copy.deepcopy(old)
    change(new)
    assert any(said in line for line in _breaks(old, new))


def test_additions_are_no_breaks() -> None:
    """A new route, an optional member of a request, a new member of an answer."""
    old = yaml.safe_load(COMMITTED.read_text())
    new = copy.deepcopy(old)
    new["paths"]["/v1/new"] = {"get": {"responses": {"200": {"description": "new"}}}}
    new["components"]["schemas"]["SolveRequest"]["properties"]["hint"] = {"type": "string"}
    new["components"]["schemas"]["AnswerDocument"]["properties"]["hint"] = {"type": "string"}
    assert _breaks(old, new) == []


def test_every_route_and_refusal_has_an_example() -> None:
    """Bodies and refusals alike."""
    document = yaml.safe_load(COMMITTED.read_text())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            assert body is None or "example" in body, (method, path)
            for status, response in operation["responses"].items():
                if status >= "400":
                    content = response["content"]["application/problem+json"]
                    assert content["example"]["status"] == int(status), (method, path, status)


def test_metrics_are_all_listed() -> None:
    """So has the table of metrics."""
    text = (COMMITTED.parent / "docs" / "service.md").read_text()
    names = {family.name for family in Metrics().registry.collect() if family.name.startswith("remat_")}
    assert names == set(re.findall(r"`(remat_[a-z_]+)`", text))


def test_settings_are_all_listed() -> None:
    """The table in docs/service.md has every setting in order, with what the setting itself says."""
    text = (COMMITTED.parent / "docs" / "service.md").read_text()
    rows = re.findall(r"^\| `(REMAT_\w+)` \| [^|]+ \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(f"REMAT_{name.upper()}", field.description) for name, field in Settings.model_fields.items()]


@pytest.fixture(scope="module", params=["embedded", pytest.param("cluster", marks=pytest.mark.slow)])
def brief(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose solves are short: alone on SQLite, and with a worker on PostgreSQL."""
    folder = tmp_path_factory.mktemp("brief")
    with ExitStack() as stack:
        more: dict[str, str] = {}
        if request.param == "cluster":
            more["database_url"] = stack.enter_context(postgres())
        running = stack.enter_context(serving(folder, dispatcher=request.param, workers=1, most_time_limit_s=1, **more))
        if more:
            stack.callback(Worker(folder, more["database_url"], most_time_limit_s=1).stop)
        yield running


def _fuzz(service: Service, *arguments: str) -> None:
    program, config = Path(sys.executable).with_name("schemathesis"), HERE / "schemathesis.toml"
    common = ("--checks=all", "--seed=1", "--generation-database=none")
    done = subprocess.run(
        [program, "--config-file", config, "run", f"{service.url}/openapi.json", *common, *arguments],
        capture_output=True, text=True, timeout=900, check=False, cwd=service.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.thorough
def test_examples(brief: Service) -> None:
    """Every example of the document is accepted and answered as described, with all checks of schemathesis."""
    _fuzz(brief, "--phases=examples")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything(brief: Service) -> None:
    """Boundary values, random bodies, and sequences of calls."""
    _fuzz(brief, "--max-examples=40")


@pytest.mark.slow
def test_a_generated_client_compiles_and_works(tmp_path: Path) -> None:
    """In TypeScript: it asks, waits, polls, lists, sweeps and reads a refusal; a wrong field does not compile."""
    build = tmp_path / "build"
    shutil.copytree(HERE / "typescript", build)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=build, capture_output=True, text=True, timeout=240, check=False)

    installed = run("npm", "install", "--silent", "--no-audit", "--no-fund")
    assert installed.returncode == 0, installed.stderr
    # fields with a default may be left out of a request
    made = run("npx", "openapi-typescript", "--default-non-nullable=false", str(COMMITTED), "-o", "api.d.ts")
    assert made.returncode == 0, made.stderr
    compiled = run("npx", "tsc", "-p", ".")
    assert compiled.returncode == 0, compiled.stdout
    with serving(tmp_path / "service", workers=1, require_keys="true") as own:
        said = run("node", "out/client.js", own.url, cli(own, "keys", "create", "page", "--new-tenant"))
    assert said.returncode == 0, said.stderr
    found = {line["what"]: line["value"] for line in map(json.loads, said.stdout.splitlines())}
    assert found["status"] == "optimal"
    assert found["cost_ns"] == found["polled"] == 640
    assert found["listed"] == 1
    assert found["refused"] == [422, "/problem/graph/keep/0"]

    source = build / "client.ts"
    source.write_text(source.read_text().replace("budget_bytes: 1300", "budget: 1300"))
    assert "budget" in run("npx", "tsc", "-p", ".").stdout
