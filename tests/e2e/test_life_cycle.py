"""The real daemon from its start to each of its ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificate import self_signed

from server.cli import main

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
SMALL = ("--port", "0", "--kv-memory", "64MiB", "--max-model-len", "2048")
LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}

# The daemon with a fault: a prompt of 13 tokens makes steps hang, or fail.
FAULTY = """
import sys, time
import server.wiring as wiring
from server.cli import main
from server.loading import Model

class Faulty:
    def __init__(self, runner): self.__dict__["runner"] = runner
    def __getattr__(self, name):
        if name == "start": raise AttributeError(name)  # so that steps go through run
        return getattr(self.runner, name)
    def __setattr__(self, name, value): setattr(self.runner, name, value)
    def run(self, batch):
        if len(batch.token_ids) == 13 or getattr(self.runner, "broken", False):
            self.runner.broken = True
            {fault}
        return self.runner.run(batch)

make_engine = wiring.make_engine
def faulty_engine(model, *rest, **more):
    from dataclasses import replace
    return make_engine(replace(model, runner=Faulty(model.runner)), *rest, **more)
wiring.make_engine = faulty_engine
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Daemon:
    """A process that prints when it is ready."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        killer = threading.Timer(180, self.process.kill)  # a first start compiles the kernels
        killer.start()
        for line in self.process.stdout:
            if line.startswith("ready in"):
                self.url = line.split()[-1]
                break
        killer.cancel()
        killer.join()
        assert self.url, self.log.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30) -> int:
        return self.process.wait(timeout=seconds)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10, **options)


@contextlib.contextmanager
def started(tmp_path: Path, *flags: str, fault: str | None = None, **environment: str) -> Iterator[Daemon]:
    log = tmp_path / "stderr"
    program = ["-m", "server.cli"] if fault is None else ["-c", FAULTY.replace("{fault}", fault)]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *SMALL, *flags],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield Daemon(process, log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Streams:
    """Long answers being read, each in a thread. Made once the daemon has them all and one of them has begun."""

    def __init__(self, daemon: Daemon, count: int, **fields: Any) -> None:
        self.events: list[list[str]] = [[] for _ in range(count)]
        self._body = LONG | fields
        self._threads = [threading.Thread(target=self._read, args=(daemon, events)) for events in self.events]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 60
        while not any(self.events) or self._held(daemon) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @staticmethod
    def _held(daemon: Daemon) -> int:
        """Requests that run or wait."""
        lines = [line.rsplit(" ", 1) for line in daemon.get("/metrics").text.splitlines()]
        return sum(
            int(float(value)) for name, value in lines if re.match("octavo_requests_(running|waiting)($|{)", name)
        )

    def _read(self, daemon: Daemon, events: list[str]) -> None:
        with httpx.stream("POST", daemon.url + "/v1/completions", json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))

    def ends(self) -> list[str]:
        """The last event of each."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return [events[-1] for events in self.events]


def code_of(event: str) -> str:
    return str(json.loads(event)["error"]["code"])


@pytest.mark.case(48)
def test_sigterm_lets_answers_finish_while_new_ones_are_refused(tmp_path: Path) -> None:
    with started(tmp_path, "--max-num-seqs", "20", "--kv-memory", "256MiB") as daemon:
        daemon.wait_until_ready()
        streams = Streams(daemon, 26, max_tokens=30)  # six of them wait
        daemon.signal(signal.SIGTERM)
        refused = []
        with contextlib.suppress(httpx.TransportError):  # once it has ended
            while True:
                ready = daemon.get("/ready")
                if ready.status_code == 503:
                    assert ready.headers["retry-after"]
                    refused.append(httpx.post(daemon.url + "/v1/completions", json=LONG, timeout=10))
                time.sleep(0.05)
        assert refused
        assert {response.status_code for response in refused} == {503}
        assert streams.ends() == ["[DONE]"] * 26
        assert daemon.end() == 0
        assert "Traceback" not in daemon.log.read_text()


@pytest.mark.case(48)
def test_after_the_grace_answers_end_with_an_error_event(tmp_path: Path) -> None:
    with started(tmp_path, "--shutdown-timeout", "0.5", "--max-num-seqs", "2") as daemon:
        daemon.wait_until_ready()
        streams = Streams(daemon, 4)
        with socket.create_connection(("127.0.0.1", httpx.URL(daemon.url).port or 0)) as stalled:
            body = json.dumps(LONG).encode()
            stalled.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            daemon.signal(signal.SIGINT)
            assert [code_of(event) for event in streams.ends()] == ["service_unavailable"] * 4
            assert daemon.end() == 0
        assert "Traceback" not in daemon.log.read_text()


@pytest.mark.case(48)
def test_a_second_signal_is_quick_and_quiet(tmp_path: Path) -> None:
    with started(tmp_path) as daemon:
        daemon.wait_until_ready()
        streams = Streams(daemon, 3)
        daemon.signal(signal.SIGTERM)
        while daemon.get("/ready").status_code == 200:
            time.sleep(0.01)
        daemon.signal(signal.SIGTERM)
        assert daemon.end(seconds=5) == 0
        assert [code_of(event) for event in streams.ends()] == ["service_unavailable"] * 3
        log = daemon.log.read_text()
        assert "Traceback" not in log
        assert "Error" not in log


@pytest.mark.case(48)
def test_a_signal_while_the_model_loads_ends_it_at_once(tmp_path: Path) -> None:
    with started(tmp_path) as daemon:
        assert daemon.process.stdout is not None
        daemon.process.stdout.readline()
        daemon.signal(signal.SIGTERM)
        assert daemon.end(seconds=5) == -signal.SIGTERM
        assert daemon.log.read_text() == ""


def test_without_a_compiler_the_daemon_serves_and_says_with_what(tmp_path: Path) -> None:
    flags = ("--kv-cache-dtype", "bfloat16", "--cache-dir", str(tmp_path / "cache"))
    with started(tmp_path, *flags, CXX="/bin/false") as daemon:
        daemon.wait_until_ready()
        plan = daemon.get("/info").json()["plan"]
        assert (plan["attention_backend"], plan["quantization"], plan["speculation"]) == ("torch", "none", None)
        metrics = daemon.get("/metrics").text
        assert re.search('octavo_model_info{.*attention_backend="torch".*quantization="none"', metrics)
        log = daemon.log.read_text()
        assert "the plan without the CPU kernels: weights none; attention torch; " in log
        assert "; speculation none\n" in log


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only there a process's limits are known to others")
def test_idle_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with started(tmp_path) as daemon, contextlib.ExitStack() as idle:
            daemon.wait_until_ready()
            assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (64, 64))
            address = ("127.0.0.1", httpx.URL(daemon.url).port or 0)
            used = idle.enter_context(httpx.Client(base_url=daemon.url))
            streams = Streams(daemon, 1, max_tokens=300)
            for _ in range(4):
                for _ in range(30):
                    idle.enter_context(socket.create_connection(address))
                    time.sleep(0.002)
                assert daemon.get("/health").status_code == used.get("/health").status_code == 200
            assert streams.ends() == ["[DONE]"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_was_paused_is_not_taken_for_stuck(tmp_path: Path) -> None:
    with started(tmp_path, "--step-timeout", "2") as daemon:
        daemon.wait_until_ready()
        daemon.signal(signal.SIGSTOP)
        time.sleep(3)
        daemon.signal(signal.SIGCONT)
        time.sleep(1.5)
        assert daemon.get("/ready").status_code == 200
        daemon.signal(signal.SIGTERM)
        assert daemon.end() == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls_keys_reloaded_on_sighup_and_what_systemd_is_told(
    tmp_path: Path, certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.yaml"

    def new(name: str) -> dict[str, str]:
        assert main(["keys", "new", name, "--file", str(keys)]) == 0
        return {"authorization": f"Bearer {capsys.readouterr().out.strip()}"}

    alice = new("alice")
    flags = ["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--api-key-file", str(keys)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        with started(tmp_path, *flags, NOTIFY_SOCKET=str(tmp_path / "notify")) as daemon:
            assert daemon.process.stdout is not None
            daemon.process.stdout.readline()
            early = new("early")
            daemon.signal(signal.SIGHUP)  # while the model loads
            daemon.wait_until_ready()
            assert daemon.url.startswith("https://127.0.0.1:")
            heard = {systemd.recv(100) for _ in range(3)}
            assert heard == {b"READY=1", b"WATCHDOG=1"}
            trusted = ssl.create_default_context(cafile=str(certificate[0]))
            for known in alice, early:
                assert daemon.get("/v1/models", headers=known, verify=trusted).status_code == 200
            assert daemon.get("/v1/models", verify=trusted).status_code == 401
            bob = new("bob")
            daemon.signal(signal.SIGHUP)
            deadline = time.monotonic() + 10
            while daemon.get("/v1/models", headers=bob, verify=trusted).status_code != 200:
                assert time.monotonic() < deadline
            show = ["cache", "show", "--url", daemon.url, "--admin-api-key", bob["authorization"].split()[1]]
            assert main(show) == 1
            said = capsys.readouterr().err
            assert said.endswith("certificate is not trusted (self-signed certificate): give its own as --cafile\n")
            assert main([*show, "--cafile", str(certificate[0])]) == 0
            daemon.signal(signal.SIGTERM)
            assert daemon.end() == 0
            while systemd.recv(100) != b"STOPPING=1":
                pass


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ssl-keyfile", "key.pem"], "needs --ssl-certfile"),
        (["--ssl-certfile", "nothing.pem"], "no such file"),
        (["--api-key-file", "nothing.yaml"], "no such file"),
    ],
)
def test_files_that_cannot_be_used_are_a_mistake_found_at_once(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.case(38)
def test_a_step_that_does_not_end_turns_ready_red_then_ends_the_process(tmp_path: Path) -> None:
    with started(tmp_path, "--step-timeout", "4", fault="time.sleep(60)") as daemon:
        daemon.wait_until_ready()
        streams = Streams(daemon, 1)
        answers: list[httpx.Response] = []
        wedging = {"model": MODEL, "prompt": [5] * 12, "max_tokens": 5}  # beside the one that runs: 13 rows
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(daemon.url + "/v1/completions", json=wedging, timeout=60))
        )
        client.start()
        deadline = time.monotonic() + 20
        while (ready := daemon.get("/ready")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "stalled" in ready.json()["error"]["message"]
        assert daemon.get("/health").status_code == 200, "the process still answers"
        assert daemon.end() == 1
        client.join(10)
        assert [code_of(event) for event in streams.ends()] == ["service_unavailable"]
        assert answers[0].status_code == 503
        log = daemon.log.read_text()
        assert "no step has ended" in log
        assert "in run" in log, "the stack of the model's thread"


@pytest.mark.case(38)
def test_an_engine_that_gives_up_ends_the_process(tmp_path: Path) -> None:
    with started(tmp_path, fault='raise RuntimeError("broken")') as daemon:
        daemon.wait_until_ready()
        asked = [
            httpx.post(daemon.url + "/v1/completions", json=LONG | {"prompt": [5] * 13, "stream": False}, timeout=60)
            for _ in range(3)
        ]
        assert [response.status_code for response in asked] == [500] * 3
        assert daemon.end() == 1
        assert "has given up: 3 steps in a row failed" in daemon.log.read_text()
