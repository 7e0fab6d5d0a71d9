"""A run as one HTML page that needs nothing else: figures, charts, errors. Pure function of what was kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loadtest.plots import Axis, Series, chart
from loadtest.tables import Row, html

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{width:480px;max-width:100%;margin:.3em}"""
SHARES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
TIMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end"}


def page(content: Mapping[str, Any], table: Sequence[Row]) -> str:
    """The page of a run's file; `table` is what the terminal showed."""
    about = {"model": content["model"], "server": content.get("url"), "time": content["time"]}
    about |= {"machine": content["machine"]["processor"], **content.get("settings", {})}
    capacity = content.get("capacity")
    parts = [
        "<!doctype html><meta charset=utf-8><title>Load test</title>",
        f"<style>{STYLE}</style><h1>Load test of {escape(str(content['model']))}</h1>",
        html([("", ""), *((name, str(value)) for name, value in about.items() if value)]),
        html(table),
    ]
    if capacity is not None:
        tried = sorted((entry["rate"], 100 * entry["within_slo"]) for entry in content["figures"])
        drawn = chart("requests in time", Axis("requests a second"), Axis("percent"), [Series("in time", tried)])
        parts.append(f"<h2>Capacity</h2><p>{capacity:.3g} requests a second keep the objective.</p>{drawn}")
    for entry in content["figures"] if capacity is None else ():
        parts.append(f"<h2>{escape(entry['kind'])}</h2>{_charts(entry['details'])}")
        if errors := entry["details"]["errors"]:
            parts.append(html([("error", "requests"), *((text, str(count)) for text, count in errors.items())]))
    return "\n".join(parts) + "\n"


def _charts(details: Mapping[str, Any]) -> str:
    """Percentiles of each time, tokens by the second, and the first token by when a request came."""
    drawn = []
    for name, title in TIMES.items():
        if values := sorted(value for value in details[name] if value is not None):
            points = [(float(share), values[min(len(values) - 1, share * len(values) // 100)]) for share in SHARES]
            drawn.append(chart(title, Axis("percent of requests"), Axis("ms"), [Series(name.upper(), points)]))
    if len(pieces := details["pieces_by_second"]) > 1:
        points = [(float(second), float(count)) for second, count in enumerate(pieces)]
        drawn.append(chart("pieces of text", Axis("second"), Axis("a second"), [Series("pieces", points)]))
    came = sorted((at, ttft) for at, ttft in zip(details["at"], details["ttft"], strict=True) if ttft is not None)
    if len(came) > 1 and came[-1][0] > 0:
        drawn.append(chart("first token by arrival", Axis("second of arrival"), Axis("ms"), [Series("TTFT", came)]))
    return "\n".join(drawn)
