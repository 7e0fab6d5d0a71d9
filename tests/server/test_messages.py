"""/v1/messages with Anthropic's own client, strictly validated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

PATH = "/v1/messages"
ANSWER = "Hello world, how are you?"
HELLO: Any = [{"role": "user", "content": "Hello"}]


def prompt(*turns: tuple[str, str]) -> str:
    written = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
    return "".join([*written, "<|im_start|>assistant\n"])


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    options: dict[str, Any] = {"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 20}
    with anthropic.Anthropic(**options, _strict_response_validation=True) as client:
        yield client


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    return dict(body["error"])


def test_a_message_is_answered(server: Any, client: anthropic.Anthropic) -> None:
    server.script(prompt(("system", "Be kind."), ("user", "Hello")), ANSWER)
    message = client.messages.create(model=server.model, max_tokens=50, messages=HELLO, system="Be kind.")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ANSWER}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    again = client.messages.create(model=server.model, max_tokens=50, messages=HELLO, system="Be kind.")
    assert again.usage.cache_read_input_tokens
    assert message._request_id
    first, second = (m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in (message, again))
    assert first == second
    assert message.usage.output_tokens == again.usage.output_tokens > 0


def test_blocks_become_the_conversation(server: Any, client: anthropic.Anthropic) -> None:
    called = 'So.\n<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>'
    server.script(prompt(("system", "One\ntwo"), ("user", "Hello\nworld"), ("assistant", called),
                         ("user", "<tool_response>\n42\n</tool_response>"), ("user", "Well?")), ANSWER)  # fmt: skip
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "world"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    system: Any = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    fields: Any = {"model": server.model, "messages": messages, "system": system}
    message = client.messages.create(**fields, max_tokens=50)
    assert message.content[0].to_dict()["text"] == ANSWER
    found = message.usage.cache_read_input_tokens or 0
    assert client.messages.count_tokens(**fields).input_tokens == message.usage.input_tokens + found


def test_counting_refuses_what_only_messages_have_by_its_name(server: Any) -> None:
    body = {"model": server.model, "messages": HELLO}
    refused = error(server.http.post(f"{PATH}/count_tokens", json={**body, "max_tokens": 5}), 400)
    assert refused["message"] == "'max_tokens' is not supported: it is a field of /v1/messages."
    assert server.http.post(PATH, json={**body, "max_tokens": 5}).status_code == 200


def test_the_client_may_begin_the_answer(server: Any, client: anthropic.Anthropic) -> None:
    server.script("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello", " world")
    messages = [*HELLO, {"role": "assistant", "content": "Hello"}]
    message = client.messages.create(model=server.model, max_tokens=50, messages=messages)
    assert message.content[0].to_dict()["text"] == " world"


def test_why_it_stopped(server: Any, client: anthropic.Anthropic) -> None:
    server.script(prompt(("user", "Hello")), ANSWER)
    cut = client.messages.create(model=server.model, max_tokens=2, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(model=server.model, max_tokens=50, messages=HELLO, stop_sequences=["how", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "how")
    assert stopped.content[0].to_dict()["text"] == "Hello world, "


def test_a_stream_says_the_same(server: Any, client: anthropic.Anthropic) -> None:
    for script in (ANSWER, ""):
        server.script(prompt(("user", "Hello")), script)
        fields: Any = {"model": server.model, "max_tokens": 50, "messages": HELLO, "stop_sequences": ["you"]}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert final.content[0].to_dict() == whole.content[0].to_dict()
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"


def test_a_stream_has_anthropics_events_in_order(server: Any) -> None:
    server.script(prompt(("user", "Hello")), ANSWER)
    response = server.post(PATH, max_tokens=50, messages=HELLO, stream=True)
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    assert [f"event: {event['type']}" for event in events] == [block.split("\n")[0] for block in blocks]
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == ANSWER


def test_extensions_are_taken(server: Any) -> None:
    fields = {"max_tokens": 9, "messages": HELLO, "seed": 3, "min_p": 0.1, "top_k": 4, "ignore_eos": True}
    first, second = (server.post(PATH, **fields).json() for _ in range(2))
    assert first["content"] == second["content"]
    assert first["usage"]["output_tokens"] == 9


def test_a_failure_in_a_stream_is_an_error_event(server: Any, client: anthropic.Anthropic) -> None:
    server.runner.step_seconds = 0.01
    fields: Any = {"model": server.model, "max_tokens": 200, "messages": HELLO, "extra_body": {"ignore_eos": True}}
    stream = client.messages.create(**fields, stream=True)
    next(stream)
    server.runner.broken = RuntimeError()
    with pytest.raises(anthropic.APIError, match="failed while handling"):
        list(stream)


@pytest.mark.parametrize(("fields", "names"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": None}, "messages"), ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [5]}]}]},
     "messages[0].content[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]}]},
     "messages[0].content[0].name"),
    ({"max_tokens": 600}, "maximum context length is 512"), ({"temperature": 3}, "temperature"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0]"),
    ({"prefill": "x"}, "prefill"), ({"stop": "x"}, "stop"), ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"), ({"max_token": 5}, "max_tokens"),
])  # fmt: skip
def test_what_is_wrong_is_named(server: Any, fields: dict[str, Any], names: str) -> None:
    response = server.post(PATH, **{"max_tokens": 5, "messages": HELLO, **fields})
    said = error(response, 400)
    assert said["type"] == "invalid_request_error"
    assert names in said["message"]


def test_other_failures_have_anthropics_form(server: Any) -> None:
    body = {"model": "other", "max_tokens": 5, "messages": HELLO}
    assert error(server.http.post(PATH, json=body), 404)["type"] == "not_found_error"
    assert error(server.http.get(PATH), 405)["type"] == "invalid_request_error"
    assert error(server.http.post(PATH, content=b"{"), 400)["type"] == "invalid_request_error"
    assert error(server.http.post(PATH, content=b" " * 17_000_000), 413)["type"] == "request_too_large"
    server.runner.broken = RuntimeError()
    assert error(server.post(PATH, max_tokens=5, messages=HELLO), 500)["type"] == "api_error"


def test_the_key_is_the_clients_own(serving: Any) -> None:
    with serving(api_keys=("right",)) as server:
        fields: Any = {"model": server.model, "max_tokens": 3, "messages": HELLO}
        with anthropic.Anthropic(base_url=server.url, api_key="right") as client:
            assert client.messages.create(**fields).role == "assistant"
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(**fields)
