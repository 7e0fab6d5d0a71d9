"""A tokenizer from a GGUF file's metadata.

Owner: whoever loads the model. Byte-level vocabularies of the families below are built directly, in a tenth of a
second; anything else is converted by transformers, in several, and kept in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from models.errors import CorruptModelError
from models.loading.converted_tokenizer import TokenizerParts, converted_tokenizer
from models.loading.gguf_config import CONTROL
from models.loading.gguf_file import GgufCheckpoint

USER_DEFINED = 4  # the token type of tokens that are matched whole and are not control tokens
SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of byte-level tokenizers cuts text before merging, as in its models' own tokenizer.json."""

    pattern: str | None = None  # None for GPT-2's
    single_digits: bool = False  # GPT-2's pattern after every digit was cut off
    compose: bool = False  # Unicode NFC first
    whole_words_first: bool = False  # a piece that is a token is not put together from merges
    add_bos: bool = False  # when the file does not say


FAMILIES = {
    "gpt-2": Family(),
    "smollm": Family(single_digits=True),
    "qwen2": Family(rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+|\p{{N}}|{_REST}", compose=True),
    "llama-bpe": Family(
        rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words_first=True, add_bos=True
    ),
    "tekken": Family(
        rf"{_LETTERS}[{_UPPER}]*[{_LOWER}]+|{_LETTERS}[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole_words_first=True,
        add_bos=True,
    ),
}


def gguf_tokenizer(checkpoint: GgufCheckpoint) -> TokenizerParts:
    """Raises CorruptModelError, UnsupportedModelError and CacheError."""
    stated = _Stated(checkpoint.metadata)
    family = FAMILIES.get(stated["pre"])
    if stated["model"] == "gpt2" and family and stated["merges"] is not None:
        tokenizer = _byte_level(checkpoint.path, stated, family)
    else:
        tokenizer = converted_tokenizer(checkpoint.fingerprint, str(checkpoint.path.parent), checkpoint.path.name)
    template = checkpoint.metadata.get("tokenizer.chat_template")
    special = {name: text for name, key in SPECIAL_KEYS.items() if (text := stated.special(key)) is not None}
    return TokenizerParts(tokenizer, template if isinstance(template, str) else None, special)


class _Stated:
    """What a file's metadata says of its tokenizer; None where it says nothing."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def __getitem__(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def special(self, key: str) -> str | None:
        token_id, tokens = self[f"{key}_token_id"], self["tokens"]
        in_range = isinstance(token_id, int) and isinstance(tokens, list) and token_id < len(tokens)
        return tokens[token_id] if in_range else None


def _byte_level(path: Path, stated: _Stated, family: Family) -> Tokenizer:
    tokens: list[str] = stated["tokens"]
    try:
        merges = [tuple(merge.split(" ", 1)) for merge in stated["merges"]]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=family.whole_words_first))
    except Exception as error:  # tokenizers raises nothing more precise
        raise CorruptModelError(f"{path}: its vocabulary is damaged ({error}).") from None
    if family.compose:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = ByteLevelDecoder()
    types = stated["token_type"]
    typed = [] if types is None else list(zip(tokens, types.tolist(), strict=False))
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [AddedToken(token, normalized=False, special=special) for token, own in typed if own == kind]
        tokenizer.add_tokens(added)
    # What the tokens of a text come between.
    add_bos = family.add_bos if stated["add_bos_token"] is None else stated["add_bos_token"]
    around = {"bos": stated.special("bos") if add_bos else None}
    around["eos"] = stated.special("eos") if stated["add_eos_token"] else None
    tokenizer.post_processor = TemplateProcessing(
        single=[token for token in (around["bos"], "$A", around["eos"]) if token is not None],
        special_tokens=[(token, stated[f"{key}_token_id"]) for key, token in around.items() if token is not None],
    )
    return tokenizer


def _pre_tokenizer(family: Family) -> PreTokenizer:
    if family.pattern:
        split = Split(Regex(family.pattern), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = ByteLevel(add_prefix_space=False)
    return Sequence([Digits(individual_digits=True), byte_level]) if family.single_digits else byte_level
