"""The cache in a file: what the tree holds, kept across a restart.

Owner: whoever has the store for itself, between steps. A file is

    magic, length of the header    21 bytes
    header                         JSON: identity, pages, and for each path its namespace and length, latest use first
    tokens                         int32, path after path, whole pages only
    page numbers                   int32, path after path, as the pages follow here
    pages                          as the runner gives them
    SHA-256                        of all the above

It is written under another name, moved into place when complete, and readable by its owner alone: prompts are in it.
Nothing is taken from a file before all of it is known to be right.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import SavedCacheError
from kvstore.pool import I32
from kvstore.store import KVStore
from kvstore.tier import U8, PageMemory

MAGIC = b"octavo cache\n"
_PREFIX = len(MAGIC) + 8  # with the length of the header in hexadecimal


def save(path: Path, store: KVStore, memory: PageMemory, page_bytes: int, identity: Mapping[str, str]) -> int:
    """Write every whole page of the tree. Returns how many. Raises OSError."""
    paths = _paths(store)
    numbers: dict[int, int] = {}
    for _, _, pages in paths:
        for page in pages.tolist():
            numbers.setdefault(page, len(numbers))
    header = {
        "identity": dict(identity),
        "pages": len(numbers),
        "paths": [(namespace, len(tokens)) for namespace, tokens, _ in paths],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".saving-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = hashlib.sha256()

            def write(data: bytes | memoryview) -> None:
                digest.update(data)
                file.write(data)

            content = json.dumps(header).encode()
            write(MAGIC + b"%08x" % len(content) + content)
            for _, tokens, _ in paths:
                write(tokens.tobytes())
            for _, _, pages in paths:
                write(np.array([numbers[page] for page in pages.tolist()], np.int32).tobytes())
            buffer = np.empty(page_bytes, np.uint8)
            for page in numbers:
                memory.read_page(page, buffer)
                write(buffer.data)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return len(numbers)


def load(path: Path, store: KVStore, memory: PageMemory, page_bytes: int, identity: Mapping[str, str]) -> int:
    """Put into free pages what a file holds, as far as they last. Returns how many there were.

    Raises SavedCacheError, before anything is changed, when the file is not whole or was made by something else.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for whoever writes it
            raise SavedCacheError("it is not a file")
        content = np.memmap(path, np.uint8, "r")
        header, start = _header(content)
        made_by = header["identity"]
        different = [name for name in {**made_by, **identity} if made_by.get(name) != identity.get(name)]
        if different:
            raise SavedCacheError(f"it is of another {', '.join(sorted(different))}")
        lengths = [length for _, length in header["paths"]]
        blocks = [length // store.page_size for length in lengths]
        sizes = (4 * sum(lengths), 4 * sum(blocks), header["pages"] * page_bytes, 32)
        if len(content) != start + sum(sizes):
            raise SavedCacheError(f"it has {len(content)} bytes and should have {start + sum(sizes)}")
        if hashlib.sha256(content[:-32].data).digest() != content[-32:].tobytes():
            raise SavedCacheError("its checksum is wrong")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SavedCacheError(f"it cannot be read: {error}") from None
    tokens = np.split(content[start : start + sizes[0]].view(np.int32), np.cumsum(lengths)[:-1])
    start += sizes[0]
    numbers = np.split(content[start : start + sizes[1]].view(np.int32), np.cumsum(blocks)[:-1])
    start += sizes[1]
    pages = content[start : start + sizes[2]].reshape(-1, page_bytes)
    before = sum(pool.free for pool in store.pools)
    longest = store.max_model_len // store.page_size * store.page_size
    for (namespace, _), run, row in zip(header["paths"], tokens, numbers, strict=True):
        _adopt(store, memory, np.array(run[:longest]), namespace, pages[row])
    return before - sum(pool.free for pool in store.pools)


def _adopt(store: KVStore, memory: PageMemory, tokens: I32, namespace: Hashable, content: U8) -> None:
    """Put whole pages into the tree, `content` by block; nothing if there is no room for them."""
    seq, pool, blocks = store.open(tokens, namespace), store.pools[0], len(tokens) // store.page_size
    if seq is None:
        return
    computed, seq.uncounted = seq.computed, 0
    first = computed // store.page_size
    if blocks - first <= pool.free and store.reserve(seq, len(tokens)):
        for block, page in enumerate(store.tables.rows[0][seq.slot, first:blocks].tolist(), first):
            pool.cancel_copy(page)
            memory.write_page(page, np.array(content[block]))
        computed = len(tokens)
    store.close(seq, tokens, computed)


def _header(content: np.memmap[Any, np.dtype[np.uint8]]) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    if content[: len(MAGIC)].tobytes() != MAGIC:
        raise SavedCacheError("it is not a saved cache")
    end = _PREFIX + int(content[len(MAGIC) : _PREFIX].tobytes(), 16)
    return json.loads(content[_PREFIX:end].tobytes()), end


def _paths(store: KVStore) -> list[tuple[Any, I32, I32]]:
    """For each leaf, the latest used first: namespace, tokens and pages of its path, whole pages that are filled."""
    tree, size, found = store.tree, store.page_size, []
    for leaf in tree.by_use():
        blocks = leaf.end // size
        if not leaf.children and blocks:
            pages = tree.path_pages(leaf, 0, 0, blocks)
            filled = next((i for i, page in enumerate(pages.tolist()) if store.pools[0].is_unwritten(page)), blocks)
            if filled:
                found.append((leaf.namespace, tree.path_tokens(leaf)[: filled * size], pages[:filled]))
    return found
