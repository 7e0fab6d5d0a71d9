"""The KV store: where every key and value lives, for whom, and for how long.

Owner: the engine loop; no other thread or task calls it. Knows nothing of requests, batches or tensors. It moves page
ids; what is in the pages is written by the attention backend.

    positions   0        16       32       48     60
    a request   |--------|--------|--------|------|        `cached` 40, of them two whole pages shared with the tree
    its row     [  p7    |  p3    |  p9    | p12  ]        and the first 8 tokens of a third, copied into p9, its own
                 the tree's pages   own pages

A step of the engine is: open and reserve what will run, drain the copies, run (copies first, then the new rows), then
raise `computed`, commit, truncate, close. Calls for the next step may come while a step runs, because steps run in
order: a page freed now is written again by a later step only.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import KVError
from kvstore.integrity import check_store
from kvstore.node import Node
from kvstore.pool import I32, NO_PAGE, PagePool
from kvstore.radix import Eviction, RadixTree
from kvstore.sequence import CLOSED, KVSequence
from kvstore.tables import LayerGroup, PageTables
from kvstore.tier import HostTier, Moves


@dataclass(frozen=True, slots=True)
class KVStats:
    """Pages are summed over the layer groups: total = free + evictable + used."""

    total: int
    free: int
    evictable: int  # only the tree keeps them, and it would give them up
    used: int  # held by sequences, pins and pending copies
    sequences: int
    nodes: int
    namespaces: int
    query_tokens: int  # looked up by sequences that then got pages
    hit_tokens: int  # of those, found
    evicted_pages: int


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that stays in the tree until it is unpinned: whole pages only."""

    length: int
    node: Node
    pages: tuple[I32, ...]  # per group, what it holds
    hits: int = 0  # sequences that were opened with it
    last_hit: float | None = None  # reading of the monotonic clock


class KVStore:
    """One page pool and one page table per layer group, and one radix tree over all of them."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        max_model_len: int,
        prefix_caching: bool = True,
        groups: tuple[LayerGroup, ...] = (LayerGroup("full"),),
        tier: HostTier | None = None,
    ) -> None:
        if min(num_pages, page_size, max_sequences, max_model_len) < 1 or not groups:
            raise KVError("pages, page size, sequences, length and groups must be at least 1")
        if tier is not None and (len(groups) > 1 or groups[0].window is not None or not prefix_caching):
            raise KVError("a second tier needs prefix caching and a single layer group without a window")
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.groups = groups
        self.pools = tuple(PagePool(group.num_pages or num_pages) for group in groups)
        self.tables = PageTables(len(groups), max_sequences, self._blocks(max_model_len))
        self._windows = tuple(None if g.window is None else self._blocks(g.window) for g in groups)
        self.prefix_caching = prefix_caching
        self.tree = RadixTree(self.pools, page_size, self._windows)  # stays empty without prefix caching
        self.tier = tier
        if tier is not None:
            self.tree.on_evict = self._offload
        self._windowed = tuple(i for i, window in enumerate(self._windows) if window is not None)
        self.sequences: dict[int, KVSequence] = {}  # by slot
        self.pins: list[Pin] = []
        self._query_tokens = 0
        self._hit_tokens = 0

    # -- the life of a sequence ---------------------------------------------------------------------------------

    def open(self, tokens: I32, namespace: Hashable = None, *, use_cache: bool = True) -> KVSequence | None:
        """Take a slot and what the tree has of these tokens, all but the last at most. None when no slot is free.

        Whole pages are shared. A match that ends inside a page costs one page and a pending copy; that part is left
        out where the page cannot be had, or where the rest of the tokens would not fit next to the page copied from.
        `use_cache=False` finds nothing; what the sequence computes is given to the tree all the same.
        """
        if not 0 < len(tokens) <= self.max_model_len:
            raise KVError(f"a sequence of {len(tokens)} tokens, the page tables end at {self.max_model_len}")
        slot = self.tables.take_slot()
        if slot is None:
            return None
        groups = len(self.groups)
        seq = KVSequence(slot, namespace, 0, 0, dropped=[0] * groups, blocks=[0] * groups)
        self.sequences[slot] = seq
        if self.prefix_caching and use_cache:
            seq.uncounted = len(tokens)
            node, length = self.tree.match(namespace, tokens, len(tokens) - 1)
            if node is not None and length:
                self._share(seq, node, length, len(tokens))
        return seq

    def match_length(self, tokens: I32, namespace: Hashable = None) -> int:
        """How many tokens `open` could find, without touching anything."""
        return self.tree.match(namespace, tokens, len(tokens) - 1)[1]

    def reserve(self, seq: KVSequence, length: int) -> bool:
        """See that positions [computed, length) have pages that nobody else reads. All or nothing.

        Evicts what is missing and is only cached. False leaves the sequence as it was: others must give up pages first.
        Costs nothing while `length <= seq.writable`; a caller in a hurry may look there itself.
        """
        if length <= seq.writable:
            return True
        self._check_open(seq)
        if length > self.max_model_len:
            raise KVError(f"{length} positions reserved, the page tables end at {self.max_model_len}")
        blocks = self._blocks(length)
        first_block, offset = divmod(seq.computed, self.page_size)
        needs, shared = [], []
        for group, pool in enumerate(self.pools):
            if self._windows[group] is not None:
                self._slide(seq, group)
            have = seq.blocks[group]
            copy = offset > 0 and first_block < have and pool.is_shared(self._page(seq, group, first_block))
            shared.append(copy)
            needs.append(max(0, blocks - have) + copy)
        if not self._make_room(needs, seq, length):
            return any(shared) and self._win_back(seq, first_block) and self.reserve(seq, length)
        for group in range(len(self.pools)):
            if shared[group]:
                self._copy_on_write(seq, group, first_block)
            self._append_pages(seq, group, blocks)
        seq.writable = min(min(seq.blocks) * self.page_size, self.max_model_len)
        self._query_tokens += seq.uncounted
        if seq.uncounted:
            self._hit_tokens += seq.cached
            self._count_pins(seq)
        seq.uncounted = 0
        return True

    def restore(self, seq: KVSequence, tokens: I32) -> int:
        """Go on with the whole pages that the second tier has of tokens[computed:-1], where that is the cheaper way.

        For a sequence that has reserved them. They are filled before the next step and, like pages with pending
        copies, can be shared at once. Returns what is computed then.
        """
        first = seq.computed // self.page_size
        slots = self.tier.find(seq.namespace, tokens[:-1], first) if self.tier is not None else ()
        if slots:
            for block, slot in enumerate(slots, first):
                self.pools[0].queue_load(slot, self._page(seq, 0, block))
            end = (first + len(slots)) * self.page_size
            self._hit_tokens += end - seq.cached
            seq.cached = end
            self.commit(seq, tokens, seq.cached)
        return seq.computed

    def commit(self, seq: KVSequence, tokens: I32, computed: int) -> None:
        """tokens[:computed] are in the KV memory now: others may share their whole pages from here on.

        Where another sequence has given the same tokens before, its pages stay in the tree, this sequence changes over
        to them, and its own duplicates are freed. Costs next to nothing when no page was completed.
        """
        self._check_computed(seq, tokens, computed)
        if computed < seq.computed:
            raise KVError(f"{computed} tokens committed after {seq.computed}: that is what truncate is for")
        seq.computed = computed
        end = computed - computed % self.page_size
        start = seq.anchor.end if seq.anchor else 0
        if not self.prefix_caching or end <= start:
            return
        node, known = self._give(seq, tokens, end, close=False)
        self.tree.lock(node)
        self.tree.unlock(seq.anchor)
        seq.anchor = node
        self._adopt(seq, node, start // self.page_size, known // self.page_size)

    def fork(self, seq: KVSequence) -> KVSequence | None:
        """A second sequence with the same first `computed` tokens in the same pages; whoever writes first copies.

        Pages that `seq` has reserved beyond them stay its own. None when no slot is free.
        """
        self._check_open(seq)
        slot = self.tables.take_slot()
        if slot is None:
            return None
        end = self._blocks(seq.computed)
        child = KVSequence(slot, seq.namespace, seq.cached, seq.computed, dropped=list(seq.dropped))
        child.blocks = [min(end, blocks) for blocks in seq.blocks]
        child.anchor = seq.anchor
        self.tree.lock(child.anchor)
        for group, pool in enumerate(self.pools):
            pages = self.row(seq, group)[: child.blocks[group] - seq.dropped[group] // self.page_size]
            self.tables.rows[group][slot, : pages.size] = pages
            pool.hold(pages)
        self.sequences[slot] = child
        seq.writable = 0
        return child

    def truncate(self, seq: KVSequence, length: int) -> None:
        """Forget the positions from `length` on; their pages are released.

        Raises KVError where a windowed group has already let go of what the shorter sequence would need.
        """
        self._check_open(seq)
        first_block, end = length // self.page_size, self._blocks(length)
        for group in self._windowed:
            if seq.dropped[group] > max(0, first_block - (self._windows[group] or 0)) * self.page_size:
                raise KVError(f"cannot go back to {length}: the window has moved on")
        for group, pool in enumerate(self.pools):
            row = self.row(seq, group)
            keep = max(0, end - seq.dropped[group] // self.page_size)
            if keep < row.size:
                pool.release(row[keep:])
                row[keep:] = 0
                seq.blocks[group] = end
        seq.computed = min(seq.computed, length)
        seq.writable = 0
        if seq.anchor is not None and seq.anchor.end > length:
            anchor = self.tree.anchor_above(seq.anchor, length)
            self.tree.lock(anchor)
            self.tree.unlock(seq.anchor)
            seq.anchor = anchor

    def close(self, seq: KVSequence, tokens: I32, computed: int) -> None:
        """Give tokens[:computed] to the tree, an unfinished last page included, and the rest back. Only once."""
        self._check_computed(seq, tokens, computed)
        seq.computed = computed
        if self.prefix_caching and computed > (seq.anchor.end if seq.anchor else 0):
            self._give(seq, tokens, computed, close=True)
        self.tree.unlock(seq.anchor)
        for group, pool in enumerate(self.pools):
            pool.release(self.row(seq, group))
        del self.sequences[seq.slot]
        self.tables.give_slot(seq.slot)
        seq.slot, seq.anchor, seq.writable = CLOSED, None, 0

    def drain_copies(self) -> tuple[I32, ...]:
        """Per group [C, 2] pages (source, target) that the next step copies before it writes any row.

        Drain once for every step, after its last reservation; until then the sources are held. They may be copied
        in any order, or all at once.
        """
        return tuple(pool.drain_copies() for pool in self.pools)

    def drain_moves(self) -> Moves | None:
        """What the next step moves between the tiers before its copies. Drain once for every step."""
        return self.tier.drain(self.pools[0].drain_loads()) if self.tier is not None else None

    # -- the cache as a whole -----------------------------------------------------------------------------------

    def pin(self, tokens: I32, namespace: Hashable = None) -> Pin | None:
        """Keep the cached whole pages of a prefix whatever happens, until `unpin`. None when there are none."""
        node, length = self.tree.match(namespace, tokens, len(tokens))
        end = length - length % self.page_size
        anchor = self.tree.anchor(node, end)
        if anchor is None:
            return None
        last = end // self.page_size
        firsts = [0 if window is None else max(0, last - window) for window in self._windows]
        pages = tuple(self.tree.path_pages(anchor, group, first, last) for group, first in enumerate(firsts))
        for pool, run in zip(self.pools, pages, strict=True):
            pool.hold(run)
        self.tree.lock(anchor)
        self.pins.append(Pin(end, anchor, pages))
        return self.pins[-1]

    def pin_room(self) -> int:
        """Tokens that can still be pinned: half of the pool for all pins at most, and one full context beside them."""
        context = self._blocks(self.max_model_len)
        pinned = [sum(pin.pages[group].size for pin in self.pins) for group in range(len(self.pools))]
        most = [min(pool.total // 2, pool.total - context) for pool in self.pools]
        left = [pages - taken for pages, taken in zip(most, pinned, strict=True)]
        return max(0, min(left)) * self.page_size

    def unpin(self, pin: Pin) -> None:
        if pin not in self.pins:
            raise KVError("not pinned")
        self.pins.remove(pin)
        self.tree.unlock(pin.node)
        for pool, run in zip(self.pools, pin.pages, strict=True):
            pool.release(run)

    def _count_pins(self, seq: KVSequence) -> None:
        step = seq.anchor if self.pins else None
        while step is not None:
            for pin in self.pins:
                if pin.node is step:
                    pin.hits, pin.last_hit = pin.hits + 1, time.monotonic()
            step = step.parent

    def reset(self) -> int:
        """Drop what nobody holds from the tree. Returns how many pages became free."""
        if self.tier is not None:
            self.tier.clear()
        return self.tree.reset()

    def max_length(self) -> int:
        """The longest sequence that fits into the whole pool, written in steps of a page or less."""
        longest = self.max_model_len
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None or pool.total <= window + 1:
                longest = min(longest, pool.total * self.page_size)
        return longest

    def evictions(self) -> tuple[Eviction, ...]:
        """The last evictions, oldest first."""
        return tuple(self.tree.evictions)

    def stats(self) -> KVStats:
        return KVStats(
            total=sum(pool.total for pool in self.pools),
            free=sum(pool.free for pool in self.pools),
            evictable=sum(pool.evictable for pool in self.pools),
            used=sum(pool.used for pool in self.pools),
            sequences=len(self.sequences),
            nodes=self.tree.nodes,
            namespaces=len(self.tree.roots),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self.tree.evicted_pages,
        )

    def row(self, seq: KVSequence, group: int) -> I32:
        """The used part of the sequence's row, as a view."""
        return self.tables.rows[group][seq.slot, : seq.blocks[group] - seq.dropped[group] // self.page_size]

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch. Raises IntegrityError with all that is wrong."""
        check_store(self)

    # -- pages --------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _page(self, seq: KVSequence, group: int, block: int) -> int:
        return int(self.tables.rows[group][seq.slot, block - seq.dropped[group] // self.page_size])

    def _share(self, seq: KVSequence, node: Node, length: int, wanted: int) -> None:
        """Put a match into the table: whole pages by reference, the rest by copy if that leaves room for `wanted`."""
        end = length - length % self.page_size
        anchor = seq.anchor = self.tree.anchor(node, end)
        self.tree.lock(anchor)
        last = end // self.page_size
        for group, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            first = 0 if window is None else max(0, last - window)
            seq.dropped[group], seq.blocks[group] = first * self.page_size, last
            if anchor is not None:
                self.row(seq, group)[:] = self.tree.path_pages(anchor, group, first, last)
                pool.hold(self.row(seq, group))
        seq.cached = seq.computed = end
        if length > end and self._share_part(seq, node, wanted):
            seq.cached = seq.computed = length

    def _share_part(self, seq: KVSequence, node: Node, wanted: int) -> bool:
        block = seq.computed // self.page_size
        sources = [run[block - node.start // self.page_size :][:1].copy() for run in node.pages]
        for pool, source in zip(self.pools, sources, strict=True):
            pool.hold(source)
        needs = [1 if window is not None else self._blocks(wanted) - block for window in self._windows]
        fits = all(need <= pool.available for need, pool in zip(needs, self.pools, strict=True))
        if fits:
            self._make_room([1] * len(self.pools), seq, seq.computed + 1)
            for group, pool in enumerate(self.pools):
                self._append_pages(seq, group, block + 1)
                pool.queue_copy(int(sources[group][0]), self._page(seq, group, block))
        for pool, source in zip(self.pools, sources, strict=True):
            pool.release(source)
        return fits

    def _make_room(self, needs: Sequence[int], seq: KVSequence, length: int) -> bool:
        if all(pool.free >= need for pool, need in zip(self.pools, needs, strict=True)):
            return True
        if any(pool.available < need for pool, need in zip(self.pools, needs, strict=True)):
            return False
        self.tree.evict(needs, f"slot {seq.slot} grows from {seq.computed} to {length}")
        return True

    def _win_back(self, seq: KVSequence, block: int) -> bool:
        """Make the tree give up its share of a page that only this sequence holds, when there is none to copy to."""
        pages = [self._page(seq, group, block) for group in range(len(self.pools))]
        alone = all(pool.holds[page] == 1 for pool, page in zip(self.pools, pages, strict=True))
        return alone and self.tree.evict_pages(pages, f"slot {seq.slot} writes into the last page there is")

    def _append_pages(self, seq: KVSequence, group: int, blocks: int) -> None:
        have = seq.blocks[group]
        if blocks > have:
            seq.blocks[group] = blocks
            self.row(seq, group)[have - blocks :] = self.pools[group].allocate(blocks - have)

    def _copy_on_write(self, seq: KVSequence, group: int, block: int) -> None:
        pool = self.pools[group]
        index = block - seq.dropped[group] // self.page_size
        shared, fresh = self.row(seq, group)[index : index + 1], pool.allocate(1)
        pool.queue_copy(int(shared[0]), int(fresh[0]))
        pool.release(shared)
        shared[:] = fresh

    def _slide(self, seq: KVSequence, group: int) -> None:
        """Release the pages that have left the window."""
        first = max(0, seq.computed // self.page_size - (self._windows[group] or 0))
        gone = first - seq.dropped[group] // self.page_size
        if gone > 0:
            row = self.row(seq, group)
            self.pools[group].release(row[:gone])
            row[:-gone] = row[gone:].copy()
            row[-gone:] = 0
            seq.dropped[group] = first * self.page_size

    # -- the tree -----------------------------------------------------------------------------------------------

    def _give(self, seq: KVSequence, tokens: I32, end: int, *, close: bool) -> tuple[Node, int]:
        start = seq.anchor.end // self.page_size if seq.anchor else 0
        pages = [self._absolute(seq, group, start, self._blocks(end)) for group in range(len(self.pools))]
        return self.tree.insert(seq.namespace, seq.anchor, tokens, end, pages, close=close)

    def _absolute(self, seq: KVSequence, group: int, start: int, end: int) -> I32:
        """The sequence's pages of blocks [start, end), NO_PAGE where the window has moved on."""
        first = seq.dropped[group] // self.page_size
        pages = self.tables.rows[group][seq.slot, max(0, start - first) : max(0, end - first)]
        if start >= first:
            return pages
        return np.concatenate((np.full(end - start - pages.size, NO_PAGE, dtype=np.int32), pages))

    def _adopt(self, seq: KVSequence, node: Node, start: int, end: int) -> None:
        """Change over to the tree's pages for blocks [start, end), which it had before."""
        for group, pool in enumerate(self.pools):
            first = seq.dropped[group] // self.page_size
            begin = max(start, first)
            if begin >= end:
                continue
            ours = self.row(seq, group)[begin - first : end - first]
            theirs = self.tree.path_pages(node, group, begin, end)
            differ = (ours != theirs) & (theirs != NO_PAGE)
            if differ.any():
                pool.hold(theirs[differ])
                pool.release(ours[differ])
                ours[differ] = theirs[differ]

    def _offload(self, leaf: Node, keep: int) -> int:
        """Save what the pages of a leaf from the `keep`-th on hold, where they are whole and nobody else keeps them."""
        pool, first = self.pools[0], leaf.start // self.page_size + keep
        pages = {
            block: page
            for block, page in enumerate(leaf.pages[0][keep:].tolist(), first)
            if (block + 1) * self.page_size <= leaf.end
            and pool.holds[page] == 0
            and pool.cached[page] == 1
            and not pool.is_unwritten(page)
        }
        if self.tier is None or not pages:
            return 0
        return self.tier.offload(leaf.namespace, self.tree.path_tokens(leaf), first, pages)

    # -- contract checks ----------------------------------------------------------------------------------------

    def _check_open(self, seq: KVSequence) -> None:
        if self.sequences.get(seq.slot) is not seq:
            raise KVError("the sequence is closed")

    def _check_computed(self, seq: KVSequence, tokens: I32, computed: int) -> None:
        self._check_open(seq)
        if not 0 <= computed <= min(len(tokens), min(seq.blocks) * self.page_size):
            raise KVError(
                f"{computed} tokens computed, {len(tokens)} given, {min(seq.blocks) * self.page_size} reserved"
            )
