"""Text into token ids, in worker threads.

The event loop awaits; a small pool of threads renders templates and runs the tokenizer, which releases the GIL. The
tokenizer is never changed once built (its settings are shared by every thread that uses it): encoding that must not see
special tokens has a tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from tokenizers import Tokenizer

from server.chat_template import MARK_END, MARK_START, ChatTemplate
from server.detokenize import Decoding
from server.errors import ContextOverflow, InvalidRequest

T = TypeVar("T")

_MARKED = re.compile(f"{MARK_START}([^{MARK_END}]*){MARK_END}|[{MARK_START}{MARK_END}]")


class Tokenizing:
    """Everything between text and ids for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.decoding = Decoding(tokenizer)
        self._control_ids = self.decoding.special_ids
        self.template: ChatTemplate | None = None
        if chat_template:
            added = tokenizer.get_added_tokens_decoder()
            control = [added[token_id].content for token_id in self._control_ids]
            self.template = ChatTemplate(chat_template, named_tokens or {}, control)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        """Let the threads end; what they are doing is abandoned."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def encode(self, text: str, *, add_special_tokens: bool, truncates: bool = False) -> list[int]:
        """The ids of a raw prompt. Special tokens written in it are special tokens.

        Raises ContextOverflow, without tokenising, for a text too long for the context however it is cut into tokens.
        """
        if not truncates:
            self._refuse_hopeless(text, "prompt")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def names_of(self, tokens: Sequence[int]) -> list[str | None]:
        """What the tokenizer calls each of these tokens; None for padding of the embedding."""
        return list(map(self._tokenizer.id_to_token, tokens))

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The runs of tokens that spell these words inside a text, with and without a space before them."""
        spelled = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(self._continued(self._tokenizer, spelling)) for spelling in spelled))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool,
        truncates: bool = False,
        **rendering: Any,
    ) -> list[int]:
        """The ids of a conversation, by what `ChatTemplate.render` takes. Special tokens written in its contents stay
        text."""
        if self.template is None:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        text = self.template.render(messages, **rendering)
        if not truncates:
            self._refuse_hopeless(text, "messages")
        ids: list[int] = []
        # Pieces alternate: the template's text, then what was marked (None for a marker that lost its partner).
        for number, piece in enumerate(_MARKED.split(text)):
            if number == 0:
                ids += self._tokenizer.encode(piece, add_special_tokens=add_special_tokens).ids
            elif piece:
                ids += self._encode_literal(piece) if number % 2 else self._continued(self._tokenizer, piece)
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        ids = self._continued(self._literal, text)
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest("The messages hold a control token that cannot be written as text.", param="messages")
        return ids

    def _continued(self, tokenizer: Tokenizer, piece: str) -> list[int]:
        """The ids of text that follows other text: encoded behind a line break, so that tokenizers which put a space
        before the first word of a text do not do so here."""
        line_break = tokenizer.encode("\n", add_special_tokens=False).ids
        ids: list[int] = tokenizer.encode("\n" + piece, add_special_tokens=False).ids
        if ids[: len(line_break)] == line_break:
            return ids[len(line_break) :]
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Tokenizer:
        """To which special tokens are text. Two threads may both make it; either will do."""
        literal = Tokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def _longest_token_bytes(self) -> int:
        """Bytes of text that one token can stand for, at most; 0 when text may shrink before it is cut into tokens."""
        if self._tokenizer.normalizer is not None:
            return 0
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def _refuse_hopeless(self, text: str, field: str) -> None:
        if len(text) <= self._max_model_len or not self._longest_token_bytes:
            return
        least = -(-len(text) // self._longest_token_bytes)
        if least > self._max_model_len:
            raise ContextOverflow(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your {field} resulted "
                f"in at least {least} tokens. Please shorten them.",
                param=field,
            )
