"""The model's tokens as llguidance wants to know them. Built once, by the first request that needs it, in a worker
thread; used by several afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from server.structured.checker import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from server.detokenize import Decoding

# Texts whose tokens are masked at once where all of them may come; the short ones for strings near their `maxLength`.
_LETTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[ \n\r\t]+", *(f"{_LETTER}{{1,{most}}}" for most in (3, 6, 10, 20, 30)), f"{_LETTER}+"]


class Vocabulary(Tokens):
    """Bytes, special tokens and ends of a vocabulary. Ids without a token are never allowed.

    Called, it tokenises: where a grammar leaves but one way to go on, the tokens are those that the model's own
    tokenizer makes of that text inside another, if they spell it.
    """

    def __init__(self, tokenizer: Tokenizer, decoding: Decoding, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ValueError("a grammar needs a token that ends a text")
        self._special = decoding.special_ids
        special = sorted(token for token in self._special if token < vocab_size)
        super().__init__([decoding.bytes_of(token) for token in range(vocab_size)], special, eos_token_ids)
        self._tokenizer = tokenizer
        self._line_break: list[int] = tokenizer.encode("\n", add_special_tokens=False).ids

    def __call__(self, text: bytes | str) -> list[int]:
        spelled = text.encode() if isinstance(text, str) else text
        written = "\n" + spelled.decode("utf-8", "replace")  # behind something: some put a space before a text
        ids: list[int] = self._tokenizer.encode(written, add_special_tokens=False).ids
        own = ids[len(self._line_break) :]
        continues = ids[: len(self._line_break)] == self._line_break and self._special.isdisjoint(own)
        if continues and b"".join(self.tokens[id] for id in own) == spelled:
            return own
        return super().__call__(spelled)

    def for_checker(self, cpu_seconds: int, memory_bytes: int) -> dict[str, Any]:
        """The first line that the checker reads."""
        return {
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "special": self.special_token_ids,
            "eos": self.eos_token_ids,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
