"""What clients see when the engine says no, or breaks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS = {"/v1/completions": {"prompt": "Hello"}, "/v1/chat/completions": MESSAGES}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_is_a_500(server: Any, path: str, stream: bool) -> None:
    server.runner.broken = RuntimeError("secret detail")
    response = server.post(path, **PATHS[path], stream=stream)
    error = server.error(response, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.case(51)
def test_a_failure_later_is_one_event_and_the_end(server: Any, path: str) -> None:
    server.runner.step_seconds = 0.01
    body = {"model": server.model, **PATHS[path], "stream": True, "ignore_eos": True, "max_tokens": 100}
    with server.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.runner.broken = RuntimeError("secret detail")
        rest = [line for line in lines if line]
    assert rest[-1].startswith('data: {"error":{"message":')
    assert sum("error" in line for line in rest) == 1
    assert not any("[DONE]" in line or "secret" in line for line in rest)


def test_logits_that_are_not_numbers_fail_one_request_only(server: Any) -> None:
    server.runner.poison = 77
    neighbour = {"prompt": "Hello", "max_tokens": 40, "temperature": 0}  # which does not come to hold the poison
    try:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(server.post(**neighbour).json()))
        thread.start()
        error = server.error(server.post(prompt=[77, 5]), 500)
        thread.join(20)
        assert "not a number" in error["message"]
        assert results[0]["choices"]
    finally:
        server.runner.poison = None


@contextlib.contextmanager
def filled(server: Any, count: int) -> Iterator[None]:
    """With so many requests that run or wait, and no step that ends; they are answered afterwards."""
    server.runner.gate.clear()
    threads = [threading.Thread(target=lambda: server.complete("Hello", max_tokens=2)) for _ in range(count)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.engine.running + server.engine.waiting == count)
    yield
    server.runner.gate.set()
    for thread in threads:
        thread.join(20)


@pytest.mark.case(35)
def test_a_full_queue_is_a_429_that_says_when_to_come_back(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 2, "max_queued_requests": 3}) as server:
        with filled(server, 5):
            for fields in ({}, {"stream": True}):
                response = server.post(prompt="One more", **fields)
                error = server.error(response, 429)
                assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert int(response.headers["retry-after"]) >= 1
            assert server.metric("octavo_requests_total", outcome="refused") == 2
        server.assert_baseline()
        assert server.complete("Hello", max_tokens=1)


@pytest.mark.case(35)
def test_what_is_refused_for_the_load_is_never_tokenised(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(limits={"max_num_seqs": 1, "max_queued_requests": 2}) as server:
        worked = []
        run = server.state.tokenizing.run
        with filled(server, 3):
            monkeypatch.setattr(server.state.tokenizing, "run", lambda *work: worked.append(work) or run(*work))
            answers = {**MESSAGES, "max_tokens": 1}, {"input": "Hi"}
            for path, body in {**PATHS, **dict(zip(("/v1/messages", "/v1/responses"), answers, strict=True))}.items():
                response = server.post(path, **body)
                assert (response.status_code, "2 requests are waiting" in response.text) == (429, True), response.text
                assert response.headers["retry-after"]
            assert not worked
            assert server.metric("octavo_refused_requests_total", reason="queued_requests") == 4
        server.complete("Hello", max_tokens=1)
        assert len(worked) == 1, "what is taken is tokenised there"


@pytest.mark.case(9, 35)
def test_choices_count_by_their_number(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 2, "max_queued_requests": 3}) as server:
        assert len(server.complete(["a", "b"], n=2, max_tokens=2)["choices"]) == 4
        error = server.error(server.post(prompt=["a", "b", "c"], n=2), 400)
        assert (error["param"], "6 choices" in error["message"]) == ("n", True)
        assert server.error(server.post(prompt=["a"] * 6), 400)["param"] == "prompt"
        server.runner.gate.clear()
        thread = threading.Thread(target=lambda: server.complete(["a", "b"], max_tokens=2))
        thread.start()
        server.wait_until(lambda: server.engine.running == 2)
        assert server.error(server.post(prompt=["a", "b"], n=2), 429)
        server.runner.gate.set()
        thread.join(20)


def test_a_server_that_drains_refuses_new_work_and_is_not_ready(serving: Any) -> None:
    with serving() as server:
        assert server.http.get("/ready").json() == {"status": "ready", "running": 0, "waiting": 0}
        server.run(server.engine.drain(0.1))
        response = server.http.get("/ready")
        assert server.error(response, 503)["code"] == "service_unavailable"
        assert response.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
        response = server.post(prompt="Hello")
        assert server.error(response, 503)
        assert response.headers["retry-after"]


def test_a_stopped_engine_ends_streams_with_an_error_event(serving: Any) -> None:
    with serving() as server:
        server.runner.step_seconds = 0.02
        body = {"model": server.model, "prompt": "Hello", "stream": True, "max_tokens": 400, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.run(server.engine.stop())
            rest = [line for line in lines if line]
        assert '"code":"service_unavailable"' in rest[-1]


@pytest.mark.case(38)
def test_a_stalled_engine_is_not_ready_but_alive(serving: Any) -> None:
    with serving(stall_seconds=0.05) as server:
        server.runner.gate.clear()
        thread = threading.Thread(target=lambda: server.complete("Hello", max_tokens=1))
        thread.start()
        server.wait_until(lambda: server.http.get("/ready").status_code == 503)
        assert "stalled" in server.error(server.http.get("/ready"), 503)["message"]
        assert server.http.get("/health").status_code == 200
        server.runner.gate.set()
        thread.join(20)
        server.wait_until(lambda: server.http.get("/ready").status_code == 200)


@pytest.mark.case(38)
def test_an_engine_that_gave_up_is_told_by_readiness(serving: Any) -> None:
    with serving() as server:
        server.engine.healthy = False
        server.engine.unhealthy_reason = "it broke"
        assert "it broke" in server.error(server.http.get("/ready"), 503)["message"]
        assert server.error(server.post(prompt="Hello"), 503)


def test_a_bug_in_the_server_is_an_envelope_too(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state.tokenizing, "encode", lambda *_, **__: 1 / 0)
    error = server.error(server.post(prompt="Hello"), 500)
    assert "division" not in error["message"]
    monkeypatch.undo()
