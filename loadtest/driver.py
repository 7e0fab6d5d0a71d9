"""Drive a `/v1/completions` server with a request set and time every token.

Bare asyncio streams and one JSON parse an event: the client shares the machine with the server, so it must cost
little. Runs in whatever event loop calls `drive`. Knows the HTTP API and nothing else of the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loadtest.workloads import Prompt


@dataclass(slots=True)
class Answer:
    """What came back for one prompt. Times are seconds of `time.perf_counter`."""

    started: float
    status: int = 0
    stamps: list[float] = field(default_factory=list)  # arrival of each piece of text
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the server's prefix cache; 0 where it does not say
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to the first text."""
        return self.stamps[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two pieces of text."""
        if len(self.stamps) < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) / (max(2, self.completion_tokens or len(self.stamps)) - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to. Times in milliseconds; None where nothing could be timed."""

    kind: str
    requests: int
    concurrency: int
    failed: int
    wall_seconds: float
    prompt_tokens: int
    completion_tokens: int
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    cached_tokens: int = 0  # of the prompts, where the server says so


async def drive(
    url: str, model: str, prompts: Iterable[Prompt], concurrency: int, extra: Mapping[str, object] | None = None
) -> tuple[list[Answer], float]:
    """Send every prompt, at most `concurrency` at a time; the answers in order, and the seconds it all took.

    Greedy and to the full length, unless `extra` (further fields of the body) says otherwise.
    """
    address = urlsplit(url)
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Answer:
        body = {"model": model, "prompt": prompt.prompt, "max_tokens": prompt.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        async with places:
            return await _complete(address.hostname or "127.0.0.1", address.port or 80, body | dict(extra or {}))

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return answers, time.perf_counter() - began


def summarise(kind: str, concurrency: int, answers: Sequence[Answer], wall_seconds: float) -> Figures:
    """The figures of a run. A failed request counts nowhere but in `failed`."""
    good = [answer for answer in answers if answer.error is None]
    timed = [answer for answer in good if answer.stamps]
    ttft = [answer.ttft for answer in timed]
    tpot = [tpot for answer in timed if (tpot := answer.tpot) is not None]
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    completion_tokens = sum(answer.completion_tokens or len(answer.stamps) for answer in good)
    return Figures(
        kind=kind,
        requests=len(answers),
        concurrency=concurrency,
        failed=len(answers) - len(good),
        wall_seconds=wall_seconds,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        output_tokens_per_second=completion_tokens / wall_seconds,
        prompt_tokens_per_second=prompt_tokens / wall_seconds,
        ttft_p50=quantile_ms(ttft, 0.5),
        ttft_p99=quantile_ms(ttft, 0.99),
        tpot_p50=quantile_ms(tpot, 0.5),
        tpot_p99=quantile_ms(tpot, 0.99),
        cached_tokens=sum(answer.cached_tokens for answer in good),
    )


def quantile_ms(seconds: Sequence[float], share: float) -> float | None:
    """The value that `share` of `seconds` are below, in milliseconds; None of nothing."""
    if not seconds:
        return None
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3


async def _complete(host: str, port: int, body: Mapping[str, object]) -> Answer:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    answer = Answer(started=time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            answer.started = time.perf_counter()
            writer.write(head.encode() + payload)
            await _read(reader, answer)
        finally:
            writer.close()
    except (OSError, ValueError, LookupError, EOFError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    answer.status = int((await reader.readline()).split()[1])
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked |= line.startswith(b"transfer-encoding:") and b"chunked" in line
    pieces = _chunks(reader) if chunked else _rest(reader)
    if answer.status != 200:
        answer.error = f"HTTP {answer.status}: " + b"".join([piece async for piece in pieces])[:200].decode(
            errors="replace"
        )
        return
    ended = False
    async for data in _events(pieces):
        if ended := data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])
            return
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if (choices := event.get("choices")) and (text := choices[0].get("text")):
            answer.stamps.append(time.perf_counter())
            answer.text += text
    if not ended:
        answer.error = "the stream ended without [DONE]"


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, whichever way the bytes were cut."""
    left = b""
    async for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a chunked answer."""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of an answer that ends with the connection."""
    while piece := await reader.read(1 << 16):
        yield piece
