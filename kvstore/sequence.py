"""One sequence's place in the store.

Owner: the engine loop. Made by `KVStore.open` and `KVStore.fork`, dead after `KVStore.close`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvstore.node import Node

CLOSED = -1


@dataclass(slots=True, eq=False)
class KVSequence:
    """A row of the page tables and what it stands for.

    It has seen `computed` positions, of which group g keeps `computed - dropped[g]`: position p lives in slot
    `p - dropped[g]` of the row.
    """

    slot: int  # row of the page tables; -1 once closed
    namespace: Hashable
    cached: int  # tokens found in the tree when the sequence was opened
    computed: int  # tokens in the KV memory. The scheduler may raise it itself after a decode step
    writable: int = 0  # positions [computed, writable) have private pages: `reserve` answers at once up to here
    dropped: list[int] = field(default_factory=list)  # per group: positions no longer kept, whole pages from the front
    blocks: list[int] = field(default_factory=list)  # per group: blocks of positions with a page, dropped ones included
    anchor: Node | None = None  # the locked node whose path holds this sequence's first tokens; ends on a page boundary
    uncounted: int = 0  # tokens looked up for this sequence and not in the statistics yet
