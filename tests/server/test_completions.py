"""What /v1/completions gives back."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

ANSWER = " world, how are you?"


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_a_prompt_is_continued(server: Any, tokenizer: Tokenizer) -> None:
    server.script("Hello", ANSWER)
    body = server.complete("Hello", temperature=0, max_tokens=50, cache_salt="of its own")
    assert body["object"] == "text_completion"
    assert body["model"] == server.model
    assert body["id"].startswith("cmpl-")
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    prompt, words = (len(tokenizer.encode(text).ids) for text in ("Hello", ANSWER))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": words + 1,  # the end was generated too
        "total_tokens": prompt + words + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.case(63)
def test_the_finish_reason_is_length_only_when_the_answer_was_cut(server: Any, tokenizer: Tokenizer) -> None:
    natural = len(tokenizer.encode(ANSWER).ids)
    server.script("Hello", ANSWER)
    for limit, reason in ((1, "length"), (natural, "length"), (natural + 1, "stop"), (natural + 2, "stop")):
        for stream in (False, True):
            if stream:
                finish = server.events(prompt="Hello", max_tokens=limit)[-2]["choices"][0]["finish_reason"]
            else:
                finish = server.complete("Hello", max_tokens=limit)["choices"][0]["finish_reason"]
            assert finish == reason
    server.script("Nothing", [])
    body = server.complete("Nothing")
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.case(89)
def test_sixteen_tokens_unless_told_otherwise(server: Any) -> None:
    assert server.complete("Hello", ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert server.complete("Hello", ignore_eos=True, max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], ["Hello"]])
def test_a_list_of_one_is_one(server: Any, prompt: Any) -> None:
    assert len(server.complete(prompt)["choices"]) == 1


def test_ids_and_text_are_the_same_prompt(server: Any, tokenizer: Tokenizer) -> None:
    as_text = server.complete("The quick brown", temperature=0)
    as_ids = server.complete(tokenizer.encode("The quick brown").ids, temperature=0)
    assert as_text["choices"] == as_ids["choices"]
    assert as_text["usage"]["prompt_tokens"] == as_ids["usage"]["prompt_tokens"]


@pytest.mark.case(74)
def test_a_batch_is_answered_prompt_by_prompt(server: Any) -> None:
    prompts = ["One", "Two", "Three"]
    alone = [server.complete(prompt, temperature=0, n=2) for prompt in prompts]
    together = server.complete(prompts, temperature=0, n=2)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    texts = [choice["text"] for body in alone for choice in body["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(body["usage"][name] for body in alone)


@pytest.mark.case(74)
def test_choices_of_a_seed_differ_and_repeat(server: Any) -> None:
    first, second = (server.complete("Hello", seed=7, n=4, max_tokens=12) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert len({choice["text"] for choice in first["choices"]}) == 4
    assert first["usage"]["prompt_tokens"] == server.complete("Hello")["usage"]["prompt_tokens"]
    greedy = server.complete("Hello", temperature=0, n=3)["choices"]
    assert len({choice["text"] for choice in greedy}) == 1


def test_a_stream_says_what_the_whole_answer_says(server: Any) -> None:
    fields = {"prompt": ["Hello", "Yes and"], "seed": 3, "n": 2, "max_tokens": 30, "logprobs": 2, "stop": [" z", "qu"]}
    whole = server.complete(fields.pop("prompt"), **fields)
    events = server.events(prompt=["Hello", "Yes and"], **fields, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    for expected in whole["choices"]:
        index = expected["index"]
        assert joined([*events[:-2], "[DONE]"], index) == expected["text"]
        chunks = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert [chunk["finish_reason"] for chunk in chunks][-1] == expected["finish_reason"]
        assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for chunk in chunks for item in chunk["logprobs"][name]] == expected["logprobs"][name]
    usage = events[-2]["usage"]
    assert events[-2]["choices"] == []
    assert {**usage, "prompt_tokens_details": None} == {**whole["usage"], "prompt_tokens_details": None}
    assert all(event["usage"] is None for event in events[:-2])
    assert len({(event["id"], event["created"], event["model"]) for event in events[:-1]}) == 1


@pytest.mark.case(91)
def test_usage_is_streamed_only_when_asked_for(server: Any) -> None:
    for options in (None, {"include_usage": False}, {}):
        assert not any("usage" in event for event in server.events(prompt="Hello", stream_options=options)[:-1])
    counted = server.events(prompt="Hello", stream_options={"continuous_usage_stats": True})
    totals = [event["usage"]["completion_tokens"] for event in counted[:-1]]
    assert totals == sorted(totals)
    assert totals[-1] > totals[0] > 0


@pytest.mark.case(91)
def test_a_cached_prefix_is_told(server: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    server.complete(prompt, cache_salt="first")
    again = server.complete(prompt, cache_salt="first")["usage"]
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    other = server.complete(prompt, cache_salt="second")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("prompts", [["Hello", "Yes 👩‍🚀"], [[40, 41], [300, 301, 302]]])
def test_an_echo_puts_the_prompt_before_each_choice(server: Any, tokenizer: Tokenizer, prompts: Any) -> None:
    plain = server.complete(prompts, seed=1, n=2)
    echoed = server.complete(prompts, seed=1, n=2, echo=True)
    heads = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    expected = [heads[choice["index"] // 2] + choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in echoed["choices"]] == expected
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 70])
@pytest.mark.case(18, 61)
def test_an_echo_with_logprobs_scores_the_prompt(server: Any, length: int, max_tokens: int) -> None:
    prompt = [10 + number % 50 for number in range(length)]
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    first, again = (server.complete(prompt, **fields) for _ in range(2))
    assert first["choices"] == again["choices"]
    logprobs = first["choices"][0]["logprobs"]
    assert [len(values) for values in logprobs.values()] == [length + max_tokens] * 4
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    assert all(number < 0 for number in logprobs["token_logprobs"][1:])
    text = first["choices"][0]["text"]
    ends = [*logprobs["text_offset"][1:], len(text)]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert text[start:end] == token or "\ufffd" in text[start:end] or token.startswith("bytes:")
    assert first["usage"]["completion_tokens"] == max_tokens
    events = server.events(prompt=prompt, **fields)
    assert joined(events) == text
    chunks = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    assert [number for chunk in chunks for number in chunk["token_logprobs"]] == logprobs["token_logprobs"]


def test_an_echo_of_several_choices_scores_the_prompt_for_each(server: Any) -> None:
    body = server.complete(["The quick brown fox", "Yes"], echo=True, logprobs=0, n=3, seed=1, max_tokens=2)
    for choice in body["choices"]:
        first = body["choices"][0 if choice["index"] < 3 else 3]
        size = len(first["logprobs"]["tokens"]) - 2
        assert choice["logprobs"]["token_logprobs"][:size] == first["logprobs"]["token_logprobs"][:size]


@pytest.mark.case(60)
def test_logprobs_of_zero_are_the_tokens_own(server: Any) -> None:
    body = server.complete("Hello", logprobs=0, temperature=0, ignore_eos=True)
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 16
    own = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: number} for token, number in own]
    assert server.complete("Hello")["choices"][0]["logprobs"] is None
    several = server.complete("Hello", logprobs=3, temperature=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert several["token_logprobs"] == logprobs["token_logprobs"]
    assert all(3 <= len(top) <= 4 for top in several["top_logprobs"])
    for token, top in zip(several["tokens"], several["top_logprobs"], strict=True):
        assert token in top, "the token itself is always there"


def test_the_best_of_several_is_the_most_likely_one(server: Any) -> None:
    fields = {"seed": 5, "max_tokens": 6, "ignore_eos": True}
    every = server.complete("Hello", n=6, logprobs=0, **fields)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = server.complete("Hello", n=2, best_of=6, **fields)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 36, "all that was generated counts"


def test_token_ids_come_back_when_wanted(server: Any, tokenizer: Tokenizer) -> None:
    server.script("Hello", ANSWER)
    body = server.complete("Hello", max_tokens=50, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == tokenizer.encode("Hello").ids
    assert body["choices"][0]["token_ids"] == tokenizer.encode(ANSWER).ids
    events = server.events(prompt="Hello", max_tokens=50, return_token_ids=True)
    chunks = [choice for event in events[:-1] for choice in event["choices"]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == tokenizer.encode(ANSWER).ids
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_raw_prompts_may_hold_special_tokens(server: Any) -> None:
    assert server.complete("<|im_start|>")["usage"]["prompt_tokens"] == 1


def test_special_tokens_in_the_answer_are_shown_when_wanted(server: Any, tokenizer: Tokenizer) -> None:
    server.script("Hello", [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode("hi").ids])
    assert server.complete("Hello")["choices"][0]["text"] == "hi"
    assert server.complete("Hello", skip_special_tokens=False)["choices"][0]["text"] == "<|im_start|>hi"


def test_a_clients_own_stop_token_ends_the_answer(server: Any, tokenizer: Tokenizer) -> None:
    server.script("Hello", "one two three")
    two = tokenizer.encode(" two").ids[0]
    body = server.complete("Hello", stop_token_ids=[two])
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("one", two)
    body = server.complete("Hello", stop_token_ids=[two], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "one" + tokenizer.decode([two])
