"""A daemon under watch: what it holds, whether it is idle, and whether it still answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

IDLE = ("octavo_requests_running", "octavo_requests_waiting", 'octavo_kv_pages{state="used"}')
START_SECONDS = 180  # a first start compiles the kernels
IDLE_SECONDS = 20
QUESTION = {"prompt": "The capital of France is the city of", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory: int  # resident bytes
    descriptors: int
    threads: int
    series: int

    def row(self) -> str:
        return f"{self.memory >> 20:7} MiB {self.descriptors:5} {self.threads:5} {self.series:5}"


class Watched:
    """A running daemon."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self.process = process
        self._inside = psutil.Process(process.pid)
        self.model = json.loads(self._get("/v1/models"))["data"][0]["id"]
        self.answer = self.ask()

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def break_next(self, fault: str) -> None:
        """See `faulty.py`."""
        pipe: IO[str] | None = self.process.stdin
        assert pipe is not None
        pipe.write(fault + "\n")
        pipe.flush()

    def ask(self) -> str:
        """The text of a plain greedy request, which must be answered."""
        body = json.dumps({"model": self.model, **QUESTION}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def held(self) -> Held:
        series = sum(not line.startswith("#") for line in self._get("/metrics").splitlines())
        inside = self._inside
        descriptors = []
        for _ in range(5):  # the connections just used may take a moment to close
            time.sleep(0.1)
            descriptors.append(inside.num_fds())
        return Held(inside.memory_info().rss, min(descriptors), inside.num_threads(), series)

    def metric(self, name: str) -> float:
        """One sample; -1 when it is not there."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else -1.0

    def gauges(self) -> dict[str, float]:
        return {name: self.metric(name) for name in IDLE}

    def complaint(self) -> str | None:
        """What is not as it was: the plain answer, readiness, or a gauge that does not come back to zero."""
        try:
            if (text := self.ask()) != self.answer:
                return f"the plain request was answered {text!r} instead of {self.answer!r}"
            self._get("/ready")
            deadline = time.monotonic() + IDLE_SECONDS
            while any((gauges := self.gauges()).values()):
                if time.monotonic() > deadline:
                    return f"not idle: {gauges}"
                time.sleep(0.05)
        except OSError as error:
            return f"the plain request failed: {error}; exit code {self.process.poll()}"
        return None


@contextmanager
def watched(flags: Sequence[str]) -> Iterator[Watched]:
    """The daemon that can be made to fail, for as long as the block lasts. Raises RuntimeError."""
    program = str(Path(__file__).with_name("faulty.py"))
    command = [sys.executable, program, "serve", "--port", "0", "--open-metrics", *flags]
    log = Path(tempfile.gettempdir()) / "octavo-soak.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    assert process.stdout is not None
    last = next((line for line in process.stdout if line.startswith("ready in")), None)
    timer.cancel()
    try:
        if last is None:
            raise RuntimeError(f"the daemon did not start: exit code {process.wait()}; see {log}")
        yield Watched(process, last.split()[-1])
        process.terminate()
        if code := process.wait(timeout=60):
            raise RuntimeError(f"the daemon ended with exit code {code}; see {log}")
    finally:
        process.kill()
        process.wait()
