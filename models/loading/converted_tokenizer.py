"""What is read of a tokenizer, whatever the file, and tokenizers in formats that only transformers can read: converted
once, then kept in the cache.

Owner: whoever loads the model.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from models.errors import UnsupportedModelError
from models.loading.cache import build_once, cache_path

DELAY_SECONDS = 1.0


class TokenizerParts(NamedTuple):
    tokenizer: Tokenizer
    chat_template: str | None  # Jinja
    special_tokens: dict[str, str]  # what templates call them -> their text
    end_tokens: Sequence[str] = ()  # beside those that the checkpoint's configuration has


def converted_tokenizer(content_key: str, folder: str, gguf_file: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, or of a GGUF file in it. `content_key` stands for the files it is made from.

    Raises UnsupportedModelError, and CacheError.
    """
    made_by = f"{content_key} {version('transformers')} {version('tokenizers')}"
    path = cache_path("tokenizers", hashlib.sha256(made_by.encode()).hexdigest()[:32], ".json")

    def convert(target: Path) -> None:
        target.write_text(_convert(folder, gguf_file), encoding="utf-8")

    return Tokenizer.from_file(str(build_once(path, convert)))


def _convert(folder: str, gguf_file: str | None) -> str:
    with progress("Converting the tokenizer"):
        from transformers import AutoTokenizer

        where = f"{folder}/{gguf_file}" if gguf_file else folder
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
            return str(tokenizer.backend_tokenizer.to_str())
        except Exception as error:  # whatever a vocabulary that is not understood sets off
            reason = str(error).strip().splitlines()
            raise UnsupportedModelError(
                f"The tokenizer of {where} cannot be read ({reason[0] if reason else type(error).__name__})."
            ) from error


@contextmanager
def progress(description: str) -> Iterator[None]:
    """A bar for work of unknown length: on a terminal's stderr, once a second has passed, until the work is done."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(description, total=None)
    timer = threading.Timer(DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
