"""LangChain's client for OpenAI: streaming, tools and schemas, on both of the APIs that it speaks."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("langchain_openai", reason="make conformance installs LangChain")

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

QUESTION = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Madrid", "Rome"]
    country: Literal["France", "Spain", "Italy"]
    capital: bool


@tool
def weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city."""
    return f"18 {unit} in {city}"


@pytest.fixture(params=[False, True], ids=["chat completions", "responses"])
def chat(request: pytest.FixtureRequest, daemon: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="SmolLM2-135M-Instruct", base_url=f"{daemon}/v1", api_key=SecretStr("none"), temperature=0,
        max_completion_tokens=200, stream_usage=True, use_responses_api=request.param, max_retries=0,
    )  # fmt: skip


def test_a_stream_says_what_the_whole_answer_says(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    chunks: list[Any] = list(chat.stream(QUESTION))
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == whole.text
    total = sum(chunks[1:], start=chunks[0])
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_tool_is_called(chat: ChatOpenAI, choice: str) -> None:
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    [call] = bound.invoke("What is the weather in Paris in celsius?").tool_calls
    assert call["name"] == "weather"
    assert set(call["args"]) == {"city", "unit"}
    assert call["args"]["unit"] in ("celsius", "fahrenheit")
    chunks: list[Any] = list(bound.stream("What is the weather in Paris in celsius?"))
    [streamed] = sum(chunks[1:], start=chunks[0]).tool_calls
    assert (streamed["name"], streamed["args"]) == ("weather", call["args"])


def test_a_tools_result_is_read(chat: ChatOpenAI) -> None:
    messages: list[Any] = [("user", "What is the weather in Paris in celsius?")]
    asked = chat.bind_tools([weather], tool_choice="any").invoke(messages)
    messages += [asked, *[weather.invoke(call) for call in asked.tool_calls]]
    assert chat.bind_tools([weather], tool_choice="none").invoke(messages).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_is_followed(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    city: Any = chat.with_structured_output(City, method=method).invoke("Describe Paris.")
    assert isinstance(city, City)
