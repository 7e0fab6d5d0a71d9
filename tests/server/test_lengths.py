"""The policy on lengths: nothing is cut silently, and refusals have the numbers."""

from __future__ import annotations

from typing import Any

import pytest

LIMIT = 512


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.case(71)
def test_a_prompt_must_leave_room_for_one_token(server: Any, stream: bool) -> None:
    for length, served in ((LIMIT - 1, True), (LIMIT, False), (LIMIT + 1, False), (10 * LIMIT, False)):
        response = server.post(prompt=[5] * length, stream=stream, ignore_eos=True)
        if served:
            assert response.status_code == 200
            continue
        error = server.error(response, 400)
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert error["param"] == "prompt"
        assert f"{LIMIT} tokens" in error["message"]
        assert f"{length} tokens" in error["message"]


def test_the_last_place_in_the_context_is_used(server: Any) -> None:
    body = server.complete([5] * (LIMIT - 1), ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"], "never an empty answer"


def test_a_conversation_that_is_too_long_is_told_the_same(server: Any) -> None:
    content = "Hello world, how are you? " * 500
    response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], stream=True)
    error = server.error(response, 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f"{LIMIT} tokens" in error["message"]


def test_a_hopeless_text_is_refused_without_being_tokenised(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state.tokenizing, "_tokenizer", None)
    error = server.error(server.post(prompt="x" * 4_000_000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.case(88)
def test_an_answer_that_cannot_fit_is_refused_with_the_numbers(server: Any, field: str) -> None:
    if field == "max_tokens":
        prompt, fields = 12, {"prompt": [5] * 12}
        path = "/v1/completions"
    else:
        fields = {"messages": [{"role": "user", "content": "Hello"}]}
        path = "/v1/chat/completions"
        prompt = server.post(path, **fields, max_tokens=1).json()["usage"]["prompt_tokens"]
    for excess in (1, 10**12):
        error = server.error(server.post(path, **fields, **{field: LIMIT - prompt + excess}), 400)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        for number in (LIMIT, prompt, LIMIT + excess, LIMIT - prompt):
            assert str(number) in error["message"]
    body = server.post(path, **fields, **{field: LIMIT - prompt}, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == LIMIT


@pytest.mark.case(88)
def test_a_default_is_cut_to_the_room_there_is(server: Any) -> None:
    assert server.complete([5] * (LIMIT - 3), ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.case(72)
def test_prompts_are_cut_only_when_asked_for_and_it_shows(server: Any) -> None:
    ids = list(range(10, 310)) * 2
    body = server.complete(ids, truncate_prompt_tokens=20, return_token_ids=True, temperature=0)
    assert body["usage"]["prompt_tokens"] == 20
    assert body["choices"][0]["text"] == server.complete(ids[-20:], temperature=0)["choices"][0]["text"]
    body = server.complete(ids, truncate_prompt_tokens=-1, max_tokens=30, ignore_eos=True)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (LIMIT - 30, 30)
    body = server.complete("Hello " * 2000, truncate_prompt_tokens=10, echo=True, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 10
    assert len(body["choices"][0]["text"]) < 100


def test_one_prompt_too_long_refuses_the_whole_batch(server: Any) -> None:
    assert server.error(server.post(prompt=[[5], [5] * LIMIT]), 400)["param"] == "prompt"


def test_scoring_a_prompt_needs_no_room_beyond_it(server: Any) -> None:
    body = server.complete([5] * LIMIT, max_tokens=0, echo=True, logprobs=0)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == LIMIT
    assert server.complete("Hello", max_tokens=0, echo=True)["choices"][0]["text"] == "Hello"
