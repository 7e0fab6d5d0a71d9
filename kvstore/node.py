"""A node of the radix tree.

Owner: the radix tree; others keep one only as the place where their lock is. Knows nothing of pools or sequences.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvstore.pool import I32


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens [start, end) after its parent's, and the pages that hold it.

    `pages[g]` covers blocks start // page_size .. (end - 1) // page_size. A page in which one node ends and another
    begins is kept by both; each finds in it the tokens of its own path up to its own end.
    """

    namespace: Hashable
    parent: Node | None  # None for a root, and for a node that has left the tree
    start: int
    tokens: I32
    pages: list[I32]
    last_used: int  # the tree's clock
    end: int = field(init=False)
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    locks: int = 0  # sequences and pins whose path ends here; ancestors are safe because they have a child

    def __post_init__(self) -> None:
        self.end = self.start + self.tokens.size
