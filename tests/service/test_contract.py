"""`openapi.yaml` is what the application says of itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest
import yaml

from remat_service.settings import Settings
from remat_service.telemetry import Metrics
from remat_service.web.app import as_yaml, create_app
from service.before import text_before
from service.compatible import breaks

COMMITTED = Path(__file__).parents[2] / "openapi.yaml"


def test_openapi_is_committed() -> None:
    """Made anew with `remat-service openapi > openapi.yaml`."""
    assert COMMITTED.read_text() == as_yaml(create_app(Settings(database_url="sqlite://")))


def test_openapi_is_valid() -> None:
    """An OpenAPI 3.1 document that a validator passes."""
    openapi_spec_validator.validate(yaml.safe_load(COMMITTED.read_text()))


def test_nothing_breaks_within_v1() -> None:
    """A client of the version before meets nothing that it does not know."""
    assert breaks(yaml.safe_load(text_before("openapi.yaml")), yaml.safe_load(COMMITTED.read_text())) == []


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
    assert any(said in line for line in breaks(old, new))


def test_additions_are_no_breaks() -> None:
    """A new route, an optional member of a request, a new member of an answer."""
    old = yaml.safe_load(COMMITTED.read_text())
    new = copy.deepcopy(old)
    new["paths"]["/v1/new"] = {"get": {"responses": {"200": {"description": "new"}}}}
    new["components"]["schemas"]["SolveRequest"]["properties"]["hint"] = {"type": "string"}
    new["components"]["schemas"]["AnswerDocument"]["properties"]["hint"] = {"type": "string"}
    assert breaks(old, new) == []


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
