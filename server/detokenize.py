"""Token ids into text, as they come.

A token stands for bytes, and a character may be spread over several tokens. Bytes are looked up per token and pass
through an incremental UTF-8 decoder, so each token costs the same however long the text is, the pieces joined are the
decoding of all tokens at once, and U+FFFD appears only for bytes that are not UTF-8: an incomplete character is held
back until it is whole or the text ends. Tokenizers whose tokens are not bytes (WordPiece and the like) go through the
tokenizers library's own stream.

One `Detokenizer` per choice, used by the task that answers its request. `TokenTable` is shared and only ever adds
entries that every reader would compute alike. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Decoder parts that map each token to bytes by itself. Strip only drops the space sentencepiece puts before a text's
# first word, and what a model generates continues a text.
_BYTEWISE_PARTS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_WORD_START = "▁"

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable(dict[int, bytes]):
    """The bytes of each token id, filled as ids are met. Ids without a token (padding of the embedding) have none."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], *, byte_level: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._skipped = skipped
        self._byte_level = byte_level

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._bytes_of(token_id)
        return value

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = byte_level_alphabet()
            return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_WORD_START, " ").encode()


class ByteDetokenizer:
    """Text out of one sequence of tokens, for tokenizers whose tokens are bytes."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decode = _Utf8Decoder("replace").decode

    def feed(self, token: int) -> str:
        """The text that became certain with this token: often a word, empty inside a character."""
        return self._decode(self._table[token])

    def finish(self) -> str:
        """What was held back, as far as it can be shown."""
        return self._decode(b"", True)


class StreamDetokenizer:
    """The same for all other tokenizers."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._tokens: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def finish(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip_special)[self._shown :]


Detokenizer = ByteDetokenizer | StreamDetokenizer


class Decoding:
    """How a tokenizer's ids become text: makes detokenizers, and tells a token's bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._kind = _kind_of(tokenizer)
        self._tables: dict[frozenset[int], TokenTable] = {}  # by the tokens that are skipped

    def detokenizer(self, skip_special: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """For one new sequence of tokens. `shown` are special tokens that are not skipped."""
        if self._kind == "other":
            return StreamDetokenizer(self._tokenizer, skip_special and not shown)
        return ByteDetokenizer(self._table(self.special_ids - shown if skip_special else frozenset()))

    def ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """The texts that are tokens of their own, with their ids."""
        found = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: id for text, id in found.items() if id is not None}

    def _table(self, skipped: frozenset[int]) -> TokenTable:
        if skipped not in self._tables:
            self._tables[skipped] = TokenTable(self._tokenizer, skipped, byte_level=self._kind == "byte_level")
        return self._tables[skipped]

    def text_of(self, tokens: Iterable[int], skip_special: bool) -> str:
        """The text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special)
        return "".join(map(detokenizer.feed, tokens)) + detokenizer.finish()

    def bytes_of(self, token: int) -> bytes:
        """The true bytes of one token; a special token's are its name."""
        if self._kind == "other":
            return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
        return self._table(frozenset())[token]


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 for itself, the rest from U+0100 on
    (Radford et al.: Language Models are Unsupervised Multitask Learners, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


def _kind_of(tokenizer: Tokenizer) -> str:
    """ "byte_level", "bytewise" or "other", from the tokenizer's decoder."""
    if tokenizer.decoder is None:
        return "other"
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = {part["type"] for part in state.get("decoders", [state])}
    if parts == {"ByteLevel"}:
        return "byte_level"
    return "bytewise" if parts and parts <= _BYTEWISE_PARTS else "other"
