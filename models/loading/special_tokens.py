"""Tokens that are not text: those that end it, and those that a tokenizer puts around it.

Owner: whoever loads the model.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

# How the usual families spell the end of a text or of a turn, for files that do not list all of theirs.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def add_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put `bos` before and `eos` after a text, where given, and nothing else."""
    ids = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    around = [token for token in (bos, "$A", eos) if token == "$A" or ids.get(token or "") is not None]
    tokenizer.post_processor = TemplateProcessing(
        single=[str(token) for token in around],
        special_tokens=[(token, token_id) for token, token_id in ids.items() if token_id is not None],
    )
