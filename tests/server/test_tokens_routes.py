"""What a prompt is in tokens: /tokenize, /detokenize and /v1/chat/completions/render."""

from __future__ import annotations

from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Hello world"}]


@pytest.mark.parametrize("text", ["Hello world", "", "<|im_end|>", "naïve 😀 text", " two  spaces\n"])
def test_text_to_tokens_and_back(server: Any, tokenizer: Any, text: str) -> None:
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == tokenizer.encode(text).ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == tokenizer.encode(text).tokens
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_the_model_may_be_left_out(server: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [40]})):
        assert server.http.post(path, json=body).status_code == 200
        assert server.http.post(path, json={**body, "model": None}).status_code == 200
        assert server.error(server.http.post(path, json={**body, "model": "other"}), 404)["param"] == "model"


def test_a_conversation_has_the_tokens_it_is_served_with(server: Any) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "chat_template_kwargs": {"mood": "gay"}}
    served = server.post("/v1/chat/completions", **fields, max_tokens=1, return_token_ids=True).json()
    answer = server.post("/tokenize", **fields).json()
    assert answer["tokens"] == served["prompt_token_ids"]
    assert answer["count"] == served["usage"]["prompt_tokens"]
    assert answer["token_strs"] is None
    bare = server.post("/tokenize", **fields, add_generation_prompt=False).json()
    assert answer["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < answer["count"]


def test_a_conversation_is_rendered_as_it_would_be_served(server: Any) -> None:
    fields = {"messages": HELLO, "temperature": 0.5, "seed": 3, "stop": "x", "max_tokens": 9, "request_id": "mine"}
    rendered = server.post("/v1/chat/completions/render", **fields).json()
    assert rendered["token_ids"] == server.post("/tokenize", messages=HELLO).json()["tokens"]
    assert rendered["prompt_text"] == "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["request_id"] == "mine"
    expected = {"temperature": 0.5, "seed": 3, "stop": ["x"], "max_tokens": 9, "n": 1, "top_k": 0}
    assert expected.items() <= rendered["sampling_params"].items()
    assert server.metric("octavo_requests_running") == 0


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "x", "promt": "y"}, "promt"), ("/detokenize", {}, "tokens"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "tokens"), ("/v1/chat/completions/render", {"messages": HELLO, "n": 0}, "n"),
    ("/v1/chat/completions/render", {"messages": HELLO, "max_tokens": 600}, "max_tokens"),
])  # fmt: skip
def test_what_is_wrong_is_named(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert server.error(server.post(path, **body), 400)["param"] == param


@pytest.mark.parametrize("request_id", [5, ["a"], "x" * 300_000])
def test_a_request_id_that_these_routes_do_not_have_is_ignored_and_said_to_be(server: Any, request_id: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = server.post(path, **body, request_id=request_id)
        assert answer.status_code == 200
        assert answer.headers["x-octavo-ignored"] == "request_id"
        assert len(answer.headers["x-request-id"]) < 50
