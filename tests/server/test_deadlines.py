"""What is not answered in time is broken off, wherever it is by then."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

PATHS = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


def ask(server: Any, path: str, seconds: str, **fields: Any) -> Any:
    body = {"model": server.model, **PATHS[path], "max_tokens": 400, "ignore_eos": True, **fields}
    return server.http.post(path, json=body, headers={"x-request-deadline": seconds})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_late_before_its_first_token_is_a_504(server: Any, path: str, stream: bool) -> None:
    server.runner.step_seconds = 0.2
    error = server.error(ask(server, path, "0.05", stream=stream), 504)
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    server.assert_baseline()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_late_ends_with_an_error_event(server: Any, path: str) -> None:
    server.runner.step_seconds = 0.02
    lines = [line for line in ask(server, path, "0.3", stream=True).text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert 2 < len(lines) < 100
    server.assert_baseline()


def test_waiting_counts_and_costs_nothing(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 1}, request_timeout_seconds=1.0) as server:
        server.runner.step_seconds = 0.02
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # the stream ends with this
            next(lines)
            before = server.metric("octavo_prefill_tokens_total")
            assert server.error(ask(server, "/v1/completions", "0.05", prompt="Another one"), 504)
            assert server.metric("octavo_prefill_tokens_total") == before
            assert "deadline_exceeded" in "".join(lines), "the operator's limit holds for all"
        server.runner.step_seconds = 0.0
        assert server.complete("Hello", max_tokens=1)
        server.assert_baseline()


def test_a_deadline_in_time_changes_nothing(server: Any) -> None:
    response = ask(server, "/v1/completions", "60", max_tokens=3)
    assert response.json()["usage"]["completion_tokens"] == 3


def test_blanks_after_a_header_are_not_its_value(server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/v1/models", headers={"x-request-deadline": "60 \t"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "", "1,2", "1_0", "1e3", "inf", "+1"])
def test_a_deadline_that_makes_no_sense_is_a_400(server: Any, value: str) -> None:
    assert server.error(ask(server, "/v1/completions", value), 400)["param"] == "x-request-deadline"
