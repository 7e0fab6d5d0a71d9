"""Memory for weights and pages: 64-byte aligned, in huge pages where the kernel gives them, touched only when used."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64


class Arena:
    """One anonymous mapping handed out piece by piece. Freed when the last piece is."""

    def __init__(self, size: int) -> None:
        size = max(size, mmap.PAGESIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # NOTE: a shared mapping, which is what mmap makes unless told otherwise, seldom gets huge pages.
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        else:
            mapping = mmap.mmap(-1, size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.used = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """The next `size` bytes, zeroed. Raises ValueError past the end."""
        piece = self.memory[self.used : self.used + size]
        if len(piece) < size:
            raise ValueError(f"arena of {len(self.memory)} bytes has no room for {size} more after {self.used}")
        self.used += aligned(size)
        return piece


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
