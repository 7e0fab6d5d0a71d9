"""A node of the radix tree.

Owner: the radix tree; others keep one only as the place where their lock is. Knows nothing of pools or sequences.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvstore.pool import I32


class Node:
    """A run of tokens [start, end) after its parent's, and the pages that hold it.

    `pages[g]` covers blocks start // page_size .. (end - 1) // page_size. A page in which one node ends and another
    begins is kept by both; each finds in it the tokens of its own path up to its own end.
    """

    __slots__ = (
        "children",
        "end",
        "last_used",
        "locks",
        "namespace",
        "pages",
        "parent",
        "start",
        "tokens",
    )

    def __init__(
        self, namespace: Hashable, parent: Node | None, start: int, tokens: I32, pages: list[I32], last_used: int
    ) -> None:
        self.namespace = namespace
        self.parent = parent  # None for a root, and for a node that has left the tree
        self.start = start
        self.end = start + tokens.size
        self.tokens = tokens
        self.pages = pages
        self.children: dict[int, Node] = {}  # by first token
        self.locks = 0  # sequences and pins whose path ends here; ancestors are safe because they have a child
        self.last_used = last_used  # the tree's clock
