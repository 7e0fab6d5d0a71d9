"""The client, against a little server that answers as it is told."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from loadtest import driver
from loadtest.driver import drive
from loadtest.figures import Answer, Slo, details, jain, summarise
from loadtest.workloads import Prompt

Handler = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def run(handler: Handler, prompts: Sequence[Prompt], concurrency: int = 1, **options: Any) -> list[Answer]:
    """Drive a server that calls `handler` with each request's body."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        try:
            await handler(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        finally:
            writer.close()

    async def main() -> list[Answer]:
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            answers, _ = await drive(f"http://127.0.0.1:{port}", "m", prompts, concurrency, **options)
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
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata:", "the stream ended without [DONE]"),
        (b"", "closed without an answer"),
        (b"nonsense\r\n\r\n", "not an answer"),
        (chunked(b"data: nonsense\n\n"), "not an answer: invalid literal"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_request(content: bytes, error: str) -> None:
    [answer] = run(reply(content), ONE)
    assert error in (answer.error or "")


def test_a_client_that_is_refused_comes_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "REFUSED_SECONDS", 0.1)
    first, second = run(reply(b"HTTP/1.1 429 Too Many Requests\r\n\r\n"), ONE * 2)
    assert second.started - first.ended >= 0.099
    at_once = run(reply(b"HTTP/1.1 429 Too Many Requests\r\n\r\n"), ONE * 2, concurrency=0, due=[0.0, 0.0])
    assert [answer.status for answer in at_once] == [429, 429]


def test_a_server_that_is_not_there_is_an_error_of_every_request() -> None:
    answers, _ = asyncio.run(drive("http://127.0.0.1:1", "m", ONE * 2, 2))
    assert all("ConnectionRefused" in (answer.error or "") for answer in answers)


def test_a_turn_is_sent_with_all_that_was_said_before() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        writer.write(chunked(stream("a", "b")))

    talk = [Prompt("one", 3, Prompt("two", 4))]
    assert [answer.text for answer in run(handler, talk)] == ["ab", "ab"]
    assert [body["prompt"] for body in bodies] == ["one", "one\nab\ntwo"]
    run(handler, talk, chat=True)
    roles = [[message["role"] for message in body["messages"]] for body in bodies[2:]]
    assert roles == [["user"], ["user", "assistant", "user"]]


def test_a_conversation_ends_with_the_first_turn_that_fails() -> None:
    answers = run(reply(b"HTTP/1.1 500 No\r\n\r\n"), [Prompt("one", 3, Prompt("two", 4))])
    assert [answer.error for answer in answers] == ["HTTP 500: "]


def test_the_text_of_a_chat_is_read_and_thoughts_with_it() -> None:
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "yes"}, {}]
    events = [event(choices=[{"delta": delta}]) for delta in deltas]
    [answer] = run(reply(chunked(*events, b"data: [DONE]\n\n")), ONE, chat=True)
    assert (answer.text, len(answer.stamps)) == ("hmyes", 2)


def test_a_client_that_is_to_leave_does_and_has_not_failed() -> None:
    async def handler(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(event(choices=[{"text": "a"}]))
                await writer.drain()
                await asyncio.sleep(0.001)

    answers = run(handler, [Prompt("hello", 9, Prompt("never said", 9), leave_after=2)])
    assert [(answer.left, answer.error, len(answer.stamps)) for answer in answers] == [(True, None, 2)]
    figures = summarise("chat", 1, answers, 1.0)
    assert (figures.left, figures.failed, figures.completion_tokens, figures.ttft_p50) == (1, 0, 0, None)


def test_in_an_open_loop_a_request_counts_from_when_it_was_due() -> None:
    async def handler(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(chunked(stream("a")))

    answers = run(handler, ONE * 3, concurrency=1, due=[0.0, 0.01, 0.02])
    begun = [answer.started - answers[0].started for answer in answers]
    assert begun == [pytest.approx(due) for due in (0.0, 0.01, 0.02)]
    assert answers[2].ttft > 0.1, "it waited for the two before it"


def test_a_request_that_takes_too_long_is_an_error() -> None:
    async def handler(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)

    [answer] = run(handler, ONE, timeout_seconds=0.05)
    assert answer.error == "no end within 0.05 s"


def test_keys_take_turns_and_fields_replace_the_usual_ones() -> None:
    seen: list[str] = []

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        assert (body["top_k"], "ignore_eos" in body) == (5, False)
        writer.write(chunked(stream("a")))

    fields = {"top_k": 5, "ignore_eos": None}
    answers = run(handler, ONE * 4, keys=["k", "l"], extra=fields, started=lambda answer: seen.append(str(answer.key)))
    assert [answer.key for answer in answers] == [0, 1, 0, 1]
    assert seen == ["0", "1", "0", "1"]


def answer(started: float, stamps: list[float], tokens: int, error: str | None = None) -> Answer:
    return Answer(
        started, 200, stamps, "", prompt_tokens=10, completion_tokens=tokens, error=error, ended=max(stamps, default=0)
    )


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


def test_goodput_counts_what_came_in_time_and_a_failure_is_not_in_time() -> None:
    answers = [answer(0.0, [0.1, 0.2], 2), answer(0.0, [0.6, 0.7], 2), answer(0.0, [], 0, error="lost")]
    figures = summarise("chat", 2, answers, wall_seconds=2.0, slo=Slo.parse("ttft=500,tpot=150"))
    assert (figures.within_slo, figures.goodput) == (pytest.approx(1 / 3), 0.5)
    assert summarise("chat", 2, answers, 2.0, slo=Slo(tpot=50)).within_slo == 0
    for text in ("", "ttft", "speed=3", "ttft=x", "ttft=1,tpot", "ttft=nan", "ttft=-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="like ttft=500,tpot=50,e2e=10000, not "):
            Slo.parse(text)


def test_fairness_is_one_when_all_got_the_same_and_one_over_n_when_one_got_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) is None
    starved = [answer(0.0, [0.1], 90), answer(0.0, [0.1], 10)]
    starved[1].key = 1
    assert summarise("chat", 2, starved, 1.0).fairness == pytest.approx(100**2 / (2 * (90**2 + 10**2)))


def test_what_is_kept_of_requests_has_their_times_errors_and_the_pieces_of_each_second() -> None:
    kept = details([answer(5.0, [5.1, 5.2, 6.4], 3), answer(6.0, [], 0, error="lost"), answer(6.0, [6.5], 1)])
    assert kept["ttft"] == [100, None, 500]
    assert kept["tpot"] == [650, None, None]
    assert kept["pieces_by_second"] == [2, 2]
    assert (kept["at"], kept["errors"]) == ([0, 1, 1], {"lost": 1})
