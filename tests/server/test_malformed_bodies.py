"""Every malformed request gets a 400 that names the field, and the next request is served as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
OVER = 2**63

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    # prompts and token ids
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt"),
    ({"prompt": ["ok", 5]}, "prompt"),
    ({"prompt": [["ok"]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[-1]]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [OVER]}, "prompt"),
    ({"prompt": [2**64]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [None]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    # logprobs
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": 10**9}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    # n and best_of
    ({"best_of": 5_000_000}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"suffix": "the end"}, "suffix"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": HELLO * 5000}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "", "audio": {"id": "x"}}]}, "messages[1].audio"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[1].function_call",
    ),
    ({"messages": [{"role": "assistant", "content": "Hello"}]}, "messages"),  # the template's own refusal
    (
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2.5, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": "5", "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "ash", "format": "wav"}}, "audio"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"metadata": {"key": 5}}, "metadata.key"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
]
BAD_ANYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 5_000_000}, "n"),
    ({"n": "2"}, "n"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"AI": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": "5"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(5000)}}, "logit_bias"),
    ({"seed": OVER}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -OVER - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"seed": True}, "seed"),
    ({"top_k": 0.01}, "top_k"),
    ({"top_k": "5"}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["", " x"]}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "line\nbreak"}, "request_id"),
    ({"user": 5}, "user"),
    ({"user": "x" * 513}, "user"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 500_000}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"timings": "yes"}, "timings"),
    ({"temprature": 1}, "temprature"),  # what looks like a typo is one
    ({"max_new_tokens": 5}, "max_new_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS + BAD_ANYWHERE)
@pytest.mark.case(5, 6, 8, 9, 11, 13, 14, 29, 90)
def test_a_bad_completion_request_is_a_400_that_names_the_field(
    server: Any, fields: dict[str, Any], param: str
) -> None:
    response = server.post(COMPLETIONS, **{"prompt": "Hello", **fields})
    error = server.error(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS + BAD_ANYWHERE)
@pytest.mark.case(6, 8, 13, 29, 60, 83, 89)
def test_a_bad_chat_request_is_a_400_that_names_the_field(server: Any, fields: dict[str, Any], param: str) -> None:
    response = server.post(CHAT, **{"messages": HELLO, **fields})
    error = server.error(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.case(51)
def test_errors_come_before_any_event(server: Any, path: str) -> None:
    body = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": HELLO}
    response = server.post(path, **body, stream=True, n=0)
    assert server.error(response, 400)["param"] == "n"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_missing_field_is_named(server: Any, path: str) -> None:
    error = server.error(server.post(path), 400)
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert error["code"] == "missing_required_parameter"
    error = server.error(server.http.post(path, json={"prompt": "x", "messages": HELLO}), 400)
    assert error["param"] == "model"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'model': 1}",
        b'{"model": NaN}',
        b'{"temperature": 1e400}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a":' * 5000,
        b"\x1f\x8b\x08\x00",
    ],
)
@pytest.mark.case(86)
def test_what_is_not_a_json_object_is_a_400(server: Any, content: bytes) -> None:
    response = server.http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert server.error(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused(server: Any, kind: str) -> None:
    response = server.http.post(COMPLETIONS, content=b'{"model":"test"}', headers={"content-type": kind})
    assert server.error(response, 400)["code"] == "unsupported_content_type"


@pytest.mark.case(53)
def test_compressed_bodies_are_refused_unopened(server: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = server.http.post(COMPLETIONS, content=b"\x1f\x8b", headers=headers)
    assert server.error(response, 400)["code"] == "unsupported_content_encoding"


@pytest.mark.case(6)
def test_a_stream_beside_a_bad_request_is_not_disturbed(server: Any) -> None:
    alone = server.complete("Say yes", temperature=0, max_tokens=60, ignore_eos=True)
    server.runner.step_seconds = 0.002
    body = {"model": server.model, "prompt": "Say yes", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with server.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        for bias in ({"999999": 1}, {"AI": 1}, {"5": 1000}):
            assert server.post(prompt="x", logit_bias=bias).status_code == 400
        rest = "".join(lines)
    assert rest.endswith("data: [DONE]")
    server.runner.step_seconds = 0.0
    assert server.complete("Say yes", temperature=0, max_tokens=60, ignore_eos=True)["choices"] == alone["choices"]


@pytest.mark.case(14)
def test_whole_numbers_may_be_written_with_a_point(server: Any) -> None:
    assert server.complete("Hello", max_tokens=3.0, n=1.0, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert server.complete([5.0, 6], max_tokens=1)["usage"]["prompt_tokens"] == 2


@pytest.mark.case(89)
def test_null_means_not_given(server: Any) -> None:
    nulls = dict.fromkeys(
        ["n", "best_of", "temperature", "top_p", "stop", "seed", "logit_bias", "stream", "stream_options", "logprobs",
         "max_tokens", "echo", "suffix", "user", "presence_penalty", "frequency_penalty", "response_format"]
    )  # fmt: skip
    assert len(server.complete("Hello", **nulls)["choices"]) == 1
    nulls = dict.fromkeys(
        ["n", "temperature", "tools", "tool_choice", "functions", "metadata", "store", "logprobs", "top_logprobs",
         "max_completion_tokens", "modalities", "audio", "prediction", "service_tier", "reasoning_effort"]
    )  # fmt: skip
    assert len(server.chat("Hello", max_tokens=1, **nulls)["choices"]) == 1


def test_unknown_fields_are_named_in_a_header(server: Any) -> None:
    response = server.post(prompt="Hello", max_tokens=1, frobnicate=True, **{"é": 1, "x-ray": None})
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored"] == "frobnicate,x-ray"


def test_unknown_fields_inside_are_named_too(server: Any) -> None:
    echoed = {"role": "assistant", "content": "Hi", "annotations": [], "audio": None, "mood": "good", "refusal": None}
    response = server.post(CHAT, messages=[*HELLO, echoed, {**echoed, "x": 1}, *HELLO], max_tokens=1)
    assert response.headers["x-octavo-ignored"] == "messages[].mood,messages[].x"


def test_unknown_fields_far_inside_are_named_too(server: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "kind": "x"}}
    tool = {"type": "function", "cached": True, "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    response = server.post(CHAT, messages=messages, tools=[tool], max_tokens=1)
    assert set(response.headers["x-octavo-ignored"].split(",")) == {
        "tools[].cached",
        "messages[].tool_calls[].function.kind",
    }


@pytest.mark.parametrize(("fields", "param"), [
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x", "tool_call": [1]}]}, "messages[].tool_call"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {"a": 1}}}]},
     "tools[].function.parameter"),
])  # fmt: skip
def test_a_typo_inside_is_refused_too(server: Any, fields: dict[str, Any], param: str) -> None:
    error = server.error(server.post(CHAT, **{"messages": HELLO, **fields}), 400)
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert "Did you mean" in error["message"]


def test_a_strict_server_refuses_unknown_fields(serving: Any) -> None:
    with serving(server_limits={"strict_fields": True}) as server:
        error = server.error(server.post(prompt="Hello", frobnicate=True), 400)
        assert (error["param"], error["code"]) == ("frobnicate", "unknown_parameter")
        error = server.error(server.post(CHAT, messages=[{**HELLO[0], "mood": "good"}]), 400)
        assert error["param"] == "messages[].mood"


def test_a_typo_is_answered_with_what_was_meant(server: Any) -> None:
    assert "'max_tokens'" in server.error(server.post(prompt="Hello", max_token=5), 400)["message"]


@pytest.mark.case(11)
def test_every_legal_seed_is_taken_and_repeats(server: Any) -> None:
    texts = set()
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        answers = [server.complete("Hello", seed=seed, max_tokens=8)["choices"] for _ in range(2)]
        assert answers[0] == answers[1]
        texts.add(answers[0][0]["text"])
    assert len(texts) == 5
    unseeded = {server.complete("Hello", seed=None, max_tokens=8)["choices"][0]["text"] for _ in range(4)}
    assert len(unseeded) > 1


@pytest.mark.case(5)
def test_ids_of_padding_rows_are_served(server: Any, vocab_size: int) -> None:
    assert server.complete([vocab_size - 1], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert server.error(server.post(prompt=[vocab_size]), 400)["param"] == "prompt"
