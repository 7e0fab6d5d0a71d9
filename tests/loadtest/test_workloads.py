"""The request sets: same seed, same prompts, for ever."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest

from loadtest.workloads import KINDS, make, manual_words

CORPUS = [f"word{index}" for index in range(4000)]

# Of the first 20 prompts with seed 3. A change here means that figures can no longer be compared with older ones.
FINGERPRINTS_OF_THE_CORPUS = {
    "single": "58eb47c2e2c79e77",
    "decode": "e53ad2a4bb39c3ed",
    "chat": "097d010ed55420dc",
    "prefix": "2f755a6ee70c7ab3",
    "prefill": "99cbbfea18fc3cce",
    "long": "3228c57b39015e4b",
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
