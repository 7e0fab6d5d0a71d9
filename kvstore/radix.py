"""The radix tree: which token prefixes are in the KV memory, in which pages.

Owner: the engine loop, through KVStore. Knows nothing of requests or page tables; it keeps pages by their
`cached` count in the pools.

Tokens themselves are compared, whole runs at a time, so that nothing but the very same prefix in the very same
namespace ever matches. A match may end anywhere, inside a page too.

    root -- [0, 40) -+- [40, 96)        page size 16: block 2 is positions 32..47, so the node [0, 40) keeps the page
       blocks 0 1 2  |  blocks 2 3 4 5  of block 2 that one of its children keeps as well, and the other child has its
                     +- [40, 70)        own page for block 2, in which positions 32..39 hold the same tokens.
                        blocks 2 3 4

NOTE: two invariants make `PagePool.evictable` exact, so that a reservation can be refused before anything is evicted:
a node that ends inside a page and has children shares that last page with one of them; and whoever locks a node holds
the page of every block up to its end, a page boundary.

Nodes are kept in the order of their last use. Using a node uses its ancestors after it, so the oldest node of all is a
leaf, or on a path that someone has locked: eviction looks at the front and never searches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.node import Node
from kvstore.pool import I32, NO_PAGE, PagePool
from kvstore.runs import common_length, count_until, first_of

EXTENDABLE_TOKENS = 4096  # a longer leaf gets a child instead of growing in place: appending stays O(1)
EVICTIONS_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Eviction:
    """What was given up, and why. Positions [start, end) of a prefix; `tokens` are the first few of them."""

    tick: int  # the tree's clock: every use and every eviction moves it on
    idle: int  # ticks since it was last used
    namespace: Hashable
    start: int
    end: int
    tokens: tuple[int, ...]
    group: int | None  # a windowed group that lost pages from this range; None: the whole range left the tree
    freed: tuple[int, ...]  # pages per group
    kept: int  # of those, pages whose content the second tier has
    reason: str


class RadixTree:
    """`windows[g]` is the number of blocks a match must still have before the one it ends in; None means all."""

    def __init__(self, pools: Sequence[PagePool], page_size: int, windows: Sequence[int | None]) -> None:
        self.page_size = page_size
        self.roots: dict[Hashable, Node] = {}
        self.evicted_pages = 0
        self.evictions: deque[Eviction] = deque(maxlen=EVICTIONS_REMEMBERED)
        # Told of a leaf about to lose its pages from the n-th on; returns how many of them live on elsewhere.
        self.on_evict: Callable[[Node, int], int] = lambda leaf, keep: 0
        self._pools = tuple(pools)
        self._windows = tuple(windows)
        self._windowed = tuple(g for g, window in enumerate(windows) if window is not None)
        self._full = tuple(g for g, window in enumerate(windows) if window is None)
        self._tick = 0
        self._order: OrderedDict[Node, None] = OrderedDict()  # all nodes but roots, the least recently used first
        # for each windowed group the nodes that still have pages of it, in the same order
        self._paged: dict[int, OrderedDict[Node, None]] = {g: OrderedDict() for g in self._windowed}

    @property
    def nodes(self) -> int:
        return len(self._order)

    def by_age(self, group: int | None = None) -> Iterator[Node]:
        """The nodes, least recently used first: all, or those that still have pages of a windowed group."""
        return iter(self._order if group is None else self._paged[group])

    def by_use(self) -> Iterator[Node]:
        """The same nodes, the latest used first."""
        return reversed(self._order)

    # -- looking up ---------------------------------------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: I32, limit: int) -> tuple[Node | None, int]:
        """The longest usable prefix of tokens[:limit]: the deepest node it enters, and its length. Changes nothing."""
        node = self.roots.get(namespace)
        if node is None:
            return None, 0
        depth = 0
        while depth < limit:
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            depth += common_length(child.tokens, tokens[depth:limit])
            node = child
            if depth < child.end:
                break
        if self._windowed:
            depth = self._usable(node, depth)
            while node.start >= depth and node.parent is not None:
                node = node.parent
        return node, depth

    def path_pages(self, node: Node, group: int, first: int, last: int) -> I32:
        """The pages of blocks [first, last) on the path to `node`, in which all of them lie."""
        pages = np.empty(max(0, last - first), dtype=np.int32)
        step: Node | None = node
        while last > first:
            if step is None:
                raise IntegrityError("a path does not begin at its root")
            base = step.start // self.page_size
            begin = max(base, first)
            if begin < last:
                pages[begin - first : last - first] = step.pages[group][begin - base : last - base]
                last = begin
            step = step.parent
        return pages

    def path_tokens(self, node: Node) -> I32:
        """All tokens up to the node's end."""
        runs = [node.tokens]
        while node.parent is not None:
            node = node.parent
            runs.append(node.tokens)
        return np.concatenate(runs[::-1])

    def anchor(self, node: Node | None, end: int) -> Node | None:
        """The node on the path to `node` that ends exactly at `end`, split off if need be; None for an end of 0.

        It counts as used now.
        """
        if not end or node is None:
            return None
        while node.start >= end:
            if node.parent is None:
                raise IntegrityError("a path does not begin at its root")
            node = node.parent
        if node.end > end:
            node = self._split(node, end)
        self._touch(node)
        return node

    def anchor_above(self, node: Node | None, end: int) -> Node | None:
        """The deepest node on the path that ends at or before `end` and on a page boundary; None if there is none."""
        while node is not None and (node.end > end or node.end % self.page_size):
            node = node.parent
        return node if node is not None and node.end else None

    # -- keeping ------------------------------------------------------------------------------------------------

    def insert(
        self, namespace: Hashable, anchor: Node | None, tokens: I32, end: int, pages: Sequence[I32], *, close: bool
    ) -> tuple[Node, int]:
        """Keep tokens[:end], of which those up to the anchor are kept already.

        `pages[g]` are the caller's pages of blocks anchor.end // page_size .. (end - 1) // page_size. What the tree has
        already stays as it is. Returns the node that ends at `end`, and how many tokens were there before. On `close`
        nobody will lock that node, so it may be a longer one.
        """
        node = anchor or self._root(namespace)
        depth = node.end
        base = depth // self.page_size
        while depth < end:
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            depth += common_length(child.tokens, tokens[depth:end])
            for group in self._windowed:
                self._fill_holes(child, group, depth, pages[group], base)
            if depth < child.end and not (close and depth == end):
                child = self._split(child, depth)
            node = child
        known = depth
        if depth < end:
            tail = [run[depth // self.page_size - base :].copy() for run in pages]
            for pool, run in zip(self._pools, tail, strict=True):
                pool.cache(run[run != NO_PAGE])
            run = np.array(tokens[depth:end], dtype=np.int32)
            own_locks = 1 if node is anchor else 0
            if not node.children and node.locks == own_locks and 0 < node.end - node.start < EXTENDABLE_TOKENS:
                self._extend(node, run, tail)
            else:
                node = self._add_child(node, run, tail)
        self._touch(node)
        return node, known

    def lock(self, node: Node | None) -> None:
        if node is not None:
            node.locks += 1

    def unlock(self, node: Node | None) -> None:
        if node is not None:
            node.locks -= 1
            self._prune(node)

    # -- giving up ----------------------------------------------------------------------------------------------

    def evict(self, needs: Sequence[int], reason: str) -> None:
        """Make `needs[g]` pages free in every group, oldest leaves first, and no more than that.

        The caller has seen that the pools have them available.
        """
        while any(self._pools[g].free < needs[g] for g in self._full):
            leaf = self._oldest_leaf()
            if leaf is None:
                raise IntegrityError(f"the pools said that {list(needs)} pages could be had")
            self._shorten(leaf, needs, reason)
        for group in self._windowed:
            if self._pools[group].free < needs[group]:
                self._punch_holes(group, needs[group], reason)

    def evict_pages(self, pages: Sequence[int], reason: str) -> bool:
        """Give up oldest leaves until the tree keeps none of `pages[g]`. False if it must keep one."""
        while any(pool.cached[page] for pool, page in zip(self._pools, pages, strict=True)):
            leaf = self._oldest_leaf()
            if leaf is None:
                return False
            self._keep_pages(leaf, 0, reason)
        return True

    def reset(self) -> int:
        """Drop all that nobody holds. Returns how many pages became free."""
        before = sum(pool.free for pool in self._pools)
        while (leaf := self._oldest_leaf()) is not None:
            self._remove(leaf)
        for group in self._windowed:
            self._punch_holes(group, self._pools[group].total, None)
        return sum(pool.free for pool in self._pools) - before

    def _oldest_leaf(self) -> Node | None:
        """The least recently used leaf that is not locked. What is locked is in use, so it goes to the other end."""
        first_locked: Node | None = None
        while self._order:
            node = next(iter(self._order))
            if not node.locks and not node.children:
                return node
            if node is first_locked:
                return None
            first_locked = first_locked or node
            self._touch(node)
        return None

    def _shorten(self, leaf: Node, needs: Sequence[int], reason: str) -> None:
        """Cut pages off the end of a leaf until the full groups have what they need, or it is gone."""
        keep = leaf.pages[0].size
        for group in self._full:
            pool, pages = self._pools[group], leaf.pages[group]
            short = needs[group] - pool.free
            cut = 0
            while short > 0 and cut < pages.size:  # as many pages at a time as are short: nearly always one round
                tail = pages[max(0, pages.size - cut - short) : pages.size - cut]
                cut += tail.size
                short -= int(np.count_nonzero((pool.holds[tail] == 0) & (pool.cached[tail] == 1)))
            keep = min(keep, pages.size - cut)
        self._keep_pages(leaf, keep, reason)

    def _keep_pages(self, leaf: Node, keep: int, reason: str) -> None:
        start = max(leaf.start, (leaf.start // self.page_size + keep) * self.page_size)
        end, lost = leaf.end, leaf.tokens[start - leaf.start :]
        kept = self.on_evict(leaf, keep)
        freed = self._remove(leaf) if start == leaf.start else self._trim(leaf, start, keep)
        self._record(leaf, start, end, lost, None, freed, reason, kept)

    def _trim(self, leaf: Node, end: int, keep: int) -> list[int]:
        freed = [
            pool.uncache(run[keep:][run[keep:] != NO_PAGE]) for pool, run in zip(self._pools, leaf.pages, strict=True)
        ]
        leaf.pages = [first_of(run, keep) for run in leaf.pages]
        leaf.tokens = first_of(leaf.tokens, end - leaf.start)
        leaf.end = end
        self._list(leaf)
        return freed

    def _remove(self, leaf: Node) -> list[int]:
        parent = leaf.parent
        if parent is None:
            raise IntegrityError("a root cannot be evicted")
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        del self._order[leaf]
        for order in self._paged.values():
            order.pop(leaf, None)
        freed = [pool.uncache(run[run != NO_PAGE]) for pool, run in zip(self._pools, leaf.pages, strict=True)]
        if parent.parent is None:
            if not parent.children:
                del self.roots[parent.namespace]
            return freed
        if parent.children and parent.end % self.page_size:
            heir = next(reversed(parent.children.values()))
            for group in range(len(self._pools)):
                if parent.pages[group][-1] == leaf.pages[group][0] != NO_PAGE:
                    freed[group] += self._replace_last_page(parent, group, int(heir.pages[group][0]))
        return freed

    def _punch_holes(self, group: int, need: int, reason: str | None) -> None:
        """Let go of pages of a windowed group, from the nodes used longest ago, until `need` are free.

        A node whose other pages are held is in use, so it goes to the end of the order.
        """
        pool, order = self._pools[group], self._paged[group]
        for _ in range(len(order)):
            if pool.free >= need or not order:
                return
            node = next(iter(order))
            pages = node.pages[group]
            idle = np.flatnonzero((pages != NO_PAGE) & (pool.holds[pages] == 0))
            if idle.size:
                idle = idle[: count_until(pool.cached[pages[idle]] == 1, need - pool.free)]
                freed = [0] * len(self._pools)
                freed[group] = pool.uncache(pages[idle])
                pages[idle] = NO_PAGE
                first, last = (node.start // self.page_size + int(i) for i in (idle[0], idle[-1] + 1))
                start, end = max(node.start, first * self.page_size), min(node.end, last * self.page_size)
                lost = node.tokens[start - node.start : end - node.start]
                self._record(node, start, end, lost, group, freed, reason)
            if (pages == NO_PAGE).all():
                del order[node]
                self._prune(node)
            elif pool.free < need:
                order.move_to_end(node)

    def _prune(self, node: Node) -> None:
        """Take a leaf without any page out of the tree, and its ancestors that were waiting for that.

        Only where every group is windowed: a page of a full group goes together with its node.
        """
        while not self._full and node.parent is not None and not node.children and not node.locks:
            if any((run != NO_PAGE).any() for run in node.pages):
                return
            parent = node.parent
            self._remove(node)
            node = parent

    def _record(
        self,
        node: Node,
        start: int,
        end: int,
        lost: I32,
        group: int | None,
        freed: list[int],
        reason: str | None,
        kept: int = 0,
    ) -> None:
        if reason is not None:
            self._tick += 1
            self.evicted_pages += sum(freed)
            first, idle = tuple(lost[:8].tolist()), self._tick - node.last_used
            self.evictions.append(
                Eviction(self._tick, idle, node.namespace, start, end, first, group, tuple(freed), kept, reason)
            )

    # -- the shape of the tree ----------------------------------------------------------------------------------

    def _touch(self, node: Node) -> None:
        """Use a node and its ancestors now; each of them counts as used after its descendants."""
        self._tick += 1
        step = node
        while step.parent is not None:
            self._order.move_to_end(step)
            step.last_used = self._tick
            step = step.parent
        for order in self._paged.values():
            step = node
            while step.parent is not None:
                if step in order:
                    order.move_to_end(step)
                step = step.parent

    def _root(self, namespace: Hashable) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            empty = np.empty(0, dtype=np.int32)
            root = self.roots[namespace] = Node(namespace, None, 0, empty, [empty] * len(self._pools), 0)
        return root

    def _list(self, node: Node) -> None:
        """See that a node, new or with other pages than before, is found where pages are looked for."""
        self._order[node] = None
        for group, order in self._paged.items():
            if (node.pages[group] != NO_PAGE).any():
                order[node] = None
            else:
                order.pop(node, None)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two at position `at`, inside it. The lower part stays the same object; returns the upper."""
        parent = node.parent
        if parent is None:
            raise IntegrityError("a root cannot be split")
        cut = at - node.start
        base, last = node.start // self.page_size, (at - 1) // self.page_size
        upper_pages = [run[: last + 1 - base].copy() for run in node.pages]
        upper = Node(node.namespace, parent, node.start, node.tokens[:cut].copy(), upper_pages, node.last_used)
        parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.start = at
        node.tokens = node.tokens[cut:]
        node.pages = [run[at // self.page_size - base :].copy() for run in node.pages]
        upper.children[int(node.tokens[0])] = node
        if at % self.page_size:
            for pool, run in zip(self._pools, upper_pages, strict=True):
                if run[-1] != NO_PAGE:
                    pool.cache(run[-1:])
        self._list(node)
        self._list(upper)  # NOTE: the caller touches it, which puts it between its child and its parent
        return upper

    def _add_child(self, node: Node, tokens: I32, pages: list[I32]) -> Node:
        child = Node(node.namespace, node, node.end, tokens, pages, self._tick)
        if node.end % self.page_size and not node.children:
            for group, run in enumerate(pages):
                self._replace_last_page(node, group, int(run[0]))
        node.children[int(tokens[0])] = child
        self._list(child)
        return child

    def _extend(self, leaf: Node, tokens: I32, pages: list[I32]) -> None:
        """Append to a leaf. Where it ended inside a page, the caller's page of that block replaces its own.

        A caller whose window has moved on has none, and the leaf's own holds only the block's beginning: a hole.
        """
        if leaf.end % self.page_size:
            for group, run in enumerate(pages):
                if run[0] != NO_PAGE:
                    self._replace_last_page(leaf, group, int(run[0]))
                    self._pools[group].uncache(run[:1])  # counted by the leaf's last page now
                elif leaf.pages[group][-1] != NO_PAGE:
                    self._pools[group].uncache(leaf.pages[group][-1:])
                    leaf.pages[group][-1] = NO_PAGE
            pages = [run[1:] for run in pages]
        leaf.pages = [np.concatenate((old, new)) for old, new in zip(leaf.pages, pages, strict=True)]
        leaf.tokens = np.concatenate((leaf.tokens, tokens))
        leaf.end = leaf.start + leaf.tokens.size
        self._list(leaf)

    def _replace_last_page(self, node: Node, group: int, page: int) -> int:
        """Let a node that ends inside a page keep another page for that block; so do its ancestors in the same block.

        Returns how many pages became free.
        """
        pool = self._pools[group]
        old = int(node.pages[group][-1])
        freed = 0
        while page not in (old, NO_PAGE) and node.pages[group][-1] == old:
            pool.cache(np.array([page], dtype=np.int32))
            node.pages[group][-1] = page
            if old == NO_PAGE:
                self._list(node)
            else:
                freed += pool.uncache(np.array([old], dtype=np.int32))
            if node.pages[group].size > 1 or node.start % self.page_size == 0 or node.parent is None:
                break
            node = node.parent
        return freed

    # -- windowed groups ----------------------------------------------------------------------------------------

    def _usable(self, node: Node, length: int) -> int:
        """The longest match up to `length` whose windows are whole, in every windowed group."""
        shrunk = True
        while shrunk:
            shrunk = False
            for group in self._windowed:
                window = self._windows[group] or 0
                first, last = max(0, length // self.page_size - window), -(-length // self.page_size)
                while node.start >= length and node.parent is not None:
                    node = node.parent
                holes = np.flatnonzero(self.path_pages(node, group, first, last) == NO_PAGE)
                if holes.size:
                    length = (first + int(holes[-1])) * self.page_size
                    shrunk = True
        return length

    def _fill_holes(self, node: Node, group: int, depth: int, pages: I32, base: int) -> None:
        """Give the node the caller's pages for blocks that it has lost and that the match covers to their end."""
        start = node.start // self.page_size
        begin, last = max(start, base), depth // self.page_size
        if begin >= last:
            return
        theirs, ours = node.pages[group][begin - start : last - start], pages[begin - base : last - base]
        filled = (theirs == NO_PAGE) & (ours != NO_PAGE)
        if filled.any():
            self._pools[group].cache(ours[filled])
            theirs[filled] = ours[filled]
            self._list(node)
