"""docs/api.md names every field, route and metric there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from server.protocol.checks import REFUSED

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`/?([\w]+)[^`]*`", DOCUMENT))
# Of vLLM, about pictures and sounds, or of the other route; refused with a reason all the same.
UNSAID = {"media_io_kwargs", "mm_processor_kwargs", "echo", "best_of"}


def test_every_field_is_documented(server: Any) -> None:
    description = server.http.get("/openapi.json").json()
    bodies = re.findall(r"schemas/(\w+)", str(description["paths"]))
    fields = {name for body in bodies for name in description["components"]["schemas"][body]["properties"]} - {"error"}
    fields |= {name for refused in REFUSED.values() for name in refused} - UNSAID
    assert fields - NAMED == set()


def test_every_route_is_documented(server: Any) -> None:
    for path in [*server.http.get("/openapi.json").json()["paths"], "/health", "/ready", "/openapi.json"]:
        assert re.sub(r"{\w+}", "{id}", path) in DOCUMENT


def test_every_metric_is_documented(server: Any) -> None:
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        if family.name.startswith("octavo_"):
            assert family.name.removeprefix("octavo_") in DOCUMENT, family.name
