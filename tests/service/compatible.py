"""What would break a client within /v1: a comparison of two OpenAPI documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
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
