"""What deploy/ gives Prometheus and Grafana, as their own tools and rules have it."""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest
import yaml
from support.prometheus import ALERTS, CONFIG, DASHBOARD, DEPLOY, PANELS, program

UNIT_TESTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())["tests"]


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", "--lint-fatal", "prometheus.yml")


def test_every_alert_fires_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", "alerts_test.yml")


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_no_alert_goes_untested(alert: str) -> None:
    cases = [case for test in UNIT_TESTS for case in test["alert_rule_test"] if case["alertname"] == alert]
    assert any(case.get("exp_alerts") for case in cases)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_and_where(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "$labels.instance" in rule["annotations"]["summary"]


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken = [
        {(p["x"] + dx, p["y"] + dy) for dx in range(p["w"]) for dy in range(p["h"])}
        for p in (panel["gridPos"] for panel in DASHBOARD["panels"])
    ]
    assert all(not one & other for one, other in itertools.combinations(taken, 2))
    assert all(x < 24 for cells in taken for x, _ in cells)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_explains_itself_and_follows_the_choice_of_instance(panel: dict) -> None:
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        selectors = re.findall(r"\{([^}]*)\}", target["expr"])
        assert selectors
        assert all('instance=~"$instance"' in selector for selector in selectors)


def test_compose_mounts_what_there_is() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    files = [DEPLOY / path for path in mounted if path.startswith("./")]
    assert files
    assert all(path.exists() for path in files)
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    # What compose calls the daemon's machine is what Prometheus scrapes.
    [target] = CONFIG["scrape_configs"][0]["static_configs"][0]["targets"]
    assert services["prometheus"]["extra_hosts"] == [f"{target.partition(':')[0]}:host-gateway"]
