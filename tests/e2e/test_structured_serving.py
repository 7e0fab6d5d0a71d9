"""The real daemon on the default model, kept to schemas and made to call functions.

`RANDOM_SCHEMAS` says how many random schemas are tried; `make schemas` tries 500.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from support.schemas import random_schema, validate

MODEL = "SmolLM2-135M-Instruct"
SCHEMAS = int(os.environ.get("RANDOM_SCHEMAS", "24"))

pytestmark = pytest.mark.e2e

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 1000} for name in ("a", "b")},
    "required": ["a", "b"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather now.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "description": "A sum.", "parameters": ADD}},
]


@contextmanager
def daemon() -> Iterator[str]:
    """A daemon of one's own; its URL."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--kv-memory", "512MiB"]
    command += ["--max-queue-delay", "inf", "--log-level", "warning"]  # a slow machine refuses nobody
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(180, process.kill)  # a first start compiles the kernels
        watchdog.start()
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("ready in")), "")
        watchdog.cancel()
        watchdog.join()
        try:
            assert ready
            yield ready.split()[-1]
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with daemon() as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def ask(url: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, **fields}, timeout=300)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_models_answers_to_random_schemas_are_valid_unless_cut(url: str) -> None:
    def outcome(number: int) -> str:
        schema = random_schema(random.Random(number))
        task = "An example of JSON with this schema: " + json.dumps(schema, ensure_ascii=False)[:3000]
        choice = ask(
            url,
            messages=[{"role": "user", "content": task}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            temperature=number % 3 / 2,
            seed=number,
            max_tokens=200,
        )["choices"][0]
        text = choice["message"]["content"]
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', "s", text)
        assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 12
        if choice["finish_reason"] == "length":
            return "cut"
        assert choice["finish_reason"] == "stop"
        try:
            validate(schema, text)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"invalid: schema {number}, {error}"
        return "valid"

    with ThreadPoolExecutor(16) as threads:
        outcomes = Counter(threads.map(outcome, range(SCHEMAS)))
    print(f"\n{SCHEMAS} random schemas:", dict(outcomes))
    assert outcomes.keys() <= {"valid", "cut"}
    assert outcomes["valid"] > SCHEMAS / 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.case(66)
def test_small_talk_is_answered_by_a_valid_call_when_one_is_required(client: openai.OpenAI, choice: Any) -> None:
    for seed, question in enumerate(["Hello, how are you?", "What is the weather in Paris?"]):
        options: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "tools": TOOLS,
            "tool_choice": choice,
            "seed": seed,
            "max_tokens": 300,
            "parallel_tool_calls": False,
        }
        answer = client.chat.completions.create(**options).choices[0]
        assert answer.message.content is None
        assert answer.message.tool_calls
        for call in answer.message.tool_calls:
            schema = WEATHER if call.function.name == "get_weather" else ADD  # type: ignore[union-attr]
            jsonschema.validate(json.loads(call.function.arguments), schema)  # type: ignore[union-attr]
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == answer.finish_reason
        assert streamed.message.tool_calls
        assert [call.function.arguments for call in streamed.message.tool_calls] == [
            call.function.arguments  # type: ignore[union-attr]
            for call in answer.message.tool_calls
        ]


def test_a_seeded_answer_is_the_same_after_a_restart(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    messages = [{"role": "user", "content": "What is the weather like?"}]

    def asked(url: str) -> list[Any]:
        fields: dict[str, Any] = {"messages": messages, "seed": -(2**63), "max_tokens": 30, "logprobs": True}
        return [ask(url, **fields)["choices"], ask(url, **fields, n=2, response_format=form)["choices"]]

    before = asked(url)
    with daemon() as again:
        assert asked(again) == before


def test_constrained_neighbours_change_no_bit_of_an_answer(url: str) -> None:
    def plain(number: int) -> Any:
        content = f"Tell me {number} things about the sea."
        fields = {"seed": number, "temperature": number % 2, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
        return ask(url, messages=[{"role": "user", "content": content}], **fields)["choices"]

    def constrained(number: int) -> Any:
        schema = random_schema(random.Random(number))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "Some JSON, please."}]
        return ask(url, messages=messages, seed=number, max_tokens=40, response_format=form)["choices"]

    alone = [(plain(number), constrained(number)) for number in range(3)]
    with ThreadPoolExecutor(8) as threads:
        free = [threads.submit(plain, number) for number in range(3)]
        kept = [threads.submit(constrained, number) for number in range(3)]
        together = [(one.result(), other.result()) for one, other in zip(free, kept, strict=True)]
    assert together == alone
