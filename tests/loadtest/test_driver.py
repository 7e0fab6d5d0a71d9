"""The client, against a little server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

import pytest

from loadtest.driver import Answer, drive, summarise
from loadtest.workloads import Prompt

Handler = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def run(handler: Handler, prompts: Sequence[Prompt], concurrency: int = 1) -> list[Answer]:
    """Drive a server that calls `handler` with each request's body."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await handler(json.loads(await reader.readexactly(length)), writer)
        await writer.drain()
        writer.close()

    async def main() -> list[Answer]:
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            answers, _ = await drive(f"http://127.0.0.1:{port}", "m", prompts, concurrency)
        return answers

    return asyncio.run(main())


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def stream(*texts: str, prompt_tokens: int = 7) -> bytes:
    events = [event(choices=[{"text": text}]) for text in texts]
    usage = event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)})
    return b"".join([*events, usage, b"data: [DONE]\n\n"])


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def reply(content: bytes) -> Handler:
    async def handler(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(content)

    return handler


ONE = [Prompt("hello", 3)]


def test_a_stream_is_read_to_its_end() -> None:
    [answer] = run(reply(chunked(stream("a", "b", "", "c"))), ONE)
    assert (answer.status, answer.text, answer.error) == (200, "abc", None)
    assert (answer.prompt_tokens, answer.completion_tokens, len(answer.stamps)) == (7, 4, 3)
    assert answer.started <= answer.stamps[0] <= answer.stamps[-1]


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    body = stream("a", "é", "c")
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    assert run(reply(chunked(*pieces)), ONE)[0].text == "aéc"


def test_cached_prompt_tokens_are_counted_where_the_server_tells() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
    [told] = run(reply(chunked(stream("a"), event(choices=[], usage=usage))), ONE)
    assert told.cached_tokens == 0  # what follows [DONE] is not read
    [told] = run(
        reply(chunked(event(choices=[{"text": "a"}]), event(choices=[], usage=usage), b"data: [DONE]\n\n")), ONE
    )
    assert told.cached_tokens == 5
    [untold] = run(reply(chunked(event(choices=[], usage=usage | {"prompt_tokens_details": None}), stream("a"))), ONE)
    assert untold.cached_tokens == 0
    assert summarise("chat", 1, [told, untold], 1.0).cached_tokens == 5


def test_an_answer_may_end_with_the_connection() -> None:
    [answer] = run(reply(b"HTTP/1.1 200 OK\r\n\r\n" + stream("a")), ONE)
    assert (answer.text, answer.error) == ("a", None)


def test_the_body_asks_for_a_greedy_stream_of_the_full_length() -> None:
    bodies: list[dict[str, object]] = []

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        writer.write(chunked(stream("a")))

    run(handler, ONE)
    assert bodies == [
        {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_no_more_requests_run_at_once_than_allowed() -> None:
    running = most = 0

    async def handler(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        writer.write(chunked(stream("a")))

    answers = run(handler, ONE * 12, concurrency=4)
    assert most == 4
    assert [answer.error for answer in answers] == [None] * 12


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy", "HTTP 429: busy"),
        (chunked(event(choices=[{"text": "a"}]), event(error={"message": "lost"})), "{'message': 'lost'}"),
        (chunked(event(choices=[{"text": "a"}])), "the stream ended without [DONE]"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata:", "IncompleteReadError"),
        (b"", "IndexError"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_request(content: bytes, error: str) -> None:
    [answer] = run(reply(content), ONE)
    assert error in (answer.error or "")


def test_a_server_that_is_not_there_is_an_error_of_every_request() -> None:
    answers, _ = asyncio.run(drive("http://127.0.0.1:1", "m", ONE * 2, 2))
    assert all("ConnectionRefused" in (answer.error or "") for answer in answers)


def answer(started: float, stamps: list[float], tokens: int, error: str | None = None) -> Answer:
    return Answer(started, 200, stamps, "", prompt_tokens=10, completion_tokens=tokens, error=error)


def test_figures_count_only_what_was_answered() -> None:
    answers = [
        answer(0.0, [0.1, 0.2, 0.4], 4),
        answer(0.0, [0.3, 0.5], 3),
        answer(0.0, [0.5], 1),
        answer(0.0, [], 9, error="lost"),
    ]
    figures = summarise("chat", 2, answers, wall_seconds=2.0)
    assert (figures.requests, figures.failed, figures.prompt_tokens, figures.completion_tokens) == (4, 1, 30, 8)
    assert (figures.output_tokens_per_second, figures.prompt_tokens_per_second) == (4.0, 15.0)
    assert (figures.ttft_p50, figures.ttft_p99) == (pytest.approx(300), pytest.approx(500))
    assert (figures.tpot_p50, figures.tpot_p99) == (pytest.approx(100), pytest.approx(100))


def test_nothing_answered_gives_no_times() -> None:
    figures = summarise("chat", 2, [answer(0.0, [], 0, error="lost")], wall_seconds=1.0)
    assert (figures.ttft_p50, figures.tpot_p99, figures.output_tokens_per_second) == (None, None, 0.0)
