"""Requests of all kinds at once: each gets the answer it would have had alone."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

HEADERS = {"content-type": "application/json"}


def mixed_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Different lengths, both routes, streamed and not, stops, logprobs, choices, shared beginnings."""
    chance = random.Random(4)
    requests = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": chance.randint(1, 40), "seed": number, "n": chance.choice([1, 1, 1, 3])}
        body["temperature"] = chance.choice([0, 0.7, 1.5])
        body["ignore_eos"] = chance.random() < 0.5
        body["stream"] = chance.random() < 0.5
        if chance.random() < 0.3:
            body["stop"] = chance.sample(["a", " the", "qu", "🎉", "ing"], 2)
        if chance.random() < 0.2:
            body["frequency_penalty"] = 0.5
        text = chance.choice(["", "The quick brown fox. " * 3, "Hello world, "]) + f"marker {number} " * chance.randint(
            1, 4
        )
        if chance.random() < 0.5:
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": chance.random() < 0.3}
            requests.append(("/v1/chat/completions", body))
        else:
            body |= {"prompt": text if chance.random() < 0.8 else [text, text + "again"], "echo": chance.random() < 0.2}
            if chance.random() < 0.3:
                body["logprobs"] = 2
            requests.append(("/v1/completions", body))
    return requests


async def answer(client: httpx.AsyncClient, model: str, path: str, body: dict[str, Any]) -> list[Any]:
    """What a request gave, choice by choice, in one form whether it was streamed or not."""
    response = await client.post(path, content=json.dumps({"model": model, **body}), headers=HEADERS)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        events = [response.json()]
    else:
        blocks = response.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            kept = choices.setdefault(choice["index"], ["", [], None])
            content = choice.get("delta") or choice.get("message") or {}
            kept[0] += choice.get("text") or content.get("content") or ""
            logprobs = choice["logprobs"] or {}
            kept[1] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            kept[2] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.case(1)
def test_sixty_four_mixed_requests_each_get_their_own_answer(server: Any) -> None:
    requests = mixed_requests(64)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            alone = [await answer(client, server.model, path, body) for path, body in requests]
            together = await asyncio.gather(*(answer(client, server.model, path, body) for path, body in requests))
            assert list(together) == alone
            turned = [(path, {**body, "stream": not body["stream"]}) for path, body in requests]
            again = await asyncio.gather(*(answer(client, server.model, path, body) for path, body in turned))
            assert list(again) == alone, "streamed or not"

    asyncio.run(main())


@pytest.mark.case(39)
def test_health_is_prompt_while_many_run(server: Any) -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            tasks = [asyncio.create_task(answer(client, server.model, path, body)) for path, body in mixed_requests(48)]
            waits = []
            while not all(task.done() for task in tasks):
                began = loop.time()
                assert (await client.get("/health")).status_code == 200
                waits.append(loop.time() - began)
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
            return waits

    waits = sorted(asyncio.run(main()))
    assert waits[len(waits) // 2] < 0.5
    assert waits[-1] < 5


@pytest.mark.case(52)
def test_three_hundred_streams_of_every_kind_end_as_they_should(server: Any) -> None:
    extras: list[dict[str, Any]] = [{"stream_options": {"include_usage": True}}, {"max_tokens": 1}, {}] * 5
    extras.append({"max_tokens": 400})
    requests = [
        (path, {**body, "stream": True, **extras[number % 16]})
        for number, (path, body) in enumerate(mixed_requests(300))
    ]

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [(path, json.dumps({"model": server.model, **body})) for path, body in requests]
            return await asyncio.gather(
                *(client.post(path, content=content, headers=HEADERS) for path, content in bodies)
            )

    for (path, body), response in zip(requests, asyncio.run(main()), strict=True):
        assert response.status_code == 200, response.text
        *blocks, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        events = [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]
        if "stream_options" in body:
            assert events.pop()["choices"] == []
        choices = [choice for event in events for choice in event["choices"]]
        prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        for index in range(body["n"] * prompts):
            own = [choice for choice in choices if choice["index"] == index]
            assert [choice["finish_reason"] is not None for choice in own].index(True) == len(own) - 1
            if "chat" in path:
                assert [place for place, choice in enumerate(own) if "role" in choice["delta"]] == [0]


@pytest.mark.case(36)
def test_a_burst_on_a_cold_server_with_idle_connections_is_answered_and_leaves_no_descriptor(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 8, "max_queued_requests": 60}) as server, ExitStack() as connections:
        process = psutil.Process()
        before = process.num_fds()
        for _ in range(1000):
            connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        together = threading.Barrier(100)

        def ask(number: int) -> int:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                body = {"model": server.model, "prompt": f"Number {number} " * (1 + 9 * (number % 2)), "max_tokens": 20}
                together.wait()
                return client.post("/v1/completions", json=body).status_code

        with ThreadPoolExecutor(100) as pool:
            statuses = list(pool.map(ask, range(100)))
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 60
        connections.close()
        server.assert_baseline()
        server.wait_until(lambda: process.num_fds() <= before)
        assert server.complete("Hello", max_tokens=1)
