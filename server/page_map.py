"""The pages of the KV pool as a map, for people: whose each page is.

Pure. Called on the event loop, where the store is consistent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.sequence import KVSequence
from kvstore.store import KVStore

FREE, CACHED, SHARED, PINNED, FIRST_OWNER = range(5)


def page_map(kv: KVStore, owners: Sequence[KVSequence], cells: int) -> dict[str, Any]:
    """`pages_per_cell`, and at most `cells` numbers: FREE, CACHED (only the tree keeps it), SHARED (held by several, or
    by none of `owners`), PINNED, or FIRST_OWNER + i for a page that only owners[i] holds.

    A cell that stands for several pages has the highest of their numbers. Layer groups follow each other.
    """
    maps = []
    for group, pool in enumerate(kv.pools):
        pages = np.where(pool.holds > 0, SHARED, np.where(pool.cached > 0, CACHED, FREE))
        for number, sequence in enumerate(owners, FIRST_OWNER):
            own = kv.row(sequence, group)
            pages[own[pool.holds[own] == 1]] = number
        for pin in kv.pins:
            pages[pin.pages[group]] = PINNED
        maps.append(pages)
    together = np.concatenate(maps)
    per_cell = -(-together.size // cells)
    together = np.append(together, np.full(-together.size % per_cell, FREE))
    return {"pages_per_cell": per_cell, "cells": together.reshape(-1, per_cell).max(axis=1).tolist()}
