"""One line for each request, for people or for machines, and nobody's words in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.keys import digest
from server.logs import JSONFormatter, TextFormatter

SECRET = "xylophone"


class Log:
    """What the root logger has written since."""

    def __init__(self) -> None:
        self.handler = logging.StreamHandler(io.StringIO())

    @property
    def text(self) -> str:
        return str(self.handler.stream.getvalue())

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request_id: str) -> dict[str, Any]:
        [line] = [line for line in self.lines if line.get("request_id") == request_id and "status" in line]
        return line


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    log.handler.setFormatter(JSONFormatter())
    log.handler.addFilter(lambda record: not record.name.startswith(("httpx", "uvicorn")))  # the clients here, and more
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(log.handler)
    root.setLevel(logging.INFO)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(level)


def test_a_request_is_one_line_that_says_who_it_was_and_what_it_took(server: Any, log: Log) -> None:
    path, body = "/v1/completions", {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    answer = server.http.post(path, json=body, headers={"x-request-id": "mine"}).json()
    server.wait_until(lambda: bool(log.lines))
    line = log.of("mine")
    assert (line["level"], line["message"], line["status"]) == ("info", "POST '/v1/completions'", 200)
    assert (line["ids"], line["outcome"]) == (answer["id"], "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 4)
    parts = [line[f"{part}_seconds"] for part in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= line["seconds"] + 1e-5
    assert line["time"].endswith("+00:00")


def test_refusals_and_failures_say_their_code(server: Any, log: Log) -> None:
    server.error(server.http.post("/v1/completions", json={}, headers={"x-request-id": "refused"}), 400)
    server.runner.broken = RuntimeError("broken")
    body = {"model": server.model, "prompt": SECRET}
    server.error(server.http.post("/v1/completions", json=body, headers={"x-request-id": "failed"}), 500)
    server.http.get("/nothing", headers={"x-request-id": "lost"})
    server.http.get("/health", headers={"x-request-id": "probe"})
    server.wait_until(lambda: "lost" in log.text)
    assert (log.of("refused")["status"], log.of("refused")["error"]) == (400, "missing_required_parameter")
    assert (log.of("failed")["status"], log.of("failed")["error"]) == (500, "internal_error")
    assert (log.of("lost")["status"], log.of("lost")["error"]) == (404, "not_found")
    assert "probe" not in log.text
    assert any("RuntimeError" in line.get("exception", "") for line in log.lines)
    assert SECRET not in log.text


def test_no_words_of_a_client_are_logged(server: Any, log: Log) -> None:
    server.script(f"Say {SECRET}", f"{SECRET} indeed")
    assert SECRET in server.complete(f"Say {SECRET}")["choices"][0]["text"]
    server.chat(SECRET, tools=[{"type": "function", "function": {"name": SECRET}}], tool_choice="none")
    server.events("/v1/chat/completions", messages=[{"role": "user", "content": SECRET}], max_tokens=3)
    server.post(prompt=[SECRET])
    server.post(prompt=SECRET, temperature=SECRET)
    server.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode())
    server.wait_until(lambda: len(log.lines) >= 6)
    assert SECRET not in log.text


def test_prompts_are_logged_for_who_asks(serving: Any, log: Log) -> None:
    with serving(log_prompts=True) as server:
        server.complete(f"Say {SECRET}", max_tokens=1)
        server.wait_until(lambda: bool(log.lines))
    assert any(SECRET in prompt for prompt in log.lines[0]["prompts"])


def test_a_named_key_is_told_and_never_shown(serving: Any, log: Log, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: alice, sha256: {digest(SECRET)}}}\n")
    with serving(key_file=file) as server:
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 1}
        headers = {"x-request-id": "hers", "authorization": f"Bearer {SECRET}"}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert server.http.post("/v1/completions", json=body, headers={"x-request-id": "his"}).status_code == 401
        server.wait_until(lambda: log.text.count('"status"') == 2)
    assert log.of("hers")["key"] == "alice"
    assert "key" not in log.of("his")
    assert SECRET not in log.text


def test_a_client_cannot_forge_lines(server: Any, log: Log) -> None:
    log.handler.setFormatter(TextFormatter())
    server.http.get("/a%0AERROR%20octavo:%20forged")
    server.http.get("/nothing", headers={"x-request-id": "id status=200"})
    server.wait_until(lambda: "404" in log.text.rpartition("nothing")[2])
    assert len(log.text.splitlines()) == 2
    assert "request_id='id status=200' status=404" in log.text
