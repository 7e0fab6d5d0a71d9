"""The files in deploy/, and the real Prometheus to try them with where it is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def program(name: str) -> str:
    """`prometheus` or `promtool`; skips the test where they are not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (on Debian and Ubuntu: apt install prometheus)")
    return path
