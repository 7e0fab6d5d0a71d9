"""A saved cache comes back bit for bit, or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import SavedCacheError
from kvstore.pool import I32
from kvstore.saved import load, save
from kvstore.store import KVStore
from kvstore.tier import U8

SIZE = 4
IDENTITY = {"model": "m", "format": "bfloat16", "build": "1"}


class Memory:
    """Pages of one token id a slot."""

    def __init__(self, pages: int) -> None:
        self.pages = np.full((pages, SIZE), -1, np.int32)

    def read_page(self, page: int, out: U8) -> None:
        out[:] = self.pages[page].view(np.uint8)

    def write_page(self, page: int, data: U8) -> None:
        self.pages[page] = data.view(np.int32)


def store_of(pages: int) -> tuple[KVStore, Memory]:
    return KVStore(num_pages=pages, page_size=SIZE, max_sequences=4, max_model_len=64), Memory(pages)


def tokens_of(length: int, tail: int = 0, tail_length: int = 0) -> I32:
    return np.array([*range(length), *[tail] * tail_length], np.int32)


def say(store: KVStore, memory: Memory, tokens: I32, namespace: str | None = None) -> None:
    """What a request leaves behind."""
    seq = store.open(tokens, namespace)
    assert seq is not None
    assert store.reserve(seq, len(tokens))
    for source, target in store.drain_copies()[0].tolist():
        memory.pages[target] = memory.pages[source]
    for position in range(seq.computed, len(tokens)):
        page = store.tables.rows[0][seq.slot, position // SIZE]
        memory.pages[page, position % SIZE] = tokens[position]
    store.close(seq, tokens, len(tokens))


def full_store() -> tuple[KVStore, Memory]:
    store, memory = store_of(30)
    say(store, memory, tokens_of(22, 50, 9))
    say(store, memory, tokens_of(22, 51, 6))
    say(store, memory, tokens_of(9), "tenant")
    say(store, memory, tokens_of(3), "too short for a page")
    return store, memory


def check(store: KVStore, memory: Memory, tokens: I32, namespace: str | None, length: int) -> None:
    assert store.match_length(np.append(tokens[:length], 99), namespace) == length
    seq = store.open(np.append(tokens[:length], 99), namespace)
    assert seq is not None
    pages = store.tables.rows[0][seq.slot, : length // SIZE]
    assert memory.pages[pages].reshape(-1).tolist() == tokens[:length].tolist()
    store.close(seq, tokens[:length], length)


def test_what_was_saved_is_found_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "cache"
    old, old_memory = full_store()
    count = save(path, old, old_memory, SIZE * 4, IDENTITY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["cache"]
    store, memory = store_of(30)
    assert load(path, store, memory, SIZE * 4, IDENTITY) == count == 7 + 2 + 2
    store.check_integrity()
    check(store, memory, tokens_of(22, 50, 9), None, 28)
    check(store, memory, tokens_of(22, 51, 6), None, 28)
    check(store, memory, tokens_of(9), "tenant", 8)
    assert store.match_length(tokens_of(9), "other") == 0
    assert store.stats().query_tokens == 0
    assert store.stats().used == 0
    store.check_integrity()


def test_saving_twice_changes_nothing(tmp_path: Path) -> None:
    old, old_memory = full_store()
    save(tmp_path / "a", old, old_memory, SIZE * 4, IDENTITY)
    store, memory = store_of(30)
    load(tmp_path / "a", store, memory, SIZE * 4, IDENTITY)
    assert load(tmp_path / "a", store, memory, SIZE * 4, IDENTITY) == 0
    assert save(tmp_path / "b", store, memory, SIZE * 4, IDENTITY) == 11


def test_a_smaller_pool_takes_what_was_used_last_and_evicts_nothing(tmp_path: Path) -> None:
    old, old_memory = full_store()
    save(tmp_path / "a", old, old_memory, SIZE * 4, IDENTITY)
    store, memory = store_of(5)
    assert load(tmp_path / "a", store, memory, SIZE * 4, IDENTITY) == 2
    check(store, memory, tokens_of(9), "tenant", 8)
    assert store.evictions() == ()
    store.check_integrity()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "bytes and should have"),
        (lambda data: data[: len(data) // 2], "bytes and should have"),
        (lambda data: data[:10], "not a saved cache"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data + b"x", "bytes and should have"),
        (lambda data: b"something else entirely", "not a saved cache"),
        (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "checksum"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data[:15] + b"zz" + data[17:], "cannot be read"),
        (lambda data: data.replace(b'"paths"', b'"pathz"', 1), "cannot be read"),
        (lambda data: data.replace(b'"model": "m"', b'"model": "n"', 1), "of another model"),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_changes_nothing(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    path = tmp_path / "cache"
    old, old_memory = full_store()
    save(path, old, old_memory, SIZE * 4, IDENTITY)
    path.write_bytes(damage(path.read_bytes()))
    store, memory = store_of(30)
    with pytest.raises(SavedCacheError, match=why):
        load(path, store, memory, SIZE * 4, IDENTITY)
    assert (memory.pages == -1).all()
    assert store.stats().free == 30


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store, memory = store_of(30)
    with pytest.raises(SavedCacheError, match="not a file"):
        load(tmp_path / "pipe", store, memory, 4 * SIZE, IDENTITY)


def test_every_single_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    old, old_memory = full_store()
    save(path, old, old_memory, SIZE * 4, IDENTITY)
    data = path.read_bytes()
    store, memory = store_of(30)
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with pytest.raises(SavedCacheError):
            load(path, store, memory, SIZE * 4, IDENTITY)
    assert store.stats().free == 30


def test_paths_longer_than_the_context_are_cut(tmp_path: Path) -> None:
    old, old_memory = full_store()
    save(tmp_path / "a", old, old_memory, SIZE * 4, IDENTITY)
    store, memory = KVStore(num_pages=30, page_size=SIZE, max_sequences=4, max_model_len=10), Memory(30)
    load(tmp_path / "a", store, memory, SIZE * 4, IDENTITY)
    check(store, memory, tokens_of(9), None, 8)


@pytest.mark.parametrize("name", ["model", "format", "build"])
def test_another_model_format_or_build_is_refused_by_name(tmp_path: Path, name: str) -> None:
    old, old_memory = full_store()
    save(tmp_path / "a", old, old_memory, SIZE * 4, {**IDENTITY, name: "other"})
    store, memory = store_of(30)
    with pytest.raises(SavedCacheError, match=f"of another {name}"):
        load(tmp_path / "a", store, memory, SIZE * 4, IDENTITY)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    old, old_memory = full_store()
    save(path, old, old_memory, SIZE * 4, IDENTITY)
    before = path.read_bytes()

    def fail(page: int, out: U8) -> None:
        raise OSError("no")

    old_memory.read_page = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no"):
        save(path, old, old_memory, SIZE * 4, IDENTITY)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["cache"]


def test_the_hits_of_a_pinned_prefix_are_counted() -> None:
    store, memory = full_store()
    pin = store.pin(tokens_of(22))
    assert pin is not None
    assert (pin.length, pin.hits, pin.last_hit) == (20, 0, None)
    say(store, memory, tokens_of(22, 50, 20))
    say(store, memory, tokens_of(10, 60, 20))  # leaves before its end
    say(store, memory, tokens_of(22), "tenant")
    assert pin.hits == 1
    assert pin.last_hit is not None
    store.unpin(pin)
    store.check_integrity()
