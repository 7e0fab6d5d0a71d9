"""Servers to measure: start one as a command, wait until it is ready, end it. Knows a server by its URL alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 300.0  # a first start may have kernels to compile and a file to convert
END_SECONDS = 30.0
Trust = ssl.SSLContext | None  # in whose certificates; None: in those that this machine trusts


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers at `url`; `pid` and `ready_seconds` (from its command) when it was started here."""

    url: str
    model: str
    pid: int | None = None
    ready_seconds: float | None = None


def trusting(cafile: Path | None) -> ssl.SSLContext:
    """Whom to trust: the certificates in that file, or whom this machine trusts. Raises ValueError."""
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError:  # ssl.SSLError is one
        raise ValueError(f"--cafile {cafile} is no file of certificates in PEM form") from None


def daemon(flags: Sequence[str]) -> contextlib.AbstractContextManager[Server]:
    """Octavo on a free port for as long as the block lasts. Raises RuntimeError when it does not get ready.

    It logs warnings only, unless `flags` want more: a line for each request would stand between those of the client.
    """
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--log-level", "warning", *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return started("the daemon", command, port, "/ready")


def serving(
    url: str | None, flags: Sequence[str], keys: Sequence[str] = (), model: str | None = None, tls: Trust = None
) -> contextlib.AbstractContextManager[Server]:
    """The server at `url`, or without one the daemon."""
    if url is None:
        return daemon(flags)
    return contextlib.nullcontext(Server(url, model or first_model(url, keys, tls)))


@contextmanager
def started(
    name: str,
    command: Sequence[str],
    port: int,
    ready_path: str,
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """A server's process for as long as the block lasts, once `ready_path` answers 200.

    What it prints goes to `log`, or is shown. Raises RuntimeError when it does not get ready or does not last. Main
    thread only: SIGTERM leaves the block by SystemExit, so that no server is left behind.
    """
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with contextlib.ExitStack() as files:
        output = None if log is None else files.enter_context(log.open("wb"))
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        # A group of its own: some servers leave processes behind when their first one ends.
        process = subprocess.Popen(
            command, env=os.environ | dict(environment or {}), stdout=output, stderr=output, start_new_session=True
        )
        try:
            while not answers(url + ready_path):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended with exit code {process.returncode} before it was ready{_see(log)}"
                    )
                if time.monotonic() - began > START_SECONDS:
                    raise RuntimeError(f"{name} was not ready after {START_SECONDS:.0f} s{_see(log)}")
                time.sleep(0.05)
            ready_seconds = time.monotonic() - began
            yield Server(url, first_model(url), process.pid, ready_seconds)
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with exit code {process.returncode} while it was measured{_see(log)}")
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    """Whether a GET there is answered 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def get_json(url: str, keys: Sequence[str] = (), tls: Trust = None) -> Any:
    """The JSON there, asked for with the first of `keys`; None when there is none. Raises SSLCertVerificationError."""
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5, context=tls) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        if isinstance(reason := getattr(error, "reason", None), ssl.SSLCertVerificationError):
            raise reason from None
        return None


def metrics_of(server: Server) -> str:
    """What Prometheus would read there. Raises OSError."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        return str(answer.read().decode())


def first_model(url: str, keys: Sequence[str] = (), tls: Trust = None) -> str:
    """The first model a server lists. Raises RuntimeError when it lists none, or does not say so; as `get_json`."""
    models = get_json(f"{url}/v1/models", keys, tls)
    if models is None:
        raise RuntimeError(f"{url}/v1/models gives no list: is it there, and has it its key?")
    if not isinstance(models, dict) or not models.get("data"):
        raise RuntimeError(f"{url} lists no models")
    return str(models["data"][0]["id"])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _see(log: Path | None) -> str:
    return "" if log is None else f"; see {log}"
