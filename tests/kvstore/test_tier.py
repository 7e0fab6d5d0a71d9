"""Pages on their way between the tiers, when plans change before the next step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import KVError
from kvstore.pool import I32
from kvstore.sequence import KVSequence
from kvstore.store import KVStore
from kvstore.tables import LayerGroup
from kvstore.tier import U8, HostTier, file_memory

A, B = (np.arange(base, base + 12, dtype=np.int32) for base in (0, 50))


class Memory:
    """Counts what is moved."""

    def read_page(self, page: int, out: U8) -> None:
        out[:] = page

    def write_page(self, page: int, data: U8) -> None:
        pass


def store_of(pages: int, slots: int = 20) -> KVStore:
    tier = HostTier(np.zeros((slots, 16), np.uint8), 4)
    return KVStore(num_pages=pages, page_size=4, max_sequences=4, max_model_len=64, tier=tier)


def begin(store: KVStore, tokens: I32) -> KVSequence:
    seq = store.open(tokens)
    assert seq is not None
    assert store.reserve(seq, len(tokens))
    store.restore(seq, tokens)
    return seq


def step(store: KVStore) -> None:
    moves = store.drain_moves()
    if moves is not None and store.tier is not None:
        store.tier.move(moves, Memory())
    store.drain_copies()


def say(store: KVStore, tokens: I32) -> None:
    seq = begin(store, tokens)
    step(store)
    store.close(seq, tokens, len(tokens))


def restoring() -> tuple[KVStore, KVSequence]:
    """A sequence whose pages are to be loaded by the next step."""
    store = store_of(4)
    for tokens in (A, B):
        say(store, tokens)
    seq = begin(store, A)
    assert store.pools[0].loads
    store.check_integrity()
    return store, seq


def test_a_load_into_a_page_that_was_given_back_is_left_out() -> None:
    store, seq = restoring()
    store.close(seq, A, 0)
    store.reset()
    assert store.pools[0].loads == {}
    assert store.pools[0].free == 4
    store.check_integrity()


def test_a_page_that_is_evicted_before_it_was_filled_is_not_saved() -> None:
    store, seq = restoring()
    assert store.tier is not None
    filling = set(store.pools[0].loads)
    store.close(seq, A, seq.computed)
    store.tier.clear()  # or it would be found to be there already
    begin(store, np.arange(100, 116, dtype=np.int32))  # takes every page there is
    assert store.pools[0].loads == {}
    moves = store.drain_moves()
    assert moves is None or not filling & {page for page, _ in moves.stores}
    store.check_integrity()


def test_a_slot_that_is_about_to_be_read_is_not_given_to_another_page() -> None:
    store = store_of(4, slots=2)
    for tokens in (A, B):
        say(store, tokens)
    assert store.tier is not None
    found = store.tier.find(None, A[:11], 0) or store.tier.find(None, B[:11], 0)
    for number in range(6):
        store.tier.offload(None, np.full(4, 70 + number, np.int32), 0, {0: 0})
    moves = store.tier.drain({})
    assert moves is None or not set(found) & {slot for _, slot in moves.stores}


def test_namespaces_and_beginnings_tell_pages_apart() -> None:
    tier = HostTier(np.zeros((20, 16), np.uint8), 4)
    assert tier.offload("a", A, 0, {0: 1, 1: 2, 2: 3}) == 3
    assert len(tier.find("a", A, 0)) == 3
    assert len(tier.find("a", A, 1)) == 2
    for namespace, tokens, first in (("b", A, 0), (None, A, 0), ("a", B, 0), ("a", A[4:], 0)):
        assert tier.find(namespace, tokens, first) == []
    other = np.concatenate((B[:4], A[4:]))  # the same second page after another first
    assert tier.find("a", other, 1) == []


def test_memory_in_a_file_leaves_no_file_and_needs_room(tmp_path: Path) -> None:
    memory = file_memory(3, 4096, tmp_path / "pages")
    memory[2] = 7
    assert memory.shape == (3, 4096)
    assert list((tmp_path / "pages").iterdir()) == []
    with pytest.raises(OSError, match=r"space|large"):
        file_memory(1 << 20, 1 << 40, tmp_path)


def test_a_second_tier_is_refused_where_it_could_not_work() -> None:
    tier = HostTier(np.zeros((2, 16), np.uint8), 4)
    for groups, caching in (((LayerGroup("sliding", window=4),), True), ((LayerGroup("full"),), False)):
        with pytest.raises(KVError, match="second tier"):
            KVStore(
                num_pages=4,
                page_size=4,
                max_sequences=1,
                max_model_len=8,
                groups=groups,
                prefix_caching=caching,
                tier=tier,
            )
