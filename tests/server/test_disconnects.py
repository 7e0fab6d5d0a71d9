"""A client that leaves takes its request with it, wherever that was."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

PATH = "/v1/completions"

Connect = Callable[..., socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Send a request over a bare socket and leave it to the test to read it, or not."""
    connections = []

    def connect(server: Any, **body: Any) -> socket.socket:
        fields = {"model": server.model, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, **body}
        data = json.dumps(fields).encode()
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        connections.append(connection)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return connection

    yield connect
    for connection in connections:
        connection.close()


def read_events(connection: socket.socket, count: int) -> None:
    data = b""
    while data.count(b"data: ") < count:
        piece = connection.recv(4096)
        assert piece, data
        data += piece


def cancelled(server: Any) -> float:
    return float(server.metric("octavo_requests_total", outcome="cancelled"))


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["Hello", "Yes"]}])
@pytest.mark.case(31)
def test_leaving_a_stream_ends_its_generation(server: Any, connect: Connect, fields: dict[str, Any]) -> None:
    server.runner.step_seconds = 0.01
    before = cancelled(server)
    connection = connect(server, stream=True, **fields)
    read_events(connection, 3)
    assert server.engine.running
    connection.close()
    server.wait_until(lambda: server.engine.running == 0, 3.0)
    server.assert_baseline()
    assert cancelled(server) == before + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.case(31)
def test_leaving_before_the_first_token_ends_it_too(server: Any, connect: Connect, stream: bool) -> None:
    server.runner.gate.clear()  # the prompt is being computed
    connection = connect(server, stream=stream, prompt="Hello world " * 20)
    server.wait_until(lambda: server.engine.busy)
    connection.close()
    time.sleep(0.05)  # for the server to notice; the step in flight cannot be stopped
    steps = server.engine.steps
    server.runner.gate.set()
    server.wait_until(lambda: server.engine.running == 0, 3.0)
    assert server.engine.steps <= steps + 1, "not one step more was spent on it"


def test_leaving_a_whole_answer_ends_its_generation(server: Any, connect: Connect) -> None:
    server.runner.step_seconds = 0.01
    connection = connect(server)
    server.wait_until(lambda: server.engine.running > 0)
    connection.close()
    server.wait_until(lambda: server.engine.running == 0, 3.0)


@pytest.mark.case(31)
def test_a_half_closed_connection_counts_as_left(server: Any, connect: Connect) -> None:
    server.runner.step_seconds = 0.01
    connection = connect(server, stream=True)
    read_events(connection, 2)
    connection.shutdown(socket.SHUT_WR)
    server.wait_until(lambda: server.engine.running == 0, 3.0)
    connection.close()


@pytest.mark.case(34)
def test_leaving_the_queue_costs_nothing(serving: Any, connect: Connect) -> None:
    with serving(limits={"max_num_seqs": 2}) as server:
        running = [connect(server, stream=True, prompt=f"Run {number}") for number in range(2)]
        server.wait_until(lambda: server.engine.running == 2)
        server.runner.gate.clear()  # the two hold their places
        server.wait_until(lambda: server.engine.busy)
        queued = [connect(server, stream=number % 2 == 0, prompt="Queued " * 5) for number in range(50)]
        server.wait_until(lambda: server.engine.waiting == 50)
        for connection in queued:
            connection.close()
        server.wait_until(lambda: server.engine.waiting == 0)
        assert server.engine.running == 2
        for connection in running:
            connection.close()
        server.runner.gate.set()
        server.assert_baseline()
        prefilled = server.metric("octavo_prefill_tokens_total")
        assert prefilled == 2 * len(server.state.tokenizing.encode("Run 0", add_special_tokens=True))
        assert server.metric("octavo_requests_total", outcome="cancelled") == 52
        assert server.complete("Hello", max_tokens=1)


def test_a_reader_that_stalls_holds_up_nobody(server: Any, connect: Connect) -> None:
    connection = connect(server, stream=True)
    read_events(connection, 1)
    assert server.complete("Hello", max_tokens=30, ignore_eos=True)["usage"]["completion_tokens"] == 30
    server.wait_until(lambda: server.engine.running == 0)
    connection.settimeout(5)
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(65536)
    connection.close()


@pytest.mark.case(33)
def test_many_cancellations_leave_nothing_behind(server: Any) -> None:
    server.runner.step_seconds = 0.001

    def visit(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            body = {"model": server.model, "prompt": f"Visit {number} " * (number % 7 + 1), "n": number % 3 + 1}
            body |= {"max_tokens": 40, "ignore_eos": True, "seed": number, "stream": True}
            with client.stream("POST", PATH, json=body) as response:
                for events, _ in enumerate(response.iter_lines()):
                    if events > number % 9:
                        return

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    server.assert_baseline()


def test_a_silent_stream_gets_comments(serving: Any, connect: Connect) -> None:
    with serving(keep_alive_seconds=0.05) as server:
        server.runner.gate.clear()
        connection = connect(server, stream=True, max_tokens=2)
        data = b""
        while data.count(b": waiting\n\n") < 2:
            data += connection.recv(4096)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        server.runner.gate.set()
        while b"[DONE]" not in data:
            data += connection.recv(4096)
        assert data.count(b"HTTP/1.1 200") == 1
        connection.close()
