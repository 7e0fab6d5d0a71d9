from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import KVError
from kvstore.pool import I32, PagePool


def ids(*pages: int) -> I32:
    return np.array(pages, dtype=np.int32)


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3]
    assert (pool.free, pool.used, pool.available) == (0, 4, 0)
    pool.release(first)
    assert (pool.free, pool.used, pool.available) == (3, 1, 3)


def test_more_pages_than_are_free_is_an_error() -> None:
    pool = PagePool(2)
    with pytest.raises(KVError, match="3 pages asked for, 2 free"):
        pool.allocate(3)


def test_releasing_or_evicting_a_page_twice_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    pool.release(page)
    with pytest.raises(KVError, match="released twice"):
        pool.release(page)
    with pytest.raises(KVError, match="evicted twice"):
        pool.uncache(page)
    assert (pool.free, pool.used) == (2, 0)


def test_a_cached_page_is_free_only_after_its_last_holder_and_its_last_node() -> None:
    pool = PagePool(1)
    page = pool.allocate(1)
    pool.cache(page)
    pool.cache(page)
    pool.release(page)
    assert (pool.free, pool.evictable, pool.used) == (0, 1, 0)
    assert pool.uncache(page) == 0
    assert pool.uncache(page) == 1
    assert (pool.free, pool.evictable) == (1, 0)


def test_a_held_page_is_not_evictable() -> None:
    pool = PagePool(1)
    page = pool.allocate(1)
    pool.cache(page)
    pool.hold(page)
    pool.release(page)
    assert (pool.evictable, pool.available) == (0, 0)


def test_the_source_of_a_pending_copy_is_kept_until_the_copies_are_drained() -> None:
    pool = PagePool(3)
    source, target = pool.allocate(1), pool.allocate(1)
    pool.queue_copy(int(source[0]), int(target[0]))
    pool.release(source)
    assert pool.free == 1
    assert pool.drain_copies().tolist() == [[source[0], target[0]]]
    assert pool.free == 2
    assert pool.drain_copies().shape == (0, 2)


def test_a_source_copied_many_times_is_released_once() -> None:
    pool = PagePool(4)
    source, targets = pool.allocate(1), pool.allocate(3)
    for target in targets.tolist():
        pool.queue_copy(int(source[0]), target)
    pool.release(source)
    assert pool.free == 0
    assert len(pool.drain_copies()) == 3
    assert pool.free == 1


def test_a_copy_of_a_pending_copy_reads_the_origin() -> None:
    pool = PagePool(3)
    a, b, c = (int(page) for page in pool.allocate(3))
    pool.queue_copy(a, b)
    pool.queue_copy(b, c)
    assert pool.drain_copies().tolist() == [[a, b], [a, c]]


def test_a_pending_copy_into_a_page_that_is_freed_is_forgotten() -> None:
    pool = PagePool(3)
    source, target = pool.allocate(1), pool.allocate(1)
    pool.queue_copy(int(source[0]), int(target[0]))
    pool.release(target)
    pool.release(source)
    assert pool.free == 3
    assert pool.drain_copies().shape == (0, 2)


def test_a_page_is_shared_when_a_second_table_or_the_tree_has_it_but_not_when_a_copy_is_pending() -> None:
    pool = PagePool(3)
    page, target = pool.allocate(1), pool.allocate(1)
    assert not pool.is_shared(int(page[0]))
    pool.queue_copy(int(page[0]), int(target[0]))
    assert not pool.is_shared(int(page[0]))
    pool.hold(page)
    assert pool.is_shared(int(page[0]))
    pool.release(page)
    pool.cache(page)
    assert pool.is_shared(int(page[0]))


def test_no_page_is_asked_for_or_given_back_without_effect() -> None:
    pool = PagePool(2)
    assert pool.allocate(0).size == 0
    pool.release(ids())
    assert pool.free == 2
