"""The daemon as an operator starts and stops it, on the default model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["--port", "0", "--kv-memory", "64MiB", "--max-model-len", "2048", "--api-key", "secret", "--open-metrics"]

pytestmark = pytest.mark.e2e


class Daemon:
    """`octavo serve`, ready."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", *FLAGS, "--served-model-name", "tiny", "other"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        # A first start compiles the kernels.
        watchdog = threading.Timer(180, self.process.kill)
        watchdog.start()
        self.printed = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if line.startswith("ready in"):
                break
        watchdog.cancel()
        watchdog.join()
        assert self.process.poll() is None, self.printed
        self.url = self.printed.split()[-1]

    def request(self, path: str, body: object = None) -> urllib.request.Request:
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(self.url + path, data, headers)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.request(path), timeout=10) as answer:
            return str(answer.read().decode())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    running = Daemon()
    yield running
    if running.process.poll() is None:
        running.stop()


def test_the_plan_and_every_phase_are_printed(daemon: Daemon) -> None:
    for word in ("SmolLM2-135M-Instruct", "KV pool", "2048 tokens", "--kv-memory 64 MiB", "threads"):
        assert word in daemon.printed
    phases = ("settings", "open model", "imports", "tokenizer", "weights", "KV pool", "first token")
    for phase in phases:
        assert re.search(rf"^  {phase} +\d+\.\d\d s$", daemon.printed, re.MULTILINE), phase
    assert re.search(r"^ready in \d+\.\d s on http://127\.0\.0\.1:\d+$", daemon.printed, re.MULTILINE)


def test_phases_are_a_metric(daemon: Daemon) -> None:
    metrics = daemon.get("/metrics")
    assert 'octavo_startup_seconds{phase="first token"}' in metrics
    ready = float(re.findall(r'octavo_startup_seconds\{phase="ready"\} (\S+)', metrics)[0])
    assert 0 < ready < 180


def test_the_plan_is_served_without_secrets(daemon: Daemon) -> None:
    text = daemon.get("/info")
    info = json.loads(text)
    assert info["plan"]["max_model_len"] == 2048
    assert info["plan"]["kv_bytes"] <= 64 << 20
    assert info["plan"]["reasons"]["max_model_len"] == "as asked"
    assert info["settings"]["max_queued_requests"] == 1024
    assert "secret" not in text


def test_the_model_has_the_names_it_was_given(daemon: Daemon) -> None:
    assert [model["id"] for model in json.loads(daemon.get("/v1/models"))["data"]] == ["tiny", "other"]


def test_the_first_token_left_nothing_behind(daemon: Daemon) -> None:
    assert json.loads(daemon.get("/debug/steps"))["steps"] == []
    assert 'octavo_kv_pages{state="evictable"} 0.0' in daemon.get("/metrics")


def test_memory_is_what_the_plan_says_and_little_more(daemon: Daemon) -> None:
    plan = json.loads(daemon.get("/info"))["plan"]
    resident = psutil.Process(daemon.process.pid).memory_info().rss
    assert resident <= plan["weight_bytes"] + plan["kv_bytes"] + (300 << 20)


def test_the_native_path_reaches_its_first_token_without_torch() -> None:
    code = (
        "import asyncio, sys, time\n"
        "from config.settings import Settings\n"
        "from server.loading import load_model\n"
        "from server.startup import Phases\n"
        "settings = Settings.load({'kv_memory': '16MiB', 'attention_backend': 'cpu'}, {})\n"
        "model = load_model(settings, Phases(time.perf_counter()), lambda plan: None, lambda: None)\n"
        "from models.roofline import roofline\n"
        "from server.wiring import first_token\n"
        "assert roofline(model.runner, model.plan.threads) is not None\n"
        "asyncio.run(first_token(model, settings))\n"
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


@pytest.mark.skipif(not psutil.LINUX, reason="only there a process's libraries are known to others")
def test_no_request_needs_torch(daemon: Daemon) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "logprobs": True}
    for asked in ({}, {"response_format": {"type": "json_object"}}, {"tools": [tool], "tool_choice": "required"}):
        with urllib.request.urlopen(daemon.request("/v1/chat/completions", chat | asked), timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    daemon.get("/metrics")
    libraries = {Path(map.path).name for map in psutil.Process(daemon.process.pid).memory_maps()}
    assert [name for name in libraries if "torch" in name] == []


@pytest.mark.case(48)
def test_a_running_stream_finishes_after_sigterm_and_the_exit_code_is_zero(daemon: Daemon) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    with urllib.request.urlopen(daemon.request("/v1/completions", body), timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        daemon.process.send_signal(signal.SIGTERM)
        rest = answer.read().decode()
    events = [line for line in rest.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest
    assert daemon.stop() == 0
