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

from remat_service.metrics import Metrics
from remat_service.settings import Settings
from remat_service.web.app import create_app
from remat_service.web.openapi import as_yaml
from service.compatible import breaks

COMMITTED = Path(__file__).parents[2] / "openapi.yaml"


def test_openapi_is_committed() -> None:
    """Made anew with `remat-service openapi > openapi.yaml`."""
    assert COMMITTED.read_text() == as_yaml(create_app(Settings(database_url="sqlite://")))


def test_openapi_is_valid() -> None:
    """An OpenAPI 3.1 document that a validator passes."""
    openapi_spec_validator.validate(yaml.safe_load(COMMITTED.read_text()))


V1 = Path(__file__).parent / "openapi-v1.yaml"
"""The contract as first published; it changes only with the first number of the version."""


def test_nothing_breaks_within_v1() -> None:
    """What /v1 has promised, it keeps."""
    assert breaks(yaml.safe_load(V1.read_text()), yaml.safe_load(COMMITTED.read_text())) == []


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
    names = {family.name for family in Metrics().registry.collect()}
    assert names == set(re.findall(r"`(remat_[a-z_]+)`", text))


def test_settings_are_all_listed() -> None:
    """The table in docs/service.md has every setting with its default."""
    text = (COMMITTED.parent / "docs" / "service.md").read_text()
    for name in Settings.model_fields:
        assert f"`REMAT_{name.upper()}`" in text, name
