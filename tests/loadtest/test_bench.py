"""The benchmark's own parts: what it is told, what it prints and what it keeps."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.certificate import self_signed

from config.flags import Parser, add_settings
from config.settings import Settings
from loadtest import bench, overload, run, servers
from loadtest.bench import STANDARD, main
from loadtest.figures import Answer, Figures, summarise
from loadtest.run import How, Run, measure
from loadtest.servers import Server


class Fake(BaseHTTPRequestHandler):
    """Answers every completion with as many tokens as were asked for."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        pages = {"/v1/models": {"data": [{"id": "fake"}]}, "/info": {"plan": {"weight_bytes": 1, "kv_bytes": 1 << 40}}}
        pages["/health"] = {}
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
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_set_of_a_running_server_is_measured_and_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([url, "decode:4:2", "prefill:3:3"]) == 0
    [path] = tmp_path.glob("*.json")
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
    assert main([url, "--model", "other", "prefill:2:1"]) == 1
    assert "prefill: 2 failed: HTTP 404: no such model" in capsys.readouterr().out


def test_a_page_of_the_run_stands_beside_its_figures_and_needs_nothing_else(url: str, tmp_path: Path) -> None:
    assert main([url, "decode:4:2", "--slo", "ttft=5000", "--api-key", "a secret"]) == 0
    [path] = tmp_path.glob("*.html")
    page = path.read_text()
    assert page.count("<svg") >= 2
    assert "within the SLO</td><td>100.0%" in page
    assert "time to first token" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert not any("a secret" in file.read_text() for file in tmp_path.iterdir())


def test_requests_come_at_a_rate_of_their_own(url: str, tmp_path: Path) -> None:
    assert main([url, "prefill:20", "--rate", "100", "--arrivals", "constant"]) == 0
    [path] = tmp_path.glob("*.json")
    [figures] = json.loads(path.read_text())["figures"]
    assert (figures["rate"], figures["concurrency"], figures["wall_seconds"] > 0.19) == (100, 0, True)
    assert figures["details"]["at"] == pytest.approx([place / 100 for place in range(20)], abs=1e-3)


def test_a_line_tells_how_it_goes_while_it_goes(url: str) -> None:
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "REFRESH_SECONDS", 0.01)
        measure(Server(url, "fake"), Run("prefill", 30), 1, How(rate=100), console)
    assert re.search(r"prefill.*\d+/30 .* running, 0 failed, .* tok/s", console.export_text())


def test_a_set_without_rate_or_number_at_once_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url, "chat:4"]) == 2
    assert "needs a third number" in capsys.readouterr().out
    assert main([url, "chat:4", "--rate", "0"]) == 2
    assert "above zero" in capsys.readouterr().out


def test_a_file_of_conversations_is_driven(url: str, tmp_path: Path) -> None:
    turns = [("human", "Hello"), ("gpt", "one two three"), ("human", "More"), ("gpt", "four")]
    path = tmp_path / "talk.txt"
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in turns]}]))
    assert main([url, "sharegpt:9:2", "--file", str(path)]) == 0
    [kept] = tmp_path.glob("*.json")
    assert json.loads(kept.read_text())["figures"][0]["requests"] == 2


def test_two_runs_are_compared(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url, "decode:8:2"]) == 0
    [path] = map(str, tmp_path.glob("*.json"))
    capsys.readouterr()
    assert main(["--compare", path, path]) == 0
    printed = capsys.readouterr().out
    assert "ttft p50 ms" in printed
    assert "no difference shown" in printed
    assert "later" not in printed
    other = tmp_path / "other"
    for text in "[]", "{}", "no JSON":
        other.write_text(text)
        assert main(["--compare", path, str(other)]) == 2
        assert capsys.readouterr().out == f"loadtest: {other} has no figures of a load test\n"


def test_memory_of_a_daemon_is_told_by_what_is_in_it(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Server(url, "fake", os.getpid(), 1.0)
    monkeypatch.setattr(bench, "serving", lambda *_: nullcontext(here))
    assert main(["prefill:2:1"]) == 0
    # A pool larger than what is resident: its pages are there once they are used.
    line = r"^resident \d+ MiB: weights 0, of the KV pool's 1048576 what was used$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_the_capacity_is_searched_and_drawn(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates: list[float] = []

    def measure(server: Server, run: Run, seed: int, how: How, _: object) -> tuple[Figures, list[Answer]]:
        assert how.rate is not None
        rates.append(how.rate)
        answers = [Answer(0.0, 200, [0.1], ended=0.1) for _ in range(run.requests)]
        figures = summarise(run.kind, 0, answers, 1.0, slo=how.slo, rate=how.rate)
        return replace(figures, within_slo=1.0 if how.rate <= 5 else 0.5), answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure", measure)
        assert main([url, "chat:50", "--find-capacity", "--slo", "ttft=500", "--rate", "2"]) == 0
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["capacity"] == pytest.approx(5, rel=0.05)
    assert rates[:3] == [2, 4, 8]
    assert "too few" in capsys.readouterr().out
    assert "keep the objective" in path.with_suffix(".html").read_text()
    assert main([url, "chat:50", "--find-capacity"]) == 2


@pytest.mark.parametrize("words", ["nonsense:1:1", "sharegpt:1:1 --file none.json", "--compare none none"])
def test_a_mistake_is_one_line_and_exit_code_two(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url, *words.split()]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("loadtest: ")


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--slo", "foo=3", "argument --slo: must be milliseconds like ttft=500,tpot=50,e2e=10000, not 'foo=3'"),
        ("--fields", "{", "argument --fields: must be a JSON object such as {\"top_p\": 0.9}, not '{'"),
        ("--fields", "[1]", "argument --fields: must be a JSON object such as {\"top_p\": 0.9}, not '[1]'"),
        ("--arrivals", "often", "'often' is none of poisson, constant, burst:SIZE and ramp:RATE"),
        ("--rate", "nan", "argument --rate: must be a number above zero, not 'nan'"),
        ("--timeout", "0", "argument --timeout: must be a number above zero, not '0'"),
        ("--leave", "3", "argument --leave: must be a share from 0 to 1, not '3'"),
        ("--leave", "-0.1", "argument --leave: must be a share from 0 to 1, not '-0.1'"),
        ("--trial", "x", "argument --trial: must be a number above zero, not 'x'"),
    ],
)
def test_a_value_that_cannot_be_is_a_line_that_says_what_can(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http://127.0.0.1:1", flag, value]) == 2
    assert capsys.readouterr().out == f"loadtest: {says}\n"


NOBODY = "loadtest: http://127.0.0.1:1/v1/models gives no list: is it there, and has it its key?\n"


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == NOBODY


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server that nobody trusts, and its certificate."""
    cert, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}", cert
        server.shutdown()
        thread.join()


UNTRUSTED = "the server's certificate is not trusted (self-signed certificate): give its own as --cafile\n"


def test_a_server_that_signed_its_own_certificate_is_trusted_when_told_to(
    url: str, secure: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, cert = secure
    for model in [], ["--model", "fake"]:
        assert main([server, "prefill:4:2", *model]) == 1
        assert capsys.readouterr().out.endswith(f"loadtest: {UNTRUSTED}")
    assert main([server, "prefill:4:2", "--cafile", str(cert)]) == 0
    capsys.readouterr()
    for file in tmp_path / "key.pem", tmp_path / "none":
        assert main([url, "--cafile", str(file)]) == 2
        assert capsys.readouterr().out == f"loadtest: --cafile {file} is no file of certificates in PEM form\n"


def test_an_overload_of_such_a_server_too(
    secure: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, cert = secure
    quick = [server, "--kind", "prefill", "--slots", "2", "--seconds", "0.2"]
    assert overload.main(["--url", *quick]) == 1
    assert capsys.readouterr().out == f"overload: {UNTRUSTED}"
    assert overload.main(["--url", *quick, "--cafile", str(tmp_path / "none")]) == 1
    assert "none is no file of certificates in PEM form" in capsys.readouterr().out
    monkeypatch.setattr(overload, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(overload, "_probed", lambda *_: nullcontext([(0.001, 0)] * 4))
    overload.main(["--url", *quick, "--cafile", str(cert)])  # whatever the fake one promises
    assert "kept   answers that failed, none: 0" in capsys.readouterr().out
    command = [sys.executable, "-m", "loadtest.overload", "--probe", server, "0", "--cafile", str(cert)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        took, rss = probe.stdout.readline().split()
        probe.terminate()
    assert (0 < float(took) < 30, rss) == (True, "0")


def test_an_overload_of_a_server_with_keys_whose_probe_saw_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Fake._answer

    def locked(self: Fake, status: int, content: bytes) -> None:
        answer(self, status if self.headers["Authorization"] == "Bearer k" else 401, content)

    monkeypatch.setattr(Fake, "_answer", locked)
    monkeypatch.setattr(overload, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(overload, "_probed", lambda *_: nullcontext([]))
    quick = ["--url", url, "--kind", "prefill", "--slots", "2", "--seconds", "0.01"]
    assert overload.main([*quick, "--api-key", "k"]) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["full load"]["failed"] == 0
    for promise in ("/health p99", "memory grown"):
        assert f"BROKEN {promise}" in printed


def test_an_overload_of_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert overload.main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == NOBODY.replace("loadtest", "overload")


def test_it_is_a_command_of_octavo() -> None:
    command = [sys.executable, "-m", "server.cli", "loadtest", "http://127.0.0.1:1", "chat:1:1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, NOBODY)


def test_a_daemon_that_does_not_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve", "--kv-memory x"]) == 1
    assert "ended with exit code 2" in capsys.readouterr().out


def test_a_load_test_that_is_told_to_end_takes_its_daemon_along() -> None:
    command = [sys.executable, "-m", "loadtest.bench", "decode:400:2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        while b"decode: 400 requests" not in process.stdout.readline():
            assert process.poll() is None
        [daemon] = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not daemon.is_running()


def test_a_daemon_of_its_own_logs_no_request_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(servers, "started", lambda _, command, *__: commands.append(command))
    for flags in [], ["model.gguf", "--log-level", "info"]:
        servers.daemon(flags)
    parser = Parser()
    add_settings(parser)
    levels = [Settings.load(vars(parser.parse_args(command[4:])), {}).log_level for command in commands]
    assert levels == ["warning", "info"]


def test_the_standard_sets_are_well_formed() -> None:
    assert [Run.parse(text).kind for text in STANDARD] == ["single", "decode", "chat", "prefix", "prefill", "long"]


@pytest.mark.parametrize("text", ["chat", "chat:0:1", "chat:a:1", "nonsense:1:1", "chat:1:1:1"])
def test_a_set_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        Run.parse(text)
