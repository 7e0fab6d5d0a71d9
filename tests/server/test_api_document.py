"""docs/api.md names every field and route there is, docs/metrics.md every metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from models.roofline import Roofline
from models.step_cost import StepCost
from server.protocol.checks import REFUSED

DOCUMENT, METRICS = (
    (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "metrics.md")
)
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


def test_every_metric_is_documented(serving: Any) -> None:
    options = {"roofline": Roofline(StepCost(1, 1, 1, 1, 1), (1.0, 1.0)), "model": {"model": "m"}}
    with serving(metrics_options=options) as server:
        for family in text_string_to_metric_families(server.http.get("/metrics").text):
            name = family.name.removeprefix("octavo_")
            if family.name != name:
                suffix = "_total" if family.type == "counter" else ""
                assert re.search(rf"`{name}{suffix}[`{{]", METRICS), family.name
