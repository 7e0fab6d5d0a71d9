from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest

from kvstore.errors import KVError
from kvstore.pool import I32
from kvstore.radix import EVICTIONS_REMEMBERED
from kvstore.sequence import KVSequence
from kvstore.store import KVStore
from kvstore.tables import LayerGroup


def toks(*tokens: int) -> I32:
    return np.array(tokens, dtype=np.int32)


def text(seed: int, length: int) -> I32:
    """Tokens that share nothing with another seed's: the first one is the seed."""
    tokens = np.random.default_rng(seed).integers(1000, 50000, length).astype(np.int32)
    tokens[0] = seed
    return tokens


def make(pages: int = 64, size: int = 4, **other: object) -> KVStore:
    settings = {"max_sequences": 8, "max_model_len": 512} | other
    return KVStore(num_pages=pages, page_size=size, **settings)  # type: ignore[arg-type]


def begin(store: KVStore, tokens: I32, namespace: Hashable = None) -> KVSequence:
    seq = store.open(tokens, namespace)
    assert seq is not None
    return seq


def run(store: KVStore, tokens: I32, namespace: Hashable = None) -> KVSequence:
    """Open and compute all the tokens, in one step."""
    seq = begin(store, tokens, namespace)
    assert store.reserve(seq, len(tokens))
    store.drain_copies()
    store.commit(seq, tokens, len(tokens))
    return seq


def remember(store: KVStore, tokens: I32, namespace: Hashable = None) -> int:
    """Run the tokens and finish. Returns how many were cached."""
    seq = run(store, tokens, namespace)
    store.close(seq, tokens, len(tokens))
    store.check_integrity()
    return seq.cached


def row(store: KVStore, seq: KVSequence, group: int = 0) -> list[int]:
    pages = seq.blocks[group] - seq.dropped[group] // store.page_size
    return store.tables.rows[group][seq.slot, :pages].tolist()


# -- matching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_a_shared_part_is_found_to_the_token_around_a_page_boundary(size: int, past: int) -> None:
    shared = 2 * size + past
    store = make(size=size)
    remember(store, np.concatenate((text(1, 40)[:shared], text(2, 20))))
    other = np.concatenate((text(1, 40)[:shared], text(3, 20)))
    assert store.match_length(other) == shared
    assert remember(store, other) == shared


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_a_fully_cached_prompt_leaves_one_token_to_compute(length: int) -> None:
    store = make()
    tokens = text(1, length)
    remember(store, tokens)
    assert store.match_length(tokens) == length - 1
    assert begin(store, tokens).computed == length - 1


def test_whole_pages_are_shared_and_a_part_of_a_page_is_copied() -> None:
    store = make()
    tokens = text(1, 12)
    first = run(store, tokens)
    pages = row(store, first)
    store.close(first, tokens, 12)
    second = begin(store, np.concatenate((tokens[:10], text(2, 5))))
    assert second.cached == 10
    assert row(store, second)[:2] == pages[:2]
    copy = row(store, second)[2]
    assert copy not in pages
    assert store.drain_copies()[0].tolist() == [[pages[2], copy]]


def test_after_a_hit_only_the_missing_pages_are_taken() -> None:
    store = make(pages=6)
    tokens = text(1, 16)
    remember(store, tokens)
    seq = begin(store, np.concatenate((tokens, text(2, 8))))
    assert store.reserve(seq, 24)
    assert store.stats().used == 6
    assert store.match_length(tokens) == 15


def test_looking_takes_nothing_and_does_not_count_as_use() -> None:
    store = make(pages=4)
    old, new = text(1, 8), text(2, 8)
    remember(store, old)
    remember(store, new)
    before = store.stats()
    assert store.match_length(old) == 7
    assert store.stats() == before
    seq = begin(store, text(3, 8))
    assert store.reserve(seq, 8)
    assert (store.match_length(old), store.match_length(new)) == (0, 7)


def test_a_request_that_must_not_read_the_cache_still_fills_it() -> None:
    store = make()
    tokens = text(1, 10)
    remember(store, tokens)
    seq = store.open(tokens, use_cache=False)
    assert seq is not None
    assert seq.cached == 0
    assert store.reserve(seq, 10)
    store.close(seq, tokens, 10)
    assert store.match_length(tokens) == 9
    store.check_integrity()


def test_nothing_that_fits_is_ever_forgotten() -> None:
    """With room for everything, a match is the longest prefix in common with anything ever computed."""
    rng = np.random.default_rng(5)
    store = make(pages=4000, size=8)
    past: list[list[int]] = []
    for _ in range(150):
        tokens = rng.integers(0, 2, rng.integers(1, 60)).astype(np.int32)
        if past and rng.random() < 0.5:
            tokens = np.concatenate((np.array(past[rng.integers(len(past))], dtype=np.int32), tokens))[:200]
        best = max((_common(tokens.tolist(), other) for other in past), default=0)
        assert remember(store, tokens) == min(best, len(tokens) - 1)
        past.append(tokens.tolist())
    assert store.stats().evicted_pages == 0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- look-alikes --------------------------------------------------------------------------------------------------

A, B, C = [11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]


@pytest.mark.parametrize(
    ("known", "asked", "found"),
    [
        (A + B + C, C + B + A, 0),  # blocks swapped
        (A + B + C, A + C + B, 4),
        (A + B + C, B + C, 0),  # the same blocks after another parent, or none
        (A + C, B + C + A, 0),
        ([1, 23], [12, 3, 0], 0),  # alike when written out in decimal
        ([1, 23, 4], [1, 2, 34, 0], 1),
        ([0x0102, 0x03], [0x01, 0x0203, 0], 0),  # and in bytes
        ([256, 1], [1, 256, 0], 0),
        ([0], [0, 0, 0], 1),
        ([7, 7, 7, 7, 7], [7, 7, 7, 7, 7, 7, 7, 7], 5),
    ],
)
@pytest.mark.case(4)
def test_only_the_very_same_tokens_in_the_same_places_match(known: list[int], asked: list[int], found: int) -> None:
    store = make()
    remember(store, toks(*known))
    assert remember(store, toks(*asked)) == found


@pytest.mark.parametrize("other", [None, "", ("m", None, "salt"), ("m", "adapter", "salt2"), ("m2", "adapter", "salt")])
@pytest.mark.case(4)
def test_the_same_tokens_in_another_namespace_are_strangers(other: Hashable) -> None:
    store = make()
    mine = ("m", "adapter", "salt")
    remember(store, text(1, 20), mine)
    assert store.match_length(text(1, 20), other) == 0
    assert remember(store, text(1, 20), other) == 0
    assert remember(store, text(1, 20), mine) == 19


# -- sharing while running ------------------------------------------------------------------------------------------


def test_what_a_chunk_has_computed_can_be_shared_at_once() -> None:
    store = make()
    tokens = text(1, 40)
    first = begin(store, tokens)
    assert store.reserve(first, 18)
    store.commit(first, tokens, 18)
    second = begin(store, tokens)
    assert second.cached == 16
    assert row(store, second) == row(store, first)[:4]
    store.check_integrity()


def test_two_that_computed_the_same_prefix_at_once_end_up_in_the_same_pages() -> None:
    store = make()
    tokens = text(1, 18)
    first, second = begin(store, tokens), begin(store, tokens)
    for seq in (first, second):
        assert store.reserve(seq, 18)
    assert store.stats().used == 10
    store.commit(first, tokens, 18)
    store.commit(second, tokens, 18)
    assert row(store, second)[:4] == row(store, first)[:4]
    assert store.stats().used == 6
    for seq in (first, second):
        store.close(seq, tokens, 18)
    store.check_integrity()
    assert store.stats().evictable == 5


def test_a_commit_that_completes_no_page_changes_nothing_in_the_tree() -> None:
    store = make()
    tokens = text(1, 12)
    seq = begin(store, tokens)
    assert store.reserve(seq, 12)
    store.commit(seq, tokens, 6)
    before = store.stats()
    store.commit(seq, tokens, 7)
    assert (seq.computed, store.stats()) == (7, before)


def test_forks_share_until_they_write_and_the_last_one_writes_in_place() -> None:
    store = make()
    tokens = text(1, 10)
    parent = run(store, tokens)
    children = [store.fork(parent), store.fork(parent)]
    assert all(child is not None and row(store, child) == row(store, parent) for child in children)
    assert store.stats().used == 3
    shared = row(store, parent)[2]
    for seq in (*children, parent):
        assert seq is not None
        assert store.reserve(seq, 11)
    assert row(store, parent)[2] == shared
    copies = store.drain_copies()[0]
    assert copies[:, 0].tolist() == [shared, shared]
    assert copies[:, 1].tolist() == [row(store, child)[2] for child in children if child]
    store.check_integrity()


def test_a_fork_takes_only_what_is_computed() -> None:
    store = make()
    tokens = text(1, 8)
    parent = run(store, tokens)
    assert store.reserve(parent, 20)
    child = store.fork(parent)
    assert child is not None
    assert (child.blocks, child.computed) == ([2], 8)
    assert store.reserve(child, 9)
    assert store.drain_copies()[0].size == 0


def test_a_preempted_sequence_finds_all_it_had_computed() -> None:
    store = make()
    tokens = text(1, 30)
    seq = run(store, tokens[:20])
    store.close(seq, tokens, 20)
    again = begin(store, tokens)
    assert again.cached == 20
    assert store.stats().used == 5


def test_rolling_back_releases_pages_and_writes_again_in_private() -> None:
    store = make()
    tokens = text(1, 20)
    seq = run(store, tokens)
    store.truncate(seq, 10)
    assert (seq.computed, seq.blocks) == (10, [3])
    kept = row(store, seq)[2]
    assert store.reserve(seq, 12)
    assert row(store, seq)[2] != kept, "the tree has that page"
    assert store.drain_copies()[0].tolist() == [[kept, row(store, seq)[2]]]
    store.check_integrity()
    assert store.match_length(tokens) == 19


# -- eviction -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prefix_goes_first() -> None:
    store = make(pages=8)
    for seed in (1, 2, 3, 4):
        remember(store, text(seed, 8))
    remember(store, text(1, 8))
    lost = []
    for seed in (11, 12, 13):
        assert store.reserve(begin(store, text(seed, 8)), 8)
        lost.append([old for old in (1, 2, 3, 4) if not store.match_length(text(old, 8))])
    assert lost == [[2], [2, 3], [2, 3, 4]]


def test_no_more_is_evicted_than_needed_and_the_end_of_a_prefix_goes_first() -> None:
    store = make(pages=10)
    tokens = text(1, 38)
    remember(store, tokens)
    assert store.reserve(begin(store, text(2, 12)), 12)
    assert store.match_length(tokens) == 28
    assert store.stats().evicted_pages == 3
    store.check_integrity()


def test_a_common_trunk_outlives_its_branches() -> None:
    store = make(pages=16)
    trunk = text(1, 16)
    for seed in range(2, 6):
        remember(store, np.concatenate((trunk, text(seed, 8))))
    assert store.reserve(begin(store, text(9, 48)), 48)
    assert store.match_length(np.concatenate((trunk, text(5, 8)))) == 16


def test_a_leaf_too_long_to_grow_shares_the_page_it_ends_in_with_its_first_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.radix.EXTENDABLE_TOKENS", 4)
    store = make(pages=8)
    tokens = text(1, 20)
    for length, known in ((6, 0), (7, 6), (14, 7), (20, 14)):
        assert remember(store, tokens[:length]) == known
    assert store.stats().nodes > 2
    assert store.stats().free == 3, "five pages for twenty tokens, however they came"
    assert store.reserve(begin(store, text(2, 16)), 16)
    assert store.match_length(tokens) == 16


def test_what_is_in_use_is_never_evicted() -> None:
    store = make(pages=6)
    tokens = text(1, 16)
    remember(store, tokens)
    user = begin(store, tokens[:13])
    other = begin(store, text(2, 16))
    assert not store.reserve(other, 16)
    assert store.reserve(other, 8)
    assert row(store, user)[:3] == row(store, begin(store, tokens[:13]))[:3]
    store.check_integrity()


def test_a_refused_reservation_evicts_nothing_and_takes_nothing() -> None:
    store = make(pages=8)
    remember(store, text(1, 16))
    holder = run(store, text(2, 12))
    seq = begin(store, text(3, 40))
    before = store.stats()
    assert not store.reserve(seq, 24)
    assert store.stats() == before
    assert store.match_length(text(1, 16)) == 15
    store.close(holder, text(2, 12), 12)
    assert store.reserve(seq, 24)


def test_the_page_copied_from_survives_the_eviction_of_its_leaf() -> None:
    store = make(pages=8)
    tokens = text(1, 8)
    remember(store, tokens)
    remember(store, text(4, 8))
    seq = begin(store, np.concatenate((tokens[:6], text(2, 6))))
    greedy = begin(store, text(3, 20))
    assert store.reserve(greedy, 20)
    assert store.match_length(tokens) == 4
    source, target = store.drain_copies()[0][0].tolist()
    assert source not in [*row(store, greedy), *row(store, seq)]
    assert target == row(store, seq)[1]
    store.check_integrity()


def test_a_copy_for_a_sequence_closed_before_the_step_is_not_made() -> None:
    store = make()
    tokens = text(1, 8)
    remember(store, tokens)
    seq = begin(store, np.concatenate((tokens[:6], text(2, 6))))
    store.close(seq, tokens, seq.computed)
    assert store.drain_copies()[0].shape == (0, 2)
    store.check_integrity()


def test_a_prompt_that_fills_the_whole_pool_fits_next_to_its_own_cached_copy() -> None:
    store = make(pages=5)
    tokens = text(1, 20)
    remember(store, tokens)
    for _ in range(3):
        seq = begin(store, tokens)
        assert seq.cached == 16, "no page is left to copy the last one to"
        assert store.reserve(seq, store.max_length())
        store.close(seq, tokens, 20)
        store.check_integrity()


def test_part_of_a_page_is_left_out_where_the_page_copied_from_would_stand_in_the_way() -> None:
    store = make(pages=5)
    remember(store, text(1, 6))
    tokens = np.concatenate((text(1, 6), text(2, 14)))
    assert store.match_length(tokens) == 6
    seq = begin(store, tokens)
    assert seq.cached == 4
    assert store.reserve(seq, 20)
    store.check_integrity()


def test_a_sequence_alone_writes_into_its_last_page_though_the_tree_has_it_too() -> None:
    store = make(pages=3)
    tokens = text(1, 12)
    seq = begin(store, tokens)
    assert store.reserve(seq, 10)
    seq.computed = 10
    child = store.fork(seq)
    assert child is not None
    store.close(child, tokens, 10)
    assert store.reserve(seq, 12)
    assert "last page" in store.evictions()[-1].reason
    store.check_integrity()


def test_evictions_are_explained_and_the_record_is_bounded() -> None:
    store = make(pages=3)
    for seed in range(2 * EVICTIONS_REMEMBERED):
        remember(store, text(seed + 1, 9), namespace=("m", seed % 2))
    last = store.evictions()[-1]
    assert len(store.evictions()) == EVICTIONS_REMEMBERED
    assert (last.namespace, last.start, last.end, last.freed) == (("m", 0), 0, 9, (3,))
    assert last.tokens == tuple(text(2 * EVICTIONS_REMEMBERED - 1, 9)[:8].tolist())
    assert last.reason == "slot 0 grows from 0 to 9"
    assert last.tick > last.idle >= 0


def _calls(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, a piece of work calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_evicting_among_a_hundred_thousand_leaves_takes_as_many_operations_as_among_a_hundred() -> None:
    costs = []
    for leaves in (100, 100_000):
        store = make(pages=leaves, size=1)
        tree, pages = store.tree, store.pools[0].allocate(leaves)
        for i in range(leaves):
            tree.insert(None, None, toks(i), 1, [pages[i : i + 1]], close=True)
        store.pools[0].release(pages)
        for i in range(leaves):  # use all of them once more, the odd ones first
            tree.anchor(*tree.match(None, toks((2 * i + 1) % (leaves + 1)), 1))
        assert store.stats().evictable == leaves

        def take(store: KVStore = store) -> None:
            seq = begin(store, np.arange(200_000, 200_050, dtype=np.int32))
            for length in range(1, 51):
                assert store.reserve(seq, length)

        costs.append(_calls(take))
        assert [store.match_length(toks(i, 0)) for i in (1, 3, 99)] == [0, 0, 0]
        assert [store.match_length(toks(i, 0)) for i in (0, 2, 98)] == [1, 1, 1]
    assert costs[1] == costs[0]


# -- the end of things ----------------------------------------------------------------------------------------------


def test_closing_twice_is_an_error_and_frees_nothing_twice() -> None:
    store = make()
    tokens = text(1, 8)
    seq = run(store, tokens)
    store.close(seq, tokens, 8)
    other = begin(store, text(2, 8))
    with pytest.raises(KVError, match="closed"):
        store.close(seq, tokens, 8)
    for call in (lambda: store.reserve(seq, 9), lambda: store.fork(seq), lambda: store.truncate(seq, 1)):
        with pytest.raises(KVError, match="closed"):
            call()
    assert store.sequences == {other.slot: other}
    store.check_integrity()


def test_calls_no_correct_scheduler_makes_are_refused() -> None:
    store = make(max_model_len=16)
    tokens = text(1, 16)
    seq = begin(store, tokens)
    assert store.reserve(seq, 8)
    for wrong in (
        lambda: store.open(toks()),
        lambda: store.open(text(1, 17)),
        lambda: store.reserve(seq, 17),
        lambda: store.commit(seq, tokens, 9),
        lambda: store.commit(seq, tokens[:3], 4),
        lambda: store.close(seq, tokens, -1),
        lambda: make(pages=0),
    ):
        with pytest.raises(KVError):
            wrong()
    store.commit(seq, tokens, 8)
    with pytest.raises(KVError, match="truncate"):
        store.commit(seq, tokens, 7)
    store.check_integrity()


def test_there_are_as_many_sequences_as_slots() -> None:
    store = make(max_sequences=2)
    first = begin(store, text(1, 4))
    begin(store, text(2, 4))
    assert store.open(text(3, 4)) is None
    assert store.fork(first) is None
    store.close(first, text(1, 4), 0)
    assert store.open(text(3, 4)) is not None


def test_without_prefix_caching_nothing_is_kept() -> None:
    store = make(prefix_caching=False)
    tokens = text(1, 20)
    seq = run(store, tokens)
    child = store.fork(seq)
    assert child is not None
    assert store.reserve(child, 21)
    store.close(seq, tokens, 20)
    store.close(child, tokens, 20)
    assert store.match_length(tokens) == 0
    assert begin(store, tokens).cached == 0
    assert (store.stats().free, store.reset(), store.pin(tokens), store.evictions()) == (64, 0, None, ())
    store.check_integrity()


def test_a_namespace_goes_with_its_last_page() -> None:
    store = make(pages=4)
    for user in range(100):
        remember(store, text(1, 8), namespace=("m", user))
        assert store.stats().namespaces <= 2
    assert store.reset() == 4
    assert store.stats().namespaces == 0


def test_reset_drops_what_nobody_uses() -> None:
    store = make()
    user = run(store, text(1, 12))
    remember(store, text(2, 12))
    assert store.reset() == 3
    assert (store.match_length(text(1, 12)), store.match_length(text(2, 12))) == (11, 0)
    store.close(user, text(1, 12), 12)
    assert store.reset() == 3
    assert store.stats().free == store.stats().total
    assert store.stats().evicted_pages == 0


def test_only_lookups_that_led_to_pages_are_counted() -> None:
    store = make(pages=4)
    tokens = text(1, 8)
    remember(store, tokens)
    holder = run(store, text(2, 8))
    for _ in range(3):
        seq = begin(store, np.concatenate((tokens, text(3, 9))))
        assert not store.reserve(seq, 17)
        store.close(seq, tokens, 0)
    assert (store.stats().query_tokens, store.stats().hit_tokens) == (16, 0)
    store.close(holder, text(2, 8), 8)
    assert remember(store, tokens) == 7
    assert (store.stats().query_tokens, store.stats().hit_tokens) == (24, 7)


def test_a_pinned_prefix_stays_until_it_is_unpinned() -> None:
    store = make(pages=4)
    tokens = text(1, 10)
    remember(store, tokens)
    pin = store.pin(tokens)
    assert pin is not None
    assert pin.length == 8
    assert store.pin(text(9, 10)) is None
    assert not store.reserve(begin(store, text(2, 12)), 12)
    store.reset()
    assert store.match_length(tokens) == 8
    store.unpin(pin)
    store.check_integrity()
    with pytest.raises(KVError, match="not pinned"):
        store.unpin(pin)
    assert store.reset() == 2


def test_a_storm_of_cancelled_requests_leaves_nothing_behind() -> None:
    rng = np.random.default_rng(3)
    store = make(pages=40, max_sequences=16, max_model_len=160)
    live: list[tuple[KVSequence, I32]] = []
    for i in range(2000):
        stem = text(int(rng.integers(1, 4)), 60)[: rng.integers(1, 60)]
        tokens = np.concatenate((stem, text(100 + i, int(rng.integers(1, 100)))))
        seq = store.open(tokens, namespace=int(rng.integers(2)))
        if seq is not None:
            live.append((seq, tokens))
            if store.reserve(seq, int(rng.integers(1, len(tokens) + 1))) and rng.random() < 0.3:
                child = store.fork(seq)
                if child is not None:
                    live.append((child, tokens))
        if rng.random() < 0.5:
            store.drain_copies()
        while live and (len(live) == 16 or rng.random() < 0.4):
            seq, tokens = live.pop(int(rng.integers(len(live))))
            store.close(seq, tokens, seq.computed)
    for seq, tokens in live:
        store.close(seq, tokens, seq.computed)
    store.drain_copies()
    store.check_integrity()
    assert store.stats().used == 0
    assert store.reserve(begin(store, text(7, 160)), store.max_length())


# -- windowed groups ------------------------------------------------------------------------------------------------

TWO = (LayerGroup("full"), LayerGroup("sliding", window=8, num_pages=6))


def decode(store: KVStore, seq: KVSequence, length: int) -> None:
    for end in range(seq.computed + 1, length + 1):
        assert store.reserve(seq, end)
        store.drain_copies()
        seq.computed = end


def test_a_windowed_group_keeps_its_window_and_lets_the_rest_go() -> None:
    store = make(groups=TWO)
    seq = begin(store, text(1, 8))
    decode(store, seq, 50)
    assert (seq.computed, seq.dropped) == (50, [0, 40])
    assert (len(row(store, seq, 0)), len(row(store, seq, 1))) == (13, 3)
    assert [pool.used for pool in store.pools] == [13, 3]
    store.check_integrity()


def test_a_windowed_pool_far_smaller_than_the_context_carries_it() -> None:
    store = make(pages=128, groups=TWO)
    assert store.max_length() == 512
    tokens = text(1, 512)
    seq = begin(store, tokens)
    for end in range(4, 513, 4):
        assert store.reserve(seq, end)
        store.commit(seq, tokens, end)
    store.check_integrity()
    store.close(seq, tokens, 512)
    store.check_integrity()
    assert store.max_length() == 512


def test_a_match_ends_where_every_window_is_whole() -> None:
    store = make(groups=TWO)
    tokens = text(1, 48)
    seq = begin(store, tokens)
    for end in range(4, 49, 4):
        assert store.reserve(seq, end)
        store.commit(seq, tokens, end)
    store.close(seq, tokens, 48)
    again = begin(store, tokens)
    assert again.cached == 47, "the last window is there"
    assert again.dropped == [0, 36]
    store.close(again, tokens, again.computed)
    assert store.match_length(tokens[:30]) == 0, "those pages of the windowed group have gone"
    assert any(eviction.group == 1 for eviction in store.evictions())
    store.check_integrity()


def test_what_a_windowed_group_has_lost_is_filled_in_when_it_is_computed_again() -> None:
    store = make(groups=TWO)
    tokens = text(1, 48)
    seq = begin(store, tokens)
    for end in range(4, 49, 4):
        assert store.reserve(seq, end)
        store.commit(seq, tokens, end)
    store.close(seq, tokens, 48)
    assert store.match_length(tokens[:13]) == 0
    assert remember(store, tokens[:13]) == 0
    assert store.match_length(tokens[:13]) == 12


def test_a_leaf_that_grows_loses_a_windowed_page_of_which_it_has_only_the_beginning() -> None:
    store = make(groups=TWO)
    tokens = text(1, 13)
    remember(store, tokens[:1])
    seq = store.open(tokens, use_cache=False)
    assert seq is not None
    for end in (12, 13):  # before the second step the first page leaves the window
        assert store.reserve(seq, end)
        store.drain_copies()
        seq.computed = end
    store.close(seq, tokens, 13)
    store.check_integrity()
    assert store.match_length(tokens[:6]) == 0, "the tree's page of block 0 holds one token of four"
    assert store.match_length(tokens) == 12


def test_going_back_behind_the_window_is_refused() -> None:
    store = make(groups=TWO)
    seq = begin(store, text(1, 8))
    decode(store, seq, 50)
    store.truncate(seq, 48)
    with pytest.raises(KVError, match="window"):
        store.truncate(seq, 30)
    store.check_integrity()


def test_a_tree_of_windowed_pages_only_shrinks_with_them() -> None:
    store = make(pages=12, groups=(LayerGroup("sliding", window=8),))
    for seed in range(60):
        remember(store, text(seed, 40), namespace=seed)
    assert store.stats().nodes <= 12
    assert store.stats().namespaces <= 12


def test_rows_are_handed_over_as_contiguous_arrays() -> None:
    store = make(groups=TWO)
    first, second = run(store, text(1, 10)), run(store, text(2, 6))
    tables = store.tables.gather(toks(second.slot, first.slot), 3)
    assert [table.shape for table in tables] == [(2, 3), (2, 3)]
    assert all(table.flags.c_contiguous and table.dtype == np.int32 for table in tables)
    assert tables[0].tolist() == [[*row(store, second), 0], row(store, first)]
