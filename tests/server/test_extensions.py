"""The extensions that other servers have too: forbidden and allowed tokens, logprobs of the prompt, timings."""

from __future__ import annotations

from typing import Any

import pytest

PATHS = ["/v1/completions", "/v1/chat/completions"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "Hello"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hello"}]}
    return {**prompt, "return_token_ids": True, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tokens_are_chosen(server: Any, path: str, stream: bool) -> None:
    fields = body(path, allowed_token_ids=[40, 50, 60, 50], max_tokens=20, n=2)
    if stream:
        tokens = [t for event in server.events(path, **fields)[:-1] for c in event["choices"]
                  for t in c.get("token_ids", [])]  # fmt: skip
    else:
        tokens = [t for choice in server.post(path, **fields).json()["choices"] for t in choice["token_ids"]]
    assert len(tokens) == 40
    assert set(tokens) <= {40, 50, 60}


def test_an_answer_of_allowed_ends_is_an_end(server: Any, tokenizer: Any) -> None:
    [choice] = server.complete("Hello", allowed_token_ids=[tokenizer.token_to_id("<|im_end|>")])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("path", PATHS)
def test_allowed_tokens_and_a_form_exclude_each_other(server: Any, path: str) -> None:
    """What is allowed by both may be nothing at all."""
    fields = body(path, allowed_token_ids=[40], response_format={"type": "json_object"})
    assert server.error(server.post(path, **fields), 400)["param"] == "allowed_token_ids"


@pytest.mark.parametrize("path", PATHS)
def test_bad_words_do_not_appear(server: Any, path: str, tokenizer: Any) -> None:
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    script = " the lazy dog. The quick brown fox is zany over the lazy dog"
    server.script("Hello" if path == PATHS[0] else rendered, script)
    plain = server.post(path, **body(path, max_tokens=60)).json()["choices"][0]
    assert "lazy" in str(plain)
    assert len(tokenizer.encode(" zany").ids) > 1, "a word of several tokens"
    bad = server.post(path, **body(path, max_tokens=60, bad_words=["lazy", "zany"])).json()["choices"][0]
    assert "lazy" not in str(bad)
    assert "zany" not in str(bad)
    assert bad["token_ids"][0] == plain["token_ids"][0]


def test_prompt_logprobs_are_those_of_echo(server: Any) -> None:
    echoed = server.complete("Hello world", echo=True, logprobs=2, max_tokens=1)["choices"][0]["logprobs"]
    answer = server.complete("Hello world", prompt_logprobs=2, max_tokens=1)
    [first, *scores] = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(scores) == answer["usage"]["prompt_tokens"] - 1
    numbers = []
    for token, score in zip(echoed["tokens"][1:], scores, strict=False):
        [(own, entry)] = [(id, e) for id, e in score.items() if e["decoded_token"] == token][:1]
        assert own.isdecimal()
        numbers.append(entry["logprob"])
        assert [e["rank"] for e in score.values()] in ([1, 2], [1, 2, None])
    assert numbers == echoed["token_logprobs"][1 : len(numbers) + 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["text"] != "Hello world"


def test_prompt_logprobs_go_with_everything(server: Any) -> None:
    fields = {"prompt_logprobs": 0, "logprobs": 3, "echo": True, "n": 2, "max_tokens": 3, "seed": 1}
    choices = server.complete([[41, 42], [40, 50, 60]], **fields)["choices"]
    assert ["prompt_logprobs" in choice for choice in choices] == [True, False, True, False]
    assert [list(score) for score in choices[2]["prompt_logprobs"][1:]] == [["50"], ["60"]]
    plain = server.complete([[41, 42], [40, 50, 60]], **{**fields, "prompt_logprobs": None})["choices"]
    assert [choice["logprobs"] for choice in choices] == [choice["logprobs"] for choice in plain]
    scored = server.complete("Hello", prompt_logprobs=1, max_tokens=0)
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["text"] == ""
    answer = server.chat("Hello", prompt_logprobs=1, max_tokens=2, truncate_prompt_tokens=5)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("path", PATHS)
def test_timings_say_where_the_time_went(server: Any, path: str) -> None:
    server.runner.step_seconds = 0.01
    fields = body(path, max_tokens=5, ignore_eos=True, timings=True)
    for _ in range(2):  # the second finds the prompt in the cache
        answer = server.post(path, **fields).json()
        timings = answer["timings"]
        assert timings["predicted_n"] == 5
        assert timings["cache_n"] + timings["prompt_n"] == answer["usage"]["prompt_tokens"]
        assert timings["cache_n"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert timings["queue_ms"] >= 0
        assert 10 <= timings["prompt_ms"] < 5000
        assert 40 <= timings["predicted_ms"] < 5000
        assert timings["predicted_per_second"] == pytest.approx(4e3 / timings["predicted_ms"])
    for options, fewest in ((None, set()), ({"include_usage": True}, {"usage"})):
        *events, last, done = server.events(path, **fields, stream_options=options)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert {"timings", *fewest} <= set(last)
        assert all("timings" not in event for event in events)
    assert "timings" not in server.post(path, **body(path, max_tokens=1)).json()
