"""Drive a completions or chat server with requests and time every piece of text.

One callback for what a socket gives, a parser in C and one JSON parse an event: the client shares the machine with the
server, so it must cost little. Runs in whatever event loop calls `drive`. Knows the HTTP API and nothing else of the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from loadtest.figures import Answer
from loadtest.workloads import Prompt

TIMEOUT_SECONDS = 600.0
REFUSED_SECONDS = 1.0  # before the next one of a client that was refused: in a closed loop it would spin


async def drive(
    url: str,
    model: str,
    prompts: Iterable[Prompt],
    concurrency: int,
    extra: Mapping[str, object] | None = None,
    *,
    due: Sequence[float] | None = None,
    chat: bool = False,
    keys: Sequence[str] = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
    tls: ssl.SSLContext | None = None,
    started: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Send every prompt; the answers in order, and the seconds it all took.

    At most `concurrency` conversations go on at a time (0: without bound). With `due`, each begins so many seconds
    after the start, and its time counts from then even if it is sent later. Greedy and to the full length, unless
    `extra` (further fields of the body) says otherwise; a field that is None there is left out. `keys` take turns.
    `started` is told of each answer as it begins. `tls` is whom to trust, all that this machine does when not given;
    raises SSLCertVerificationError for another server.
    """
    address = urlsplit(url)
    secure = (tls or ssl.create_default_context()) if address.scheme == "https" else None
    server = _Server(address.hostname or "127.0.0.1", address.port, secure, address.path.rstrip("/"))
    places = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    fields: dict[str, object] = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
    fields |= {"stream_options": {"include_usage": True}} | dict(extra or {})
    fields = {name: value for name, value in fields.items() if value is not None}

    async def one(request: Prompt, said: Sequence[str], begins: float | None, key: int) -> Answer:
        text = _chat(said) if chat else {"prompt": "\n".join(said)}
        body = orjson.dumps({"max_tokens": request.max_tokens, **fields, **text})
        answer = Answer(time.perf_counter() if begins is None else begins, key=key)
        started(answer)
        head = server.head("chat/completions" if chat else "completions", len(body), keys[key] if keys else None)
        try:
            async with asyncio.timeout(timeout_seconds):
                await _exchange(server, head + body, answer, request.leave_after, begins is None)
        except TimeoutError:
            answer.error = f"no end within {timeout_seconds:g} s"
        except ssl.SSLCertVerificationError:
            raise  # no other request would do better
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        return answer

    async def conversation(number: int, first: Prompt) -> list[Answer]:
        begins = None if due is None else began + due[number]
        if begins is not None:
            await asyncio.sleep(begins - time.perf_counter())
        answers: list[Answer] = []
        said: list[str] = []
        turn: Prompt | None = first
        async with places:
            while turn is not None:
                said.append(turn.prompt)
                answers.append(await one(turn, said, begins, number % max(1, len(keys))))
                turn, begins = turn.then if answers[-1].good else None, None
                said.append(answers[-1].text)
            if due is None and answers[-1].status == 429:
                await asyncio.sleep(REFUSED_SECONDS)
        return answers

    began = time.perf_counter()
    conversations = await asyncio.gather(*(conversation(*item) for item in enumerate(prompts)))
    return [answer for answers in conversations for answer in answers], time.perf_counter() - began


def _chat(said: Sequence[str]) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]}


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int | None
    tls: ssl.SSLContext | None
    path: str

    def head(self, route: str, length: int, key: str | None) -> bytes:
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        where = self.host if self.port is None else f"{self.host}:{self.port}"
        return (
            f"POST {self.path}/v1/{route} HTTP/1.1\r\nHost: {where}\r\nContent-Type: application/json\r\n"
            f"{authorization}Connection: close\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


async def _exchange(server: _Server, request: bytes, answer: Answer, leave_after: int | None, restart: bool) -> None:
    """Send a request and take its answer to the end. Raises OSError when there is no connection."""
    loop = asyncio.get_running_loop()
    port = server.port or (443 if server.tls else 80)
    transport, exchange = await loop.create_connection(
        lambda: _Exchange(answer, leave_after), server.host, port, ssl=server.tls
    )
    try:
        if restart:
            answer.started = time.perf_counter()
        transport.write(request)
        await exchange.over
    finally:
        transport.close()


class _Exchange(asyncio.Protocol):
    """Reads one answer. `over` is set at its end, whatever that was."""

    def __init__(self, answer: Answer, leave_after: int | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._leave_after = leave_after
        self._parser = httptools.HttpResponseParser(self)
        self._left = b""  # of an event that has not come whole
        self._refusal = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not an answer: {error.__context__ or error}")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer.status != 200:
            self._refusal += body
            return
        now = time.perf_counter()
        *lines, self._left = (self._left + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.over.done():
                self._event(line[5:].strip(), now)

    def on_message_complete(self) -> None:
        self._cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._cut()

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return self._end(None)
        event = orjson.loads(data)
        if "error" in event:
            return self._end(str(event["error"]))
        answer = self._answer
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if (choices := event.get("choices")) and (text := _text(choices[0])):
            answer.stamps.append(now)
            answer.text += text
            if len(answer.stamps) == self._leave_after:
                answer.left = True
                return self._end(None)
        return None

    def _cut(self) -> None:
        """The end of what the server says."""
        status = self._answer.status
        if status == 200:
            self._end("the stream ended without [DONE]")
        elif status:
            self._end(f"HTTP {status}: {self._refusal[:200].decode(errors='replace')}")
        else:
            self._end("the connection was closed without an answer")

    def _end(self, error: str | None) -> None:
        if not self.over.done():
            self._answer.error = error
            self.over.set_result(None)


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice's event adds to the answer; thoughts count."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
