"""Page tables: for each layer group one matrix, for each sequence one row of it.

Owner: the engine loop, through KVStore. Knows nothing of tokens or of who shares a page. A *slot* is a row number; it
is the same in every group and belongs to one open sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.pool import I32


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that share one page table.

    With a window, a query attends to the last `window` positions, itself included, and pages that have slid out of
    it are let go. `num_pages` is the group's own pool size where it differs from the store's.
    """

    name: str
    window: int | None = None
    num_pages: int | None = None


class PageTables:
    """`rows[g]` is [max_sequences, max_pages] int32, C-contiguous, at the same address for the life of the store.

    Entries past a sequence's pages are 0: always safe to read, never meaningful.
    """

    __slots__ = ("_slots", "rows")

    def __init__(self, groups: int, max_sequences: int, max_pages: int) -> None:
        self.rows: tuple[I32, ...] = tuple(np.zeros((max_sequences, max_pages), dtype=np.int32) for _ in range(groups))
        self._slots = list(range(max_sequences - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def take_slot(self) -> int | None:
        return self._slots.pop() if self._slots else None

    def give_slot(self, slot: int) -> None:
        for rows in self.rows:
            rows[slot] = 0
        self._slots.append(slot)

    def gather(self, slots: npt.NDArray[np.intp] | I32, pages: int) -> tuple[I32, ...]:
        """Per group the first `pages` entries of these rows: [len(slots), pages], C-contiguous copies."""
        return tuple(rows[:, :pages].take(slots, axis=0) for rows in self.rows)
