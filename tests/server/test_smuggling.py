"""Bytes that a proxy and a server might read differently, and paths that a check and a router might, on raw sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import pytest

from server import body, connection

BODY = b'{"model":"test","prompt":"Hello","max_tokens":1}'
HIDDEN = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"  # must never be answered as a request of its own


def exchange(server: Any, data: bytes, seconds: float = 5.0) -> bytes:
    """All that comes back until the server closes; half-closing tells it that nothing more will come."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as raw:
        raw.sendall(data)
        answer = b""
        while piece := raw.recv(1 << 16):
            answer += piece
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def post(*headers: bytes, body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def keyed(serving: Any) -> Any:
    with serving(api_keys=("right",)) as server:
        yield server


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "data",
    [
        post(b"Content-Length: 0", b"Transfer-Encoding: chunked", body=CHUNKED + HIDDEN),
        post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=CHUNKED + HIDDEN),
        post(LENGTH, b"Content-Length: 0", body=BODY + HIDDEN),
        post(b"Content-Length: %d, 0" % len(BODY), body=BODY + HIDDEN),
        post(b"Content-Length: +%d" % len(BODY), body=BODY + HIDDEN),
        post(b"Content-Length: -1", body=BODY + HIDDEN),
        post(b"Content-Length: 0x%x" % len(BODY), body=BODY + HIDDEN),
        post(b"Content-Length: 99999999999999999999999", body=BODY + HIDDEN),
        post(b"Content-Length : 0", body=BODY + HIDDEN),
        post(b" Content-Length: 0", body=BODY + HIDDEN),
        post(b"Transfer-Encoding: xchunked", body=CHUNKED + HIDDEN),
        post(b"Transfer-Encoding: chunked, identity", body=CHUNKED + HIDDEN),
        post(b"Transfer-Encoding: identity, chunked, chunked", b"Transfer-Encoding: gzip", body=CHUNKED + HIDDEN),
        post(b"Transfer-Encoding:\x0bchunked", body=CHUNKED + HIDDEN),
        post(b"Transfer-Encoding: chunked", body=b"-1\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN),
        post(b"Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN),
        post(b"Transfer-Encoding: chunked", body=b"5\r\nHello0\r\n\r\n" + HIDDEN),
        post(b"X-A: a\x00b", LENGTH, body=BODY + HIDDEN),
        post(b"X-A: a\rX-B: b", LENGTH, body=BODY + HIDDEN),
        post(LENGTH).replace(b"\r\n", b"\n", 3) + HIDDEN,
        b"GET /health HTTP/1.1 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
        b"GET\t/health\tHTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n" + HIDDEN,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + HIDDEN,
    ],
)
@pytest.mark.case(53)
def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_closed(server: Any, data: bytes) -> None:
    answer = exchange(server, data)
    assert statuses(answer) == [400], answer
    assert b"connection: close" in answer.lower()
    assert b"alive" not in answer


def test_what_is_no_http_is_told_so_in_the_envelope_and_counted(server: Any) -> None:
    def counted() -> tuple[float, float]:
        errors = server.metric("octavo_errors_total", code="invalid_http")
        return server.metric("octavo_http_responses_total", status="400"), errors

    responses, errors = counted()
    for data in (b"FOO /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", b"nonsense\r\n\r\n"):
        head, _, body = exchange(server, data).partition(b"\r\n\r\n")
        assert statuses(head) == [400]
        assert b"x-request-id: req-" in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert counted() == (responses + 2, errors + 2)


def test_trailers_are_not_headers(serving: Any) -> None:
    with serving(api_keys=("right",)) as server:
        late = b"0\r\nAuthorization: Bearer right\r\nX-Request-Id: late\r\n\r\n"
        head = post(b"Transfer-Encoding: chunked", b"Connection: close", body=b"")
        answer = exchange(server, head + b"%x\r\n%s\r\n" % (len(BODY), BODY) + late)
        assert statuses(answer) == [401]
        assert b"late" not in answer


def test_requests_in_one_packet_are_each_answered_in_order(server: Any) -> None:
    last = HIDDEN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = exchange(server, post(LENGTH) + HIDDEN + last)
    assert statuses(answer) == [200, 200, 200]


@pytest.mark.parametrize(
    "target",
    [
        b"//v1/models", b"/V1/models", b"/v1/models/", b"/v1/../v1/models", b"/./v1/models", b"/health/../v1/models",
        b"/health/..%2fv1/models", b"/health%2f..%2fv1%2fmodels", b"/%2e%2e/v1/models", b"/v1%2fmodels",
        b"/v1/%6dodels", b"/v1/models%00", b"/v1/models%20", b"/v1/models;/health",
        b"/v1/models?/health", b"/health%3f/../v1/models",
        b"http://x/v1/models", b"/v1/models#/health", b"/page/../v1/models", b"/page/..%2f..%2fpyproject.toml",
        b"/page/%2e%2e/%2e%2e/etc/passwd", b"/\\v1\\models", b"/v1/completions%0d%0aX: y",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"OPTIONS", b"TRACE"])
@pytest.mark.case(42)
def test_no_path_gets_around_the_key(keyed: Any, method: bytes, target: bytes) -> None:
    answer = exchange(keyed, method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(answer)[0] in (400, 401), answer
    assert len(statuses(answer)) == 1
    assert b"root:" not in answer


def test_a_request_to_become_another_protocol_is_an_ordinary_one_and_the_last(server: Any) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    for upgrade in (b"h2c", b"websocket", b"foo"):
        asking = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n"
        head = b"GET /health HTTP/1.1\r\n" + asking + b"\r\n"
        assert statuses(exchange(server, head)) == [200]
        assert statuses(exchange(server, head + inner)) == [200]
        for length in (b"Content-Length: %d" % len(inner), b"Transfer-Encoding: chunked"):
            head = b"POST /v1/completions HTTP/1.1\r\n" + asking + length + b"\r\n\r\n"
            assert statuses(exchange(server, head + inner)) == [400]
            assert statuses(exchange(server, head)) == [400], "before what follows can pass for a request"
    assert statuses(exchange(server, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[0] >= 400


def test_a_head_that_comes_at_once_has_the_same_bound(server: Any) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: %b\r\n\r\n"
    assert statuses(exchange(server, head % (b"a" * 60_000))) == [200]
    assert statuses(exchange(server, head % (b"a" * 70_000))) == [400]


@pytest.mark.parametrize(
    ("start", "filler"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a" * 1024),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X-Many: a\r\n" * 90),
        (b"GET /", b"a" * 1024),
        (post(b"Transfer-Encoding: chunked", body=b"1;"), b"a" * 1024),
        (post(b"Transfer-Encoding: chunked", body=b"1\r\n{\r\n0\r\nX-Trailer: "), b"a" * 1024),
    ],
)
@pytest.mark.case(53)
def test_a_head_or_trailer_without_end_is_cut_off(server: Any, start: bytes, filler: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        sent = raw.send(start)
        with contextlib.suppress(ConnectionError):
            while sent < 8 << 20:
                sent += raw.send(filler)
        assert sent < 8 << 20


@pytest.mark.case(53)
def test_a_body_that_trickles_is_not_waited_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    answer = exchange(server, post(b"Content-Length: 5000", body=b'{"prompt"'))
    assert statuses(answer) == [408]
    assert b"request_timeout" in answer


def test_a_head_that_does_not_come_is_not_waited_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    for beginning in (b"", b"GET /health HTTP/1.1\r\nHost"):
        assert exchange(server, beginning) == b""
    # A slow answer is not a slow head.
    server.runner.step_seconds = 0.1
    fields = json.dumps({"model": "test", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}).encode()
    answer = exchange(server, post(b"Content-Length: %d" % len(fields), b"Connection: close", body=fields))
    assert statuses(answer) == [200]
