"""Tokens become text piece by piece, and the pieces are the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.detokenize import Decoding, byte_level_alphabet

TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "👨‍👩‍👧‍👦 family, 🇨🇿🇯🇵 flags, 👍🏽 skin",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "สวัสดีครับ มီ ကျေးဇူးတင်ပါတယ်",
    "龘䨻𠀀 日本語 한국어",
    "combining e\u0301 a\u0308 \u200b zero width",
    "line\nbreaks\r\n\tand tabs",
]


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with the mark of sentencepiece, and bytes for everything else."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ["▁", "▁Hello", "Hello", ",", "▁world", "!", "<s>", "</s>"]:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def pieces_of(decoding: Decoding, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = decoding.detokenizer(skip_special)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(Decoding(tokenizer), ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(text) or text.isascii(), "characters are spread over tokens, or this shows nothing"


@given(st.text())
@pytest.mark.case(56)
def test_any_text_comes_back_whole(text: str) -> None:
    tokenizer = shared_byte_level()
    assert "".join(pieces_of(Decoding(tokenizer), tokenizer.encode(text).ids)) == text


@given(st.lists(st.integers(0, 255)))
@pytest.mark.case(56)
def test_any_bytes_come_out_as_the_library_decodes_them(values: list[int]) -> None:
    tokenizer = shared_byte_level()
    assert "".join(pieces_of(Decoding(tokenizer), values)) == tokenizer.decode(values)


def test_a_character_that_is_cut_off_at_the_end_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🎉").ids[:-1]
    pieces = pieces_of(Decoding(tokenizer), ids)
    assert "".join(pieces) == "ok \ufffd" == tokenizer.decode(ids)
    assert pieces[-1] == "\ufffd", "held back until nothing more can come"


def test_special_tokens_are_left_out_unless_they_are_wanted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b").ids
    decoding = Decoding(tokenizer)
    assert "".join(pieces_of(decoding, ids)) == "ab"
    assert "".join(pieces_of(decoding, ids, skip_special=False)) == "a<|im_end|>b"


def test_a_special_token_inside_a_character_does_not_break_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é").ids
    broken = [ids[0], tokenizer.token_to_id("<|im_end|>"), *ids[1:]]
    assert len(ids) == 2
    assert "".join(pieces_of(Decoding(tokenizer), broken)) == "é" == tokenizer.decode(broken)


def test_ids_without_a_token_are_silent(tokenizer: Tokenizer, vocab_size: int) -> None:
    decoding = Decoding(tokenizer)
    assert pieces_of(decoding, [vocab_size - 1]) == ["", ""]
    assert decoding.bytes_of(vocab_size - 1) == b""


def test_bytes_in_place_of_unknown_characters_are_put_together() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.token_to_id("▁world"), *"é🎉".encode(), tokenizer.token_to_id("!")]
    decoding = Decoding(tokenizer)
    assert pieces_of(decoding, ids) == [" world", "", "é", "", "", "", "🎉", "!", ""]
    assert decoding.bytes_of(0xC3) == b"\xc3"
    assert decoding.bytes_of(tokenizer.token_to_id("▁world")) == b" world"


def test_tokenizers_whose_tokens_are_not_bytes_go_through_the_librarys_stream() -> None:
    tokenizer = Tokenizer(
        models.WordPiece({"un": 0, "##happi": 1, "##ness": 2, "is": 3, "[UNK]": 4}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    pieces = pieces_of(Decoding(tokenizer), [0, 1, 2, 3])
    assert "".join(pieces) == tokenizer.decode([0, 1, 2, 3]) == "unhappiness is"
    assert pieces[0] == "un"


@pytest.mark.case(57)
def test_the_true_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    decoding = Decoding(tokenizer)
    for text in TEXTS:
        assert b"".join(map(decoding.bytes_of, tokenizer.encode(text).ids)) == text.encode()


def test_a_token_costs_the_same_however_long_the_text_is(tokenizer: Tokenizer) -> None:
    """Counted, not timed: no token is looked up twice, and nothing is decoded again."""
    looked_up: list[int] = []

    class Counting(dict[int, bytes]):
        def __missing__(self, token: int) -> bytes:
            looked_up.append(token)
            self[token] = b"x"
            return b"x"

    decoding = Decoding(tokenizer)
    decoding._tables[decoding.special_ids] = Counting()  # type: ignore[assignment]
    detokenizer = decoding.detokenizer(True)
    assert [detokenizer.feed(token % 7) for token in range(5000)] == ["x"] * 5000
    assert len(looked_up) == 7


_BYTE_LEVEL: list[Tokenizer] = []


def shared_byte_level() -> Tokenizer:
    """A tokenizer whose ids are bytes."""
    if not _BYTE_LEVEL:
        tokenizer = Tokenizer(models.BPE(dict(byte_level_alphabet()), []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        _BYTE_LEVEL.append(tokenizer)
    return _BYTE_LEVEL[0]
