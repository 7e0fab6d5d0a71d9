"""Every invariant of the store, recomputed from scratch.

Owner: whoever doubts. The tests call it after each operation, the daemon when idle after an error. It reads everything,
changes nothing, and takes time linear in the pages and the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.node import Node
from kvstore.pool import NO_PAGE
from kvstore.radix import RadixTree

if TYPE_CHECKING:
    from kvstore.store import KVStore


def check_store(store: KVStore) -> None:
    """Raises IntegrityError with one line for each broken invariant."""
    nodes = list(_walk(store.tree))
    wrong = [*_tree_faults(store, nodes), *_sequence_faults(store)]
    for group in range(len(store.pools)):
        wrong += _count_faults(store, nodes, group)
        wrong += _paged_faults(store, nodes, group)
        wrong += _evictable_faults(store, nodes, group)
    if wrong:
        raise IntegrityError("\n".join(wrong))


def _walk(tree: RadixTree) -> Iterator[Node]:
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _count_faults(store: KVStore, nodes: list[Node], group: int) -> Iterator[str]:
    """Each page is free, held or cached, as often as there is someone to hold or cache it."""
    pool, name = store.pools[group], store.groups[group].name
    holds, cached = np.zeros(pool.total, dtype=np.int32), np.zeros(pool.total, dtype=np.int32)
    for seq in store.sequences.values():
        np.add.at(holds, store.row(seq, group), 1)
    for pin in store.pins:
        np.add.at(holds, pin.pages[group], 1)
    pending = pool.pending()
    for source in set(pending.values()):
        holds[source] += 1
    for node in nodes:
        np.add.at(cached, node.pages[group][node.pages[group] != NO_PAGE], 1)
    for what, expected, actual in (("holds", holds, pool.holds), ("cached", cached, pool.cached)):
        for page in np.flatnonzero(expected != actual).tolist():
            yield f"{name}: page {page} has {what} {actual[page]}, found {expected[page]}"
    free = pool.free_pages()
    if np.unique(free).size != free.size:
        yield f"{name}: a page is in the free list twice"
    if set(free.tolist()) != set(np.flatnonzero(holds + cached == 0).tolist()):
        yield f"{name}: the free list is not what nobody holds or caches"
    if pool.used != np.count_nonzero(holds):
        yield f"{name}: used is {pool.used}, found {np.count_nonzero(holds)}"
    if pending.keys() & set(pending.values()):
        yield f"{name}: a page is both read and written by the pending copies"
    for target in (*pending, *pool.loads):
        if holds[target] + cached[target] == 0:
            yield f"{name}: a {'load' if target in pool.loads else 'copy'} is pending into free page {target}"


def _sequence_faults(store: KVStore) -> Iterator[str]:
    size = store.page_size
    if len(store.sequences) + store.tables.free_slots != store.tables.rows[0].shape[0]:
        yield "slots are neither free nor in use"
    for slot, seq in store.sequences.items():
        if seq.slot != slot:
            yield f"slot {slot} is listed for a sequence that has slot {seq.slot}"
        end = seq.anchor.end if seq.anchor else 0
        if seq.anchor is not None and seq.anchor.parent is None:
            yield f"slot {slot}: its node has left the tree"
        if end % size or end > seq.computed:
            yield f"slot {slot}: locked up to {end} with {seq.computed} computed"
        for group, pool in enumerate(store.pools):
            row, first = store.row(seq, group), seq.dropped[group] // size
            if seq.computed > seq.blocks[group] * size or seq.writable > seq.blocks[group] * size:
                yield f"slot {slot}: {seq.computed} computed, {seq.writable} writable in {seq.blocks[group]} blocks"
            if store.tables.rows[group][slot, row.size :].any():
                yield f"slot {slot}: the row is not 0 after its pages"
            if seq.anchor is not None:
                theirs = store.tree.path_pages(seq.anchor, group, min(first, end // size), end // size)
                if ((row[: theirs.size] != theirs) & (theirs != NO_PAGE)).any():
                    yield f"slot {slot}: its row and the tree's path differ before {end}"
            own = -(-seq.computed // size) if seq.writable <= seq.computed else seq.computed // size
            for page in row[own - first :].tolist():
                if pool.is_shared(page):
                    yield f"slot {slot}: it may write page {page}, which is shared"


def _tree_faults(store: KVStore, nodes: list[Node]) -> Iterator[str]:
    tree, size = store.tree, store.page_size
    rank = {node: i for i, node in enumerate(tree.by_age())}
    if len(nodes) - len(tree.roots) != tree.nodes:
        yield f"the tree counts {tree.nodes} nodes, found {len(nodes) - len(tree.roots)}"
    locks: dict[int, int] = {}
    for holder in [seq.anchor for seq in store.sequences.values()] + [pin.node for pin in store.pins]:
        locks[id(holder)] = locks.get(id(holder), 0) + 1
    for node in nodes:
        where = f"node {node.namespace!r} [{node.start}, {node.end})"
        if node.parent is None:
            if not node.children or tree.roots.get(node.namespace) is not node:
                yield f"{where}: an empty or stray root"
            continue
        if node.parent.children.get(int(node.tokens[0])) is not node or node.parent.end != node.start:
            yield f"{where}: not where its parent has it"
        if node.tokens.size != node.end - node.start or node.tokens.size == 0:
            yield f"{where}: {node.tokens.size} tokens"
        blocks = (node.end - 1) // size - node.start // size + 1
        if any(run.size != blocks for run in node.pages):
            yield f"{where}: {[run.size for run in node.pages]} pages for {blocks} blocks"
        if node.locks != locks.get(id(node), 0):
            yield f"{where}: {node.locks} locks, found {locks.get(id(node), 0)}"
        if rank.get(node, -1) < max((rank.get(child, -1) for child in node.children.values()), default=0):
            yield f"{where}: older than one of its children, or not in the order of use"


def _paged_faults(store: KVStore, nodes: list[Node], group: int) -> Iterator[str]:
    """In a windowed group, each node that still has pages can be found when pages are needed, and no other."""
    if store.groups[group].window is None:
        return
    if set(store.tree.by_age(group)) != {node for node in nodes if (node.pages[group] != NO_PAGE).any()}:
        yield f"{store.groups[group].name}: the nodes with pages are not those in the order of use"


def _evictable_faults(store: KVStore, nodes: list[Node], group: int) -> Iterator[str]:
    """In a full group, all that nobody holds can be had by evicting leaves that nobody locks."""
    if store.groups[group].window is not None:
        return
    name, size, holds = store.groups[group].name, store.page_size, store.pools[group].holds
    fixed: set[int] = set()
    for node in nodes:
        if node.locks:
            step: Node | None = node
            while step is not None and id(step) not in fixed:
                fixed.add(id(step))
                step = step.parent
    loose = {page for node in nodes if id(node) not in fixed for page in node.pages[group].tolist()}
    for node in nodes:
        heirs = [child.pages[group][0] for child in node.children.values()]
        if node.end % size and heirs and node.pages[group][-1] not in heirs:
            yield f"{name}: the last page of [{node.start}, {node.end}) is none of its children's"
        if id(node) in fixed:
            for page in node.pages[group].tolist():
                if not holds[page] and page not in loose:
                    yield f"{name}: page {page} is locked and nobody holds it"
