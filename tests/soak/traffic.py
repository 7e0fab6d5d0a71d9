"""Requests of every kind a client may send, each with the statuses it may be answered with. Drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = [
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "brew",
    "tea",
    "and",
    "count",
    "shoes",
]
SYSTEM = "You are a patient assistant who answers in one short sentence and never repeats the question. " * 3
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
# What is wrong with a completion that is otherwise sound.
MISTAKES: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"prompt": [-1]},
    {"prompt": []},
    {"n": 5_000_000},
    {"logit_bias": {"AI": 1}},
    {"stop": ""},
    {"seed": 2**64},
    {"prompt": [5] * 100_000},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
]
LATE = "the answer came apart: "


@dataclass
class Tally:
    """What was asked, and what came that should not have."""

    asked: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


class Traffic:
    """Asks one server. `faults_expected`: while things are made to fail, a 5xx or a broken stream is no surprise."""

    def __init__(self, url: str, model: str, seed: int, *, faults_expected: bool = False) -> None:
        self.tally = Tally()
        self._url = url
        self._model = model
        self._random = random.Random(seed)
        self._faults_expected = faults_expected

    async def run(self, requests: int, at_once: int) -> None:
        """So many requests, over new connections."""
        left = iter(range(requests))
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:

            async def worker() -> None:
                for _ in left:
                    await self._one(client)

            await asyncio.gather(*(worker() for _ in range(at_once)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        draw = self._random.choice(
            [self._completion] * 6 + [self._chat] * 4 + [self._structured, self._tool, self._mistake, self._elsewhere]
        )
        kind, path, body, expected = draw()
        # Some leave: at once, or in the middle of a stream.
        leave = self._random.choice([None, None, None, None, 0, 1, 2, 5]) if expected == 200 else None
        self.tally.asked[kind if leave is None else f"{kind}, left"] += 1
        try:
            if leave is not None and not body.get("stream"):
                async with asyncio.timeout(self._random.uniform(0, 0.2)):
                    await client.post(path, json=body)
                return
            await self._ask(client, kind, path, body, expected, leave)
        except TimeoutError:
            return  # it was the client that left
        except httpx.HTTPError as error:
            if not self._faults_expected:
                self.tally.wrong[f"{kind}: {error!r}"] += 1

    async def _ask(
        self, client: httpx.AsyncClient, kind: str, path: str, body: Any, expected: int, leave: int | None
    ) -> None:
        async with client.stream("POST", path, json=body) as response:
            status, last, lines = response.status_code, "", 0
            async for line in response.aiter_lines():
                lines += 1
                last = line or last
                if leave is not None and lines > 2 * leave:
                    return
        if self._faults_expected and (status >= 500 or '"error"' in last):
            return
        if status != expected:
            self.tally.wrong[f"{kind}: {status} instead of {expected}"] += 1
        elif status == 200 and body.get("stream") and last != "data: [DONE]":
            self.tally.wrong[f"{kind}: {LATE}{last[:200]}"] += 1

    def _text(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.choice([2, 8, 30, 120])))

    def _common(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": self._random.randint(1, 16)}
        body |= {"temperature": self._random.choice([0, 0.7, 1.3]), "stream": self._random.random() < 0.6}
        options: list[dict[str, Any]] = [
            {"n": 3},
            {"seed": self._random.randrange(1 << 40)},
            {"stop": [" the", "."]},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5},
            {"logit_bias": {"5": -100}},
            {"min_p": 0.1, "top_k": 20, "top_p": 0.9},
            {"stream": True, "stream_options": {"include_usage": True}},
            {"ignore_eos": True},
        ]
        for option in self._random.sample(options, self._random.randrange(3)):
            body |= option
        return body

    def _completion(self) -> tuple[str, str, dict[str, Any], int]:
        prompt = self._random.choice([self._text(), [self._text(), self._text()], [100, 200, 300] * 9])
        more = self._random.choice([{}, {"logprobs": 3}, {"echo": True, "logprobs": 1}])
        kind = " ".join(["completion", *more])
        return kind, "/v1/completions", {**self._common(), "prompt": prompt, **more}, 200

    def _chat(self) -> tuple[str, str, dict[str, Any], int]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self._text()}]
        more = self._random.choice([{}, {"logprobs": True, "top_logprobs": 2}])
        kind = " ".join(["chat", *more])
        return kind, "/v1/chat/completions", {**self._common(), "messages": messages, **more}, 200

    def _structured(self) -> tuple[str, str, dict[str, Any], int]:
        _, path, body, status = self._chat()
        values = [f"value {self._random.randrange(1000)}" for _ in range(5)]
        schema = self._random.choice([CITY, {"enum": values}])
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return "schema", path, {**body, "response_format": form}, status

    def _tool(self) -> tuple[str, str, dict[str, Any], int]:
        _, path, body, status = self._chat()
        return "tool", path, {**body, "tools": [TOOL], "tool_choice": "required"}, status

    def _mistake(self) -> tuple[str, str, dict[str, Any], int]:
        body = {"model": self._model, "prompt": "Hello", "max_tokens": 2} | self._random.choice(MISTAKES)
        return "mistake", "/v1/completions", body, 400

    def _elsewhere(self) -> tuple[str, str, dict[str, Any], int]:
        number = self._random.randrange(10**9)
        hello = {"model": self._model, "messages": [{"role": "user", "content": self._text()}], "max_tokens": 4}
        return self._random.choice(
            [
                ("nowhere", f"/v1/{number}", {}, 404),
                ("unknown model", "/v1/completions", {"model": f"m{number}", "prompt": "x"}, 404),
                ("tokenize", "/tokenize", {"model": self._model, "prompt": self._text()}, 200),
                ("messages", "/v1/messages", hello, 200),
                ("response", "/v1/responses", {"model": self._model, "input": "Hi", "max_output_tokens": 16}, 200),
            ]
        )
