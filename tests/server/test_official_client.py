"""The official client, sync and async, with strict validation of everything it gets.

Streamed completions are the exception: the client's type for them has no null for a finish reason that is yet to come,
which is what everybody sends.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import anthropic
import openai
import pytest

from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import REFUSED
from server.protocol.completions import CompletionRequest
from server.protocol.fields import Fields
from server.protocol.messages import CountTokensRequest, MessageRequest
from server.protocol.responses import ResponseRequest

HELLO: Any = [{"role": "user", "content": "Hello"}]
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Hello world, how are you?"
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "It does.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def client(server: Any) -> Any:
    with server.openai() as client:
        yield client


@pytest.fixture
def lenient(server: Any) -> Any:
    with server.openai(strict=False) as client:
        yield client


def test_chat(server: Any, client: openai.OpenAI) -> None:
    server.script(PROMPT, ANSWER)
    answer = client.chat.completions.create(
        model=server.model, messages=HELLO, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].bytes == list(
        b"Hello"[: len(answer.choices[0].logprobs.content[0].token)]
    )
    assert answer._request_id is not None


def test_chat_streamed(server: Any, client: openai.OpenAI) -> None:
    server.script(PROMPT, ANSWER)
    stream = client.chat.completions.create(
        model=server.model, messages=HELLO, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
    )
    texts, finishes, usage = {0: "", 1: ""}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts == {0: ANSWER, 1: ANSWER}
    assert finishes == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.completion_tokens_details is not None


@pytest.mark.case(92)
def test_the_stream_helper_builds_the_message(server: Any, client: openai.OpenAI) -> None:
    for script in (ANSWER, ""):
        server.script(PROMPT, script)
        with client.chat.completions.stream(model=server.model, messages=HELLO, logprobs=True) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert final.choices[0].message.role == "assistant"
        assert final.choices[0].message.content == script
        assert final.choices[0].finish_reason == "stop"
        assert ("content.done" in kinds) == bool(script)


def test_completions(server: Any, client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    server.script("Hello", " world")
    answer = client.completions.create(model=server.model, prompt="Hello", max_tokens=20, logprobs=2, n=2)
    assert [choice.text for choice in answer.choices] == [" world", " world"]
    stream = lenient.completions.create(
        model=server.model, prompt=["Hello", "Hello"], max_tokens=20, logprobs=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: " world", 1: " world"}
    scored = client.completions.create(model=server.model, prompt="Hello", echo=True, max_tokens=0)
    assert scored.choices[0].text == "Hello"


def test_extensions_go_through_extra_body(server: Any, client: openai.OpenAI) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "cache_salt": "s",
    }
    answer = client.completions.create(model=server.model, prompt="Hello", max_tokens=3, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_models(server: Any, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [server.model, "test"]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nonsense")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(server: Any, client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=HELLO, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nonsense", messages=HELLO)
    server.runner.broken = RuntimeError()
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=server.model, messages=HELLO)
    server.runner.step_seconds = 0.01
    stream = lenient.completions.create(model=server.model, prompt="x", max_tokens=99, stream=True,
                                       extra_body={"ignore_eos": True})  # fmt: skip
    next(stream)
    server.runner.broken = RuntimeError()
    with pytest.raises(openai.APIError, match="failed while handling"):
        list(stream)


def test_the_wrong_key_is_an_authentication_error(serving: Any) -> None:
    with serving(api_keys=("right",)) as server, server.openai() as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="right").models.list().data


def test_many_at_once_from_the_async_client(server: Any) -> None:
    async def main() -> None:
        async with server.async_openai() as client:

            async def streamed(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=server.model, messages=HELLO, seed=seed, max_tokens=30, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def whole(seed: int) -> str:
                answer = await client.chat.completions.create(
                    model=server.model, messages=HELLO, seed=seed, max_tokens=30
                )
                return str(answer.choices[0].message.content)

            texts = await asyncio.gather(*map(streamed, range(16)), *map(whole, range(16)))
            assert texts[:16] == texts[16:]
            assert len(set(texts)) == 16

    asyncio.run(main())


def test_leaving_the_async_clients_stream_cancels(server: Any) -> None:
    server.runner.step_seconds = 0.01

    async def main() -> None:
        async with server.async_openai() as client:
            stream = await client.chat.completions.create(
                model=server.model, messages=HELLO, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(main())
    server.wait_until(lambda: server.engine.running == 0, 3.0)


def test_every_option_of_the_clients_is_honoured_or_refused_by_name() -> None:
    """None of them is unknown here, so that nothing they can send is silently ignored."""
    ours = openai.OpenAI(api_key="none")
    theirs = anthropic.Anthropic(api_key="none")
    routes: list[tuple[Any, type[Fields]]] = [
        (ours.completions.create, CompletionRequest),
        (ours.chat.completions.create, ChatCompletionRequest),
        (ours.responses.create, ResponseRequest),
        (theirs.messages.create, MessageRequest),
        (theirs.messages.count_tokens, CountTokensRequest),
    ]
    about_http = {"extra_headers", "extra_query", "extra_body", "timeout"}
    for create, request in routes:
        options = set(inspect.signature(create).parameters) - about_http
        assert len(options) > 10
        refused = {name for kind in request.__mro__ if kind in REFUSED for name in REFUSED[kind]}
        assert options - set(request.model_fields) - refused == set()


def test_options_in_every_combination_of_types(server: Any, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=HELLO, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"40": 1},
        logprobs=True, top_logprobs=1, max_completion_tokens=5, metadata={"a": "b"}, modalities=["text"], n=2,
        parallel_tool_calls=True, reasoning_effort="low", response_format={"type": "text"}, safety_identifier="s",
        seed=5, service_tier="auto", stop=["zzz"], store=False, temperature=0.7, tool_choice="none", top_p=0.9,
        user="u", prompt_cache_key="k", verbosity="medium", tools=[TOOL],
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert answer.service_tier == "default"
    text = client.completions.create(
        model=server.model, prompt="Hello", best_of=3, frequency_penalty=0.5, presence_penalty=0.5,
        echo=False, logit_bias={"40": 1}, logprobs=2, max_tokens=4, n=2, seed=5, stop=["zzz"], suffix="",
        temperature=0.5, top_p=0.9, user="u",
    )  # fmt: skip
    assert len(text.choices) == 2
    response = client.responses.create(
        model=server.model, input="Hello", include=["message.output_text.logprobs"], instructions="Be kind.",
        max_output_tokens=5, max_tool_calls=3, metadata={"a": "b"}, parallel_tool_calls=False, prompt_cache_key="k",
        reasoning={"effort": "low"}, safety_identifier="s", service_tier="auto", store=True, temperature=0.5,
        text={"format": {"type": "text"}, "verbosity": "medium"}, tool_choice="none", top_logprobs=2, top_p=0.9,
        tools=[{"type": "function", **TOOL["function"], "strict": None}], truncation="disabled", user="u",
    )  # fmt: skip
    assert response.metadata == {"a": "b"}
    assert response.tools[0].type == "function"
    assert response.user == "u"
