"""The tokenizer that belongs to a checkpoint, with what a server must know to use it.

Owner: whoever loads the model; immutable afterwards and safe to use from several threads. Knows the facts of chat
templates, not how to render them. Transformers is imported only for files that nothing else can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from models.loading.checkpoint import Checkpoint
from models.loading.folder_tokenizer import folder_tokenizer
from models.loading.gguf_file import GgufCheckpoint
from models.loading.gguf_tokenizer import gguf_tokenizer


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    tokenizer: Tokenizer  # neither truncates nor pads; `encode` adds the special tokens the model was trained with
    chat_template: str | None  # Jinja
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # every token that ends a text or a turn
    special_tokens: Mapping[str, str]  # what templates call them ("bos_token", "eos_token", ...) -> their text
    add_bos: bool  # whether `encode` puts the beginning-of-sequence token first
    vocab_size: int  # tokens the tokenizer knows; the model may have more rows, or fewer


def load_tokenizer(checkpoint: Checkpoint) -> LoadedTokenizer:
    """Raises ModelError."""
    if isinstance(checkpoint, GgufCheckpoint):
        tokenizer, chat_template, special, end_tokens = gguf_tokenizer(checkpoint)
    else:
        tokenizer, chat_template, special, end_tokens = folder_tokenizer(checkpoint.path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    own_ends = map(tokenizer.token_to_id, end_tokens)
    ends = (*checkpoint.config.eos_token_ids, *(token for token in own_ends if token is not None))
    return LoadedTokenizer(
        tokenizer=tokenizer,
        chat_template=chat_template,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        special_tokens=special,
        add_bos=bos is not None and tokenizer.encode("").ids[:1] == [bos],
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )
