"""`openapi.yaml` is what the application says of itself."""

from __future__ import annotations

from pathlib import Path

import openapi_spec_validator
import yaml

from remat_service.app import create_app
from remat_service.contract import as_yaml
from remat_service.settings import Settings

COMMITTED = Path(__file__).parents[2] / "openapi.yaml"


def test_openapi_is_committed() -> None:
    """Made anew with `remat-service openapi > openapi.yaml`."""
    assert COMMITTED.read_text() == as_yaml(create_app(Settings(database_url="sqlite://")))


def test_openapi_is_valid() -> None:
    """An OpenAPI 3.1 document that a validator passes."""
    openapi_spec_validator.validate(yaml.safe_load(COMMITTED.read_text()))
