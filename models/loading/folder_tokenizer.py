"""A tokenizer from a Hugging Face folder.

Owner: whoever loads the model. tokenizer.json is read as it is; older formats are converted by transformers and kept in
the cache. tokenizer_config.json adds to either what transformers would add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from models.config import END_TOKENS
from models.errors import CorruptModelError
from models.loading.converted_tokenizer import TokenizerParts, converted_tokenizer
from models.loading.folder_config import read_json

CONVERTIBLE = ("tokenizer.model", "vocab.json", "merges.txt")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def folder_tokenizer(folder: Path) -> TokenizerParts:
    """Raises CorruptModelError, UnsupportedModelError and CacheError."""
    config = _optional(folder / "tokenizer_config.json")
    stated = {**_optional(folder / "special_tokens_map.json"), **config}
    special = {name: text for name in NAMES if (text := _text(stated.get(name))) is not None}
    tokenizer = _read(folder)
    _add_missing(tokenizer, config, special)
    ends = [special["eos_token"]] if "eos_token" in special else []
    if not (folder / "generation_config.json").is_file():  # which would say which they are
        ends += END_TOKENS
    return TokenizerParts(tokenizer, _chat_template(folder, config), special, ends)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the "default" one of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more precise
            raise CorruptModelError(f"{path} cannot be read ({error}).") from None
    if not any((folder / name).is_file() for name in CONVERTIBLE):
        raise CorruptModelError(f"{folder} has no tokenizer: neither tokenizer.json nor {CONVERTIBLE[0]}.")
    digest = hashlib.sha256()
    for file in (folder / name for name in (*CONVERTIBLE, "tokenizer_config.json", "config.json")):
        if file.is_file():
            digest.update(hashlib.sha256(file.name.encode() + file.read_bytes()).digest())
    return converted_tokenizer(digest.hexdigest(), str(folder))


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json names and the tokenizer itself does not have as added tokens."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    stated = config.get("added_tokens_decoder") or {}
    wanted = [entry for _, entry in sorted(stated.items(), key=lambda item: int(item[0]))]
    wanted += [{"content": text, "special": True} for text in special.values()]
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
