"""Each invariant can be broken, and then `check_integrity` says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import IntegrityError
from kvstore.node import Node
from kvstore.sequence import KVSequence
from kvstore.store import KVStore

TOKENS = np.arange(1, 31, dtype=np.int32)


def build() -> tuple[KVStore, KVSequence]:
    """A running sequence that shares the tree's first pages, a branch inside a page, and a leaf of its own."""
    store = KVStore(num_pages=32, page_size=4, max_sequences=4, max_model_len=64)
    for tokens in (TOKENS[:18], np.concatenate((TOKENS[:10], TOKENS[:9]))):
        seq = store.open(tokens)
        assert seq is not None
        assert store.reserve(seq, len(tokens))
        store.close(seq, tokens, len(tokens))
    seq = store.open(TOKENS)
    assert seq is not None
    assert store.reserve(seq, 30)
    store.check_integrity()
    return store, seq


def trunk(store: KVStore) -> Node:
    return store.tree.roots[None].children[1]


def leak_a_page(store: KVStore, seq: KVSequence) -> None:
    store.pools[0].allocate(1)


def free_a_page_in_use(store: KVStore, seq: KVSequence) -> None:
    store.pools[0]._give_back(store.tables.rows[0][seq.slot, :1])


def share_what_may_be_written(store: KVStore, seq: KVSequence) -> None:
    other = store.open(TOKENS[5:9])
    assert other is not None
    store.tables.rows[0][other.slot, 0] = store.tables.rows[0][seq.slot, 6]
    store.pools[0].hold(store.tables.rows[0][seq.slot, 6:7])
    other.blocks[0] = 1


def miscount(store: KVStore, seq: KVSequence) -> None:
    store.pools[0].used += 1


def forget_a_lock(store: KVStore, seq: KVSequence) -> None:
    assert seq.anchor is not None
    seq.anchor.locks -= 1


def leave_rubbish_in_a_row(store: KVStore, seq: KVSequence) -> None:
    store.tables.rows[0][seq.slot, 12] = 3


def stray_from_the_path(store: KVStore, seq: KVSequence) -> None:
    row = store.tables.rows[0][seq.slot]
    row[0], row[6] = row[6], row[0]


def move_a_node(store: KVStore, seq: KVSequence) -> None:
    trunk(store).start += 1


def lose_a_page_of_a_node(store: KVStore, seq: KVSequence) -> None:
    trunk(store).pages[0] = trunk(store).pages[0][1:]


def forget_the_age_of_a_leaf(store: KVStore, seq: KVSequence) -> None:
    del store.tree._order[next(store.tree.by_age())]


def use_a_child_after_its_parent(store: KVStore, seq: KVSequence) -> None:
    store.tree._order.move_to_end(next(store.tree.by_age()))


def leave_an_empty_root(store: KVStore, seq: KVSequence) -> None:
    store.tree._root("nobody")


def keep_a_page_that_no_child_has(store: KVStore, seq: KVSequence) -> None:
    node = trunk(store)
    while node.end % 4 == 0:
        node = next(iter(node.children.values()))
    old, new = node.pages[0][-1:].copy(), store.pools[0].allocate(1)
    store.pools[0].cache(new)
    store.pools[0].release(new)
    node.pages[0][-1:] = new
    store.pools[0].uncache(old)


def copy_into_a_free_page(store: KVStore, seq: KVSequence) -> None:
    free = int(store.pools[0].free_pages()[0])
    store.pools[0].queue_copy(int(store.tables.rows[0][seq.slot, 0]), free)


def compute_more_than_is_reserved(store: KVStore, seq: KVSequence) -> None:
    seq.computed = 60


def lose_a_slot(store: KVStore, seq: KVSequence) -> None:
    store.tables.take_slot()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leak_a_page, "has holds 1, found 0"),
        (free_a_page_in_use, "the free list is not what nobody"),
        (share_what_may_be_written, "it may write page .*, which is shared"),
        (miscount, "used is"),
        (forget_a_lock, "0 locks, found 1"),
        (leave_rubbish_in_a_row, "not 0 after its pages"),
        (stray_from_the_path, "the tree's path differ"),
        (move_a_node, "not where its parent has it"),
        (lose_a_page_of_a_node, "pages for"),
        (forget_the_age_of_a_leaf, "not in the order of use"),
        (use_a_child_after_its_parent, "older than one of its children"),
        (leave_an_empty_root, "an empty or stray root"),
        (keep_a_page_that_no_child_has, "is none of its children's"),
        (copy_into_a_free_page, "a copy is pending into free page"),
        (compute_more_than_is_reserved, "60 computed"),
        (lose_a_slot, "slots are neither free nor in use"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[KVStore, KVSequence], None], message: str) -> None:
    store, seq = build()
    damage(store, seq)
    with pytest.raises(IntegrityError, match=message):
        store.check_integrity()
