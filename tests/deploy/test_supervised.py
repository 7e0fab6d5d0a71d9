"""What deploy/ gives Kubernetes and systemd: by their own schemas and tools, and by what the daemon does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from config.flags import Parser, add_settings
from config.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd" / "octavo.service").read_text()
OBJECTS: dict[str, dict[str, Any]] = {
    one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "octavo.yaml").read_text())
}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("version", ["1.30", "1.34"])  # the first with preStop's sleep, and a late one
def test_kubernetes_takes_every_object(kind: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_the_schemas_can_say_no() -> None:
    broken = {**OBJECTS["Service"], "spec": {"ports": [{"prot": 80}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.34", strict=True)


def settings_of(arguments: list[str]) -> Settings:
    parser = Parser()
    add_settings(parser)
    return Settings.load(vars(parser.parse_args(arguments)), {})


def test_a_pod_has_the_time_to_end_well() -> None:
    settings = settings_of(CONTAINER["args"])
    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= sleep + settings.shutdown_timeout + 6
    assert CONTAINER["readinessProbe"]["periodSeconds"] * CONTAINER["readinessProbe"]["failureThreshold"] <= sleep
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health", "a busy or draining one must not be killed"


def test_everything_selects_the_pods_there_are() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    for selector in (
        OBJECTS["Deployment"]["spec"]["selector"],
        OBJECTS["PodDisruptionBudget"]["spec"]["selector"],
        OBJECTS["NetworkPolicy"]["spec"]["podSelector"],
    ):
        assert selector == {"matchLabels": labels}
    assert OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "octavo"


def test_the_autoscaler_asks_for_a_metric_that_is_exported() -> None:
    [metric] = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    source = (DEPLOY.parent / "server" / "metrics_engine.py", DEPLOY.parent / "server" / "metrics.py")
    exported = "".join(path.read_text() for path in source if path.exists())
    assert metric["pods"]["metric"]["name"].removeprefix("octavo_") in exported


def value_of(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_systemd_takes_the_unit_and_gives_it_the_time_to_end_well(tmp_path: Path) -> None:
    assert value_of("Type") == "notify"
    assert float(value_of("TimeoutStopSec").removesuffix("s")) >= Settings().shutdown_timeout + 6
    arguments = value_of("ExecStart").split()
    assert settings_of(
        [argument for argument in arguments[2:] if argument not in ("--config", "/etc/octavo/octavo.yaml")]
    )
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    unit = tmp_path / "octavo.service"
    unit.write_text(UNIT.replace("/opt/octavo/.venv/bin/octavo", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
