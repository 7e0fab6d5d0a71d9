"""A tokenizer from a Hugging Face folder.

Owner: whoever loads the model. tokenizer.json is read as it is; older formats are converted by transformers and kept in
the cache. tokenizer_config.json adds to either what transformers would add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from models.config import END_TOKENS
from models.errors import CorruptModelError
from models.loading.converted_tokenizer import converted_tokenizer
from models.loading.folder_config import read_json

CONVERTIBLE = ("tokenizer.model", "vocab.json", "merges.txt")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class FolderTokenizer:
    """The parts of a LoadedTokenizer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self) -> Tokenizer:
        tokenizer = self._read()
        self._add_missing(tokenizer)
        return tokenizer

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the "default" one of tokenizer_config.json."""
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default", next(iter(named.values()), None))
        return template if isinstance(template, str) else None

    def special_tokens(self) -> dict[str, str]:
        stated = {**self._optional("special_tokens_map.json"), **self._config}
        texts = {name: _text(stated.get(name)) for name in NAMES}
        return {name: text for name, text in texts.items() if text is not None}

    def end_tokens(self) -> Iterator[str]:
        """The tokenizer's own, and those known by their spelling when no generation_config.json says which they are."""
        if "eos_token" in self.special_tokens():
            yield self.special_tokens()["eos_token"]
        if not (self._folder / "generation_config.json").is_file():
            yield from END_TOKENS

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._optional("tokenizer_config.json")

    def _optional(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return read_json(path) if path.is_file() else {}

    def _read(self) -> Tokenizer:
        path = self._folder / "tokenizer.json"
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises nothing more precise
                raise CorruptModelError(f"{path} cannot be read ({error}).") from None
        files = [file for file in (self._folder / name for name in CONVERTIBLE) if file.is_file()]
        if not files:
            raise CorruptModelError(f"{self._folder} has no tokenizer: neither tokenizer.json nor {CONVERTIBLE[0]}.")
        files += [
            file for file in (self._folder / "tokenizer_config.json", self._folder / "config.json") if file.is_file()
        ]
        digest = hashlib.sha256()
        for file in files:
            digest.update(hashlib.sha256(file.name.encode() + file.read_bytes()).digest())
        return converted_tokenizer(digest.hexdigest(), str(self._folder))

    def _add_missing(self, tokenizer: Tokenizer) -> None:
        """Add the tokens that tokenizer_config.json names and the tokenizer itself does not have as added tokens."""
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        stated = self._config.get("added_tokens_decoder") or {}
        wanted = [entry for _, entry in sorted(stated.items(), key=lambda item: int(item[0]))]
        wanted += [{"content": text, "special": True} for text in self.special_tokens().values()]
        for entry in wanted:
            if entry["content"] not in known:
                flags = {flag: bool(entry[flag]) for flag in ADDED_TOKEN_FLAGS if flag in entry}
                tokenizer.add_tokens([AddedToken(entry["content"], **flags)])
                known.add(entry["content"])


def _text(token: object) -> str | None:
    """A special token is stated as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
