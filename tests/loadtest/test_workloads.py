"""The request sets: same seed, same prompts, for ever."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path

import pytest

from loadtest.workloads import KINDS, leaving, make, manual_words, sharegpt, trace

CORPUS = [f"word{index}" for index in range(4000)]

# Of the first 20 prompts with seed 3. A change here means that figures can no longer be compared with older ones.
FINGERPRINTS_OF_THE_CORPUS = {
    "single": "58eb47c2e2c79e77",
    "decode": "e53ad2a4bb39c3ed",
    "chat": "097d010ed55420dc",
    "prefix": "2f755a6ee70c7ab3",
    "prefill": "99cbbfea18fc3cce",
    "long": "3228c57b39015e4b",
    "turns": "4dc61234ab043c3f",
}
# The same on the manual of Python 3.11; other versions have other manuals.
FINGERPRINT_OF_THE_MANUAL = "fa68fce20fdc8be1"
FINGERPRINTS_ON_THE_MANUAL = {
    "single": "9660a53b659b5104",
    "decode": "859999d212a5b154",
    "chat": "8dae141ed68820e7",
    "prefix": "b2cc00b9a5c26bef",
    "prefill": "0ae597fcd0528f44",
    "long": "d478a6b3a50d490c",
    "turns": "6b52c50a5f51a0c0",
}


def fingerprint(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def drawn(kind: str, words: list[str] | None = None) -> str:
    return repr([(prompt.prompt, prompt.max_tokens) for prompt in make(kind, 20, 3, words)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_never_changes(kind: str) -> None:
    assert fingerprint(drawn(kind, CORPUS)) == FINGERPRINTS_OF_THE_CORPUS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_drawn_from_the_manual_never_changes(kind: str) -> None:
    if fingerprint(" ".join(manual_words())) != FINGERPRINT_OF_THE_MANUAL:
        pytest.skip("this version of Python has another manual")
    assert fingerprint(drawn(kind)) == FINGERPRINTS_ON_THE_MANUAL[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_set_begins_with_the_shorter_one(kind: str) -> None:
    assert list(islice(make(kind, 30), 5)) == list(make(kind, 5))


def test_another_seed_gives_other_prompts() -> None:
    assert list(make("chat", 3, seed=1)) != list(make("chat", 3, seed=2))


def test_requests_of_the_prefix_set_share_one_of_five_beginnings() -> None:
    beginnings = {" ".join(prompt.prompt.split()[:1000]) for prompt in make("prefix", 40)}
    assert len(beginnings) == 5


def test_a_kind_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        next(make("nonsense", 1))


def test_a_conversation_has_four_turns() -> None:
    [first] = make("turns", 1)
    turns = [first]
    while turns[-1].then is not None:
        turns.append(turns[-1].then)
    assert len({turn.prompt for turn in turns}) == 4


def test_a_file_as_sharegpt_has_them_becomes_what_people_said(tmp_path: Path) -> None:
    def said(*turns: tuple[str, str]) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}

    path = tmp_path / "conversations.json"
    talk = said(("human", "Hello"), ("gpt", "one two three"), ("human", "More"), ("gpt", "four"))
    path.write_text(json.dumps([talk, said(("gpt", "nobody asked")), said(("human", "Hi"), ("gpt", "yes"))]))
    first, second = sharegpt(path, 5)
    assert (first.prompt, first.max_tokens, second.prompt) == ("Hello", 4, "Hi")
    assert first.then is not None
    assert (first.then.prompt, first.then.max_tokens, first.then.then) == ("More", 1, None)
    assert len(sharegpt(path, 1)) == 1
    path.write_text('[{"messages": []}]')
    with pytest.raises(ValueError, match="not a list of conversations"):
        sharegpt(path, 1)


def test_requests_of_a_trace_come_when_they_came_and_share_what_they_shared(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": [1, 3]},
        {"timestamp": 3000, "input_length": 100, "output_length": 7},
        {"timestamp": 3000, "prompt": "as it is", "output_length": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts, due = trace(path, 9, CORPUS)
    assert due == [0, 0.5, 2, 2]
    assert [prompt.max_tokens for prompt in prompts] == [5, 1, 7, 7]
    long, other, short, given = (prompt.prompt.split() for prompt in prompts)
    assert (len(long), len(other), len(short), given) == (768, 450, 75, ["as", "it", "is"])
    assert long[:384] == other[:384]
    assert long[384:450] != other[384:]
    path.write_text('{"timestamp": 1}')
    with pytest.raises(ValueError, match="line 1, is not a request"):
        trace(path, 9, CORPUS)


def test_a_share_of_the_clients_leaves_before_the_end() -> None:
    prompts = list(make("decode", 200))
    left = [prompt for prompt in leaving(prompts, 0.3, seed=1) if prompt.leave_after is not None]
    assert 40 < len(left) < 80
    assert all(1 <= (prompt.leave_after or 0) <= prompt.max_tokens for prompt in left)
    assert leaving(prompts, 0.0, seed=1) == prompts
