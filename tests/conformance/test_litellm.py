"""LiteLLM's calls, as OpenAI's and as Anthropic's API: streaming, tools and schemas."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

pytest.importorskip("litellm", reason="make conformance installs LiteLLM")

import litellm
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(BaseModel):
    name: Literal["Paris", "Madrid", "Rome"]
    capital: bool


@pytest.fixture(params=["openai", "anthropic"])
def complete(request: pytest.FixtureRequest, daemon: str) -> Any:
    base = f"{daemon}/v1" if request.param == "openai" else daemon

    def call(**fields: Any) -> Any:
        model = f"{request.param}/SmolLM2-135M-Instruct"
        options = {"api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 200, "num_retries": 0}
        return litellm.completion(model=model, **options, **fields)

    return call


def test_a_stream_says_what_the_whole_answer_says(complete: Any) -> None:
    whole = complete(messages=QUESTION)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(complete(messages=QUESTION, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 5


def test_a_tool_is_called(complete: Any) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    answer = complete(messages=question, **tools)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = list(complete(messages=question, **tools, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == json.loads(
        call.function.arguments
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}
    follow_up = complete(messages=[*question, answer.choices[0].message.model_dump(), result], tools=[WEATHER])
    assert follow_up.choices[0].message.content


def test_a_schema_is_followed(complete: Any) -> None:
    answer = complete(messages=[{"role": "user", "content": "Describe Paris."}], response_format=City)
    City.model_validate_json(answer.choices[0].message.content)
