"""Page ids of one layer group: which are free, who needs the others, and which copies are due before the next step.

Owner: the engine loop, through KVStore. Knows nothing of tokens, sequences or tensors: a page is a number, and the
memory behind it belongs to the attention backend.

A page in use has two counts. `holds` counts page tables, pins and pending copies that need it now; `cached` counts
tree nodes that would like to keep it.

    free --allocate--> holds 1 --cache--> holds 1, cached 1 --release--> cached 1 (evictable) --uncache--> free

NOTE: the arrays given to hold, release, cache and uncache never contain a page twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVError

I32 = npt.NDArray[np.int32]

NO_PAGE = -1  # in a tree node of a windowed group: this block's page is gone


class PagePool:
    """`total` pages. Invariant: a page is free if and only if both of its counts are zero."""

    __slots__ = ("_copies", "_free", "_sources", "_top", "cached", "holds", "loads", "total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0  # pages with holds > 0
        self.holds: I32 = np.zeros(total, dtype=np.int32)
        self.cached: I32 = np.zeros(total, dtype=np.int32)
        self._free: I32 = np.arange(total - 1, -1, -1, dtype=np.int32)  # a stack: page 0 goes first
        self._top = total
        self.loads: dict[int, int] = {}  # page -> slot of the second tier it is filled from before the next step
        self._copies: dict[int, int] = {}  # destination -> source
        self._sources: dict[int, int] = {}  # source -> how many pending copies read it

    @property
    def free(self) -> int:
        return self._top

    @property
    def evictable(self) -> int:
        """Pages that only the tree keeps."""
        return self.total - self._top - self.used

    @property
    def available(self) -> int:
        """Pages that could be had: free and evictable."""
        return self.total - self.used

    def free_pages(self) -> I32:
        return self._free[: self._top].copy()

    def allocate(self, count: int) -> I32:
        """`count` free pages, each held once."""
        if count > self._top:
            raise KVError(f"{count} pages asked for, {self._top} free")
        self._top -= count
        pages = self._free[self._top : self._top + count].copy()
        self.holds[pages] = 1
        self.used += count
        return pages

    def hold(self, pages: I32) -> None:
        """One more holder for each page; the pages are held or cached already."""
        holds = self.holds[pages]
        self.used += pages.size - int(np.count_nonzero(holds))
        self.holds[pages] = holds + 1

    def release(self, pages: I32) -> None:
        """One holder fewer for each page; a page that nobody holds and the tree does not keep is free."""
        holds = self.holds[pages]
        if np.count_nonzero(holds) != holds.size:
            raise KVError(f"pages {pages[holds == 0].tolist()} released twice")
        holds -= 1
        self.holds[pages] = holds
        idle = pages[holds == 0]
        self.used -= idle.size
        self._give_back(idle[self.cached[idle] == 0])

    def cache(self, pages: I32) -> None:
        self.cached[pages] += 1

    def uncache(self, pages: I32) -> int:
        """One tree node fewer for each page. Returns how many pages became free."""
        cached = self.cached[pages]
        if np.count_nonzero(cached) != cached.size:
            raise KVError(f"pages {pages[cached == 0].tolist()} evicted twice")
        cached -= 1
        self.cached[pages] = cached
        idle = pages[cached == 0]
        freed = idle[self.holds[idle] == 0]
        self._give_back(freed)
        return int(freed.size)

    def is_shared(self, page: int) -> bool:
        """Whether writing the page would change what somebody else reads.

        A pending copy does not count: copies run before any row of the next step is written.
        """
        return int(self.holds[page]) + int(self.cached[page]) - (page in self._sources) > 1

    def queue_copy(self, source: int, target: int) -> None:
        """Before the next step the content of `source` goes to `target`, which the caller has just allocated.

        The source is held until the copies are drained, so that it cannot become another copy's target. A source that
        is itself a pending target is read at its origin: the copies of a step may run in any order, or all at once.
        """
        source = self._copies.get(source, source)
        self._copies[target] = source
        readers = self._sources.get(source, 0)
        self._sources[source] = readers + 1
        if not readers:
            self.hold(_one(source))

    def queue_load(self, slot: int, page: int) -> None:
        """Before the next step, and before its copies, `page` is filled from the second tier."""
        self.cancel_copy(page)
        self.loads[page] = slot

    def is_unwritten(self, page: int) -> bool:
        """Whether what the page is to hold is still on its way."""
        return page in self._copies or page in self.loads

    def drain_loads(self) -> dict[int, int]:
        """Page -> slot, for the very next step."""
        loads, self.loads = self.loads, {}
        return loads

    def drain_copies(self) -> I32:
        """[C, 2] pairs (source, target), for the very next step; their sources are let go."""
        if not self._copies:
            return np.empty((0, 2), dtype=np.int32)
        pairs = np.array([(source, target) for target, source in self._copies.items()], dtype=np.int32)
        sources = np.fromiter(self._sources, dtype=np.int32, count=len(self._sources))
        self._copies.clear()
        self._sources.clear()
        self.release(sources)
        return pairs

    def pending(self) -> dict[int, int]:
        """Target -> source of the copies not drained yet."""
        return dict(self._copies)

    def _give_back(self, pages: I32) -> None:
        self._free[self._top : self._top + pages.size] = pages
        self._top += pages.size
        if self._copies or self.loads:
            for page in pages.tolist():
                self.loads.pop(page, None)
                self.cancel_copy(page)

    def cancel_copy(self, target: int) -> None:
        """Leave a page as it is: its owner fills it in another way, or it is free."""
        source = self._copies.pop(target, None)
        if source is None:
            return
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
            self.release(_one(source))


def _one(page: int) -> I32:
    return np.array([page], dtype=np.int32)
