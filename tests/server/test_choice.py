"""A choice's text, records and counts depend on its tokens, not on how many came at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scheduler.stream import TokenLogprob, Update
from server.choice import Choice, TextOptions
from server.detokenize import Decoding

TEXT = "The quick brown fox 👩‍🚀 jumps over the lazy dog, then stops."


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT.replace("👩‍🚀", "")], trainer)
    return tokenizer


TOKENIZER = _tokenizer()
DECODING = Decoding(TOKENIZER)
IDS = TOKENIZER.encode(TEXT).ids


def updates(ids: Sequence[int], cuts: Sequence[int], finish: str | None = "length") -> list[Update]:
    edges = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    groups = [list(ids[a:b]) for a, b in pairwise(edges)]
    return [
        Update(
            0,
            group,
            [TokenLogprob(-token / 100, ()) for token in group],
            finish_reason=finish if number == len(groups) - 1 else None,  # type: ignore[arg-type]
        )
        for number, group in enumerate(groups)
    ]


def outcome(given: Sequence[Update], **options: Any) -> tuple[Any, ...]:
    choice = Choice(0, TextOptions(logprobs=True, **options), DECODING.detokenizer(True))
    text, records, stop = "", [], None
    for update in given:
        if choice.finish_reason is not None:
            break
        delta = choice.take(update)
        text += delta.text
        records += delta.records
        stop = delta.stop
        assert all(record.offset <= len(text) for record in delta.records)
    return text, records, choice.finish_reason, stop, choice.completion_tokens


@pytest.mark.parametrize("stop", ["fox", "🚀", "quick brown", "s over", "e", "🚀 j", ".", "never"])
@pytest.mark.case(54)
def test_a_stop_cuts_the_text_wherever_tokens_are_cut(stop: str) -> None:
    one_by_one = outcome(updates(IDS, range(len(IDS))), stops=(stop,))
    at_once = outcome(updates(IDS, []), stops=(stop,))
    assert one_by_one == at_once
    text, records, reason, matched, counted = one_by_one
    if stop == "never":
        assert (text, reason, matched, counted) == (TEXT, "length", None, len(IDS))
        assert [record.token for record in records] == IDS
    else:
        assert text == TEXT[: TEXT.index(stop)]
        assert (reason, matched) == ("stop", stop)
        assert all(record.offset < len(text) for record in records)
        assert stop in TOKENIZER.decode(IDS[:counted])
        assert stop not in TOKENIZER.decode(IDS[: counted - 1]).removesuffix("\ufffd")


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, len(IDS)), max_size=12),
    st.lists(st.sampled_from([TEXT[i : i + n] for i in range(len(TEXT) - 4) for n in (1, 2, 4)]), max_size=3),
    st.integers(0, 20),
    st.booleans(),
)
def test_any_cut_of_the_tokens_gives_the_same(
    cuts: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    options = {"stops": tuple(stops), "min_tokens": min_tokens, "include_stop": include}
    assert outcome(updates(IDS, cuts), **options) == outcome(updates(IDS, range(len(IDS))), **options)


def test_the_stop_string_is_part_of_the_text_when_wanted() -> None:
    text, _, reason, stop, _ = outcome(updates(IDS, []), stops=("fox",), include_stop=True)
    assert (text, reason, stop) == ("The quick brown fox", "stop", "fox")


def test_the_first_min_tokens_tokens_are_not_searched_for_stops() -> None:
    place = len(TOKENIZER.encode("The quick brown fox").ids)
    text, *_ = outcome(updates(IDS, []), stops=("fox", "dog"), min_tokens=place)
    assert text == TEXT[: TEXT.index("dog")]


@pytest.mark.case(90)
def test_a_stop_that_is_the_first_token_leaves_nothing() -> None:
    first = TOKENIZER.decode(IDS[:1])
    assert outcome(updates(IDS, range(len(IDS))), stops=(first,))[0] == ""


def test_the_end_of_the_text_lets_out_what_a_stop_held_back() -> None:
    text, records, reason, stop, _ = outcome(updates(IDS, []), stops=("stops. And more",))
    assert (text, reason, stop) == (TEXT, "length", None)
    assert len(records) == len(IDS)


@pytest.mark.case(58)
def test_records_come_with_the_text_they_begin() -> None:
    choice = Choice(0, TextOptions(stops=("fox jumps",), logprobs=True), DECODING.detokenizer(True))
    for update in updates(IDS, range(len(IDS)), finish=None):
        delta = choice.take(update)
        if delta.text == "":
            assert delta.records == []


def test_a_stop_token_counts_and_a_clients_own_is_told() -> None:
    end = Update(0, finish_reason="stop", stop_token=5)
    assert outcome([*updates(IDS, [], None), end])[2:] == ("stop", None, len(IDS) + 1)
    assert outcome([*updates(IDS, [], None), end], stop_token_ids=frozenset({5}))[3] == 5


def test_offsets_begin_after_an_echoed_prompt() -> None:
    choice = Choice(0, TextOptions(logprobs=True, stops=("brown",)), DECODING.detokenizer(True), start=100)
    delta = choice.take(updates(IDS, [])[0])
    assert delta.records[0].offset == 100
    assert delta.text == "The quick "
    assert delta.records[-1].offset < 100 + len(delta.text)
