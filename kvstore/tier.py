"""The second tier: what evicted pages held, kept in slower memory until it is asked for again.

Owner: the engine loop, through KVStore; `move` alone runs in the model's thread, as the first part of a step. Knows
tokens only as the key of what a page holds: a page is found by a 256-bit digest of its namespace and of all tokens up
to its end, so that nobody can make two prefixes meet.

Whether a page is worth its way there and back is decided by measured times: what a page took to move, and what a token
took to compute. A verdict against moving wears off by itself, so that a slow moment of the disk is not for ever.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.pool import I32

U8 = npt.NDArray[np.uint8]

_WEIGHT = 0.2  # of a new measurement in the running mean
_WEAR = 0.98  # what a refusal leaves of the cost that spoke against moving


class PageMemory(Protocol):
    """Who has the pages' bytes: the model's runner."""

    def read_page(self, page: int, out: U8) -> None: ...

    def write_page(self, page: int, data: U8) -> None: ...


@dataclass(frozen=True, slots=True)
class Moves:
    """What the next step moves before anything else: all stores, then all loads."""

    stores: tuple[tuple[int, int], ...]  # (page, slot)
    loads: tuple[tuple[int, int], ...]  # (slot, page)


class Costs:
    """Seconds, running means of what was measured; 0 until then, which is in favour of trying."""

    def __init__(self) -> None:
        self.store_page = self.load_page = self.compute_token = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        self.compute_token = _mean(self.compute_token, seconds / tokens)

    def pays(self, page_size: int, *, both_ways: bool) -> bool:
        """Whether moving a page costs less than computing its tokens."""
        cost = self.load_page + (self.store_page if both_ways else 0.0)
        if not self.compute_token or cost < self.compute_token * page_size:
            return True
        self.load_page *= _WEAR
        self.store_page *= _WEAR if both_ways else 1.0
        return False


class HostTier:
    """`memory` is [slots, page_bytes]. The pages used longest ago give way."""

    def __init__(self, memory: U8, page_size: int) -> None:
        self.memory = memory
        self.page_size = page_size
        self.costs = Costs()
        self.counts = dict.fromkeys(("stored", "not_stored", "loaded", "recomputed"), 0)  # pages
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by what they hold, the least recently used first
        self._free = list(range(len(memory) - 1, -1, -1))
        self._stores: dict[int, int] = {}  # slot -> page, for the next step
        self._read: set[int] = set()  # slots that the next step loads from: not to be overwritten before

    @property
    def used(self) -> int:
        return len(self._slots)

    def offload(self, namespace: Hashable, tokens: I32, first: int, pages: Mapping[int, int]) -> int:
        """Keep what these pages, by block from `first` on, hold of a prefix. Returns how many are, or were, kept."""
        if not self.costs.pays(self.page_size, both_ways=True):
            self.counts["not_stored"] += len(pages)
            return 0
        kept = 0
        for block, key in reversed(list(enumerate(self._keys(namespace, tokens, first), first))):
            if block in pages and (key in self._slots or self._keep(key, pages[block])):
                self._slots.move_to_end(key)
                kept += 1
        return kept

    def _keep(self, key: bytes, page: int) -> bool:
        if not self._free:
            oldest = next(iter(self._slots), None)
            if oldest is None or self._slots[oldest] in self._read:
                return False
            self._free.append(self._slots.pop(oldest))
        slot = self._slots[key] = self._free.pop()
        self._stores[slot] = page
        self.counts["stored"] += 1
        return True

    def find(self, namespace: Hashable, tokens: I32, first: int) -> list[int]:
        """The slots of the blocks from `first` on, as far as they are here and cheaper to load than to compute."""
        if not self._slots:
            return []
        keys = []
        for key in self._keys(namespace, tokens, first):
            if key not in self._slots:
                break
            keys.append(key)
        if keys and not self.costs.pays(self.page_size, both_ways=False):
            self.counts["recomputed"] += len(keys)
            return []
        for key in reversed(keys):  # the beginning of a prefix goes last
            self._slots.move_to_end(key)
        slots = [self._slots[key] for key in keys]
        self._read.update(slots)
        self.counts["loaded"] += len(slots)
        return slots

    def _keys(self, namespace: Hashable, tokens: I32, first: int) -> list[bytes]:
        """Of every whole block from `first` on."""
        digest = blake2b(repr(namespace).encode() + b"\0", digest_size=32)
        data, width = np.asarray(tokens, np.int32).tobytes(), 4 * self.page_size
        digest.update(data[: first * width])
        keys = []
        for start in range(first * width, len(data) - width + 1, width):
            digest.update(data[start : start + width])
            keys.append(digest.digest())
        return keys

    def drain(self, loads: Mapping[int, int]) -> Moves | None:
        """What the next step must do first, with these loads (page -> slot); None for nothing."""
        if not self._stores and not loads:
            return None
        moves = Moves(tuple((p, s) for s, p in self._stores.items()), tuple((s, p) for p, s in loads.items()))
        self._stores.clear()
        self._read.clear()
        return moves

    def move(self, moves: Moves, pages: PageMemory) -> None:
        """Do it. In the model's thread."""
        started = time.perf_counter()
        for page, slot in moves.stores:
            pages.read_page(page, self.memory[slot])
        stored = time.perf_counter()
        for slot, page in moves.loads:
            pages.write_page(page, self.memory[slot])
        ended = time.perf_counter()
        if moves.stores:
            self.costs.store_page = _mean(self.costs.store_page, (stored - started) / len(moves.stores))
        if moves.loads:
            self.costs.load_page = _mean(self.costs.load_page, (ended - stored) / len(moves.loads))

    def clear(self) -> None:
        """Forget everything. Moves that are drained already may still run: they write what nobody will find."""
        self._free += self._slots.values()
        self._slots.clear()
        self._stores.clear()


def file_memory(slots: int, page_bytes: int, folder: Path) -> U8:
    """Memory for a tier in a file without a name, which the system may write out when others need its memory.

    Raises OSError when the disk has no room for all of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        # Without room on the disk the first touch of a page of the mapping would kill the process.
        os.posix_fallocate(file.fileno(), 0, slots * page_bytes)
        return np.memmap(file, np.uint8, "r+", shape=(slots, page_bytes))


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
