"""The benchmark's own parts: what it is told, what it prints and what it keeps."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest import bench
from loadtest.bench import STANDARD, Run, main


class Fake(BaseHTTPRequestHandler):
    """Answers every completion with as many tokens as were asked for."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        pages = {"/v1/models": {"data": [{"id": "fake"}]}, "/info": {"plan": {"weight_bytes": 1, "kv_bytes": 2}}}
        self._answer(200 if self.path in pages else 404, json.dumps(pages.get(self.path)).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "fake":
            return self._answer(404, b"no such model")
        count = body["max_tokens"]
        events = [{"choices": [{"text": "a"}]}] * count
        events.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}})
        content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        return self._answer(200, content + b"data: [DONE]\n\n")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_set_of_a_running_server_is_measured_and_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", url, "decode:4:2", "prefill:3:3"]) == 0
    [path] = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    assert kept["model"] == "fake"
    assert [(row["kind"], row["requests"], row["failed"]) for row in kept["figures"]] == [
        ("decode", 4, 0),
        ("prefill", 3, 0),
    ]
    assert kept["figures"][0]["completion_tokens"] == 4 * 256
    assert kept["figures"][1]["prompt_tokens"] == 30
    printed = capsys.readouterr().out
    assert "TTFT p50" in printed
    assert "decode" in printed


def test_a_failed_request_makes_the_benchmark_fail(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, "--model", "other", "prefill:2:1"]) == 1
    assert "prefill: 2 failed: HTTP 404: no such model" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == "bench: http://127.0.0.1:1 lists no models\n"


def test_a_daemon_that_does_not_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve", "--kv-memory x"]) == 1
    assert "ended with exit code 2" in capsys.readouterr().out


def test_the_standard_sets_are_well_formed() -> None:
    assert [Run.parse(text).kind for text in STANDARD] == ["single", "decode", "chat", "prefix", "prefill", "long"]


@pytest.mark.parametrize("text", ["chat", "chat:1", "chat:0:1", "chat:a:1", "nonsense:1:1", "chat:1:1:1"])
def test_a_set_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        Run.parse(text)
