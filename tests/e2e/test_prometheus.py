"""The real Prometheus scrapes the real daemon under a little load, with what deploy/ gives it; and what the same load
leaves in the log and at a collector of traces."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.otlp import Collector, collecting
from support.prometheus import ALERTS, CONFIG, DASHBOARD, DEPLOY, PANELS, program

from loadtest.servers import Server, answers, free_port, metrics_of, started

pytestmark = pytest.mark.e2e

WORDS = (Path(__file__).parents[1] / "data" / "page.txt").read_text().split()
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}


@dataclass
class Scene:
    """A daemon with work to do and those who watch it."""

    server: Server
    prometheus: str
    collector: Collector
    log: Path

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now."""
        response = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expression}, timeout=20)
        assert response.status_code == 200, response.text
        return list(response.json()["data"]["result"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    binary, folder, port = program("prometheus"), tmp_path_factory.mktemp("prometheus"), free_port()
    log = folder / "daemon.log"
    flags = ["--kv-memory", "64MiB", "--max-model-len", "1024", "--metrics-compat", "vllm", "--log-format", "json"]
    with collecting() as collector:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
        command += ["--otlp-endpoint", collector.url]
        command += ["--speculative-config", json.dumps({"method": "ngram", "adaptive": False})]
        with (
            started("the daemon", command, port, "/ready", log=log) as server,
            load(server),
            prometheus(binary, folder, f"127.0.0.1:{port}") as url,
        ):
            yield Scene(server, url, collector, log)


@contextmanager
def prometheus(binary: str, folder: Path, target: str) -> Iterator[str]:
    """Prometheus with the configuration of deploy/, but for what it scrapes and how often."""
    scrape = {**CONFIG["scrape_configs"][0], "static_configs": [{"targets": [target]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / file) for file in CONFIG["rule_files"]],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "prometheus.log").open("wb") as log:
        command = [binary, *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """A few clients of every kind, until the block ends."""
    done = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not done.is_set():
                size = {"model": server.model, "max_tokens": rng.randrange(2, 24)}
                prompt = " ".join(WORDS[: rng.randrange(10, 90)])
                message = [{"role": "user", "content": prompt}]
                schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
                http.post("/v1/completions", json={**size, "prompt": prompt})
                http.post("/v1/chat/completions", json={**size, "messages": message, "response_format": schema})
                http.post("/v1/completions", json={**size, "prompt": prompt, "temperature": -1})

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(client, number) for number in range(3)]
        try:
            yield
        finally:
            done.set()
    for future in futures:
        future.result()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)


@pytest.mark.parametrize("expression", TARGETS)
def test_every_panel_shows_numbers(scene: Scene, expression: str) -> None:
    expression = expression.replace("$__rate_interval", "10s").replace("$instance", ".*")
    assert "$" not in expression
    if "octavo_roofline" in expression and "octavo_roofline" not in metrics_of(scene.server):
        pytest.skip("the machine was too busy at the start for its ceilings")

    def shown() -> bool:
        samples = scene.query(expression)
        return bool(samples) and all(math.isfinite(float(sample["value"][1])) for sample in samples)

    wait_until(shown)


def test_what_speculation_gives_is_seen(scene: Scene) -> None:
    wait_until(lambda: bool(scene.query("octavo_spec_accepted_tokens_total > 0")))
    [series] = scene.query('octavo_spec_drafted_tokens_total{position="1"}')
    assert series["metric"]["proposer"] == "ngram"


def test_the_choice_of_instance_offers_the_daemon(scene: Scene) -> None:
    [variable] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "instance"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert found
    assert [series["metric"][found[2]] for series in scene.query(found[1])] == [
        scene.server.url.removeprefix("http://")
    ]


def test_every_alert_is_evaluated_over_series_that_exist(scene: Scene) -> None:
    def rules() -> list[dict[str, Any]]:
        [group] = httpx.get(f"{scene.prometheus}/api/v1/rules", timeout=20).json()["data"]["groups"]
        return list(group["rules"])

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert [(rule["name"], rule["health"]) for rule in rules()] == [(rule["alert"], "ok") for rule in ALERTS]
    silent = {"OctavoDown", "OctavoUnhealthy", "OctavoStalled", "OctavoRestarting", "OctavoStepErrors", "OctavoErrors"}
    assert all(rule["state"] == "inactive" for rule in rules() if rule["name"] in silent)
    names = {name for rule in ALERTS for name in re.findall(r"\b(?:octavo|process)_\w+|\bup\b", rule["expr"])}
    assert len(names) > 10
    assert [name for name in sorted(names) if not scene.query(f'{name}{{job="octavo"}}')] == []


def test_a_dashboard_made_for_vllm_shows_numbers(scene: Scene) -> None:
    selector = f'{{model_name=~"{scene.server.model}"}}'
    for expression in (
        f"histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{selector}[10s])))",
        f"rate(vllm:generation_tokens_total{selector}[10s])",
        f"sum by(finished_reason) (increase(vllm:request_success_total{selector}[10s]))",
        f"rate(vllm:request_prefill_time_seconds_sum{selector}[10s])",
        f"vllm:kv_cache_usage_perc{selector}",
    ):
        wait_until(lambda expression=expression: bool(scene.query(expression)))  # type: ignore[misc]


def test_the_log_is_an_object_a_line_with_the_requests_and_without_their_words(scene: Scene) -> None:
    text = scene.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert scene.server.url in lines[0]["url"]
    requests = [line for line in lines if line["logger"] == "octavo.requests"]
    assert {line["status"] for line in requests} == {200, 400}
    assert all(line["request_id"].startswith("req-") and line["seconds"] > 0 for line in requests)
    assert sum(line.get("output_tokens", 0) for line in requests) > 0
    assert " ".join(WORDS[:3]) not in text


def test_the_collector_gets_a_span_for_each_request(scene: Scene) -> None:
    wait_until(lambda: len(scene.collector.spans) > 5)
    assert {span.name for span in scene.collector.spans} == {"POST /v1/completions", "POST /v1/chat/completions"}
