"""A model file mapped into memory: pages are read from disk only when something looks at them. And a key of content.

Owner: the checkpoint that opened it; the map lives as long as any array or tensor made from it. Knows no file format.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.errors import CorruptModelError, ModelNotFoundError

SAMPLES, SAMPLE_BYTES = 64, 4096


class MappedFile:
    """The bytes of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private, copy-on-write map: torch takes only writable memory without complaint.
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path} does not exist.") from None
        except ValueError:
            raise CorruptModelError(f"{path} is empty.") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}.") from None
        self.size = len(self.buffer)

    def read(self, start: int, size: int) -> bytes:
        """A copy of up to `size` bytes."""
        return self.buffer[start : start + size]

    def rows(self, start: int, count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """[count, row_bytes], not copied: read it, do not write to it."""
        array = np.frombuffer(self.buffer, dtype=np.uint8, count=count * row_bytes, offset=start)
        return array.reshape(count, row_bytes)


def fingerprint(files: Iterable[tuple[MappedFile, int]], texts: Iterable[bytes] = ()) -> str:
    """What derived files in the cache are named by: 32 hexadecimal digits for files given with the length of their
    header, and for small texts hashed whole.

    Of each file its size, its whole header, and samples spread evenly over the rest: a few milliseconds for any size.
    Files that differ only between the samples share a key, which no training or quantisation run produces; it protects
    against nothing deliberate.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    for file, header_bytes in files:
        digest.update(file.size.to_bytes(8, "little"))
        digest.update(hashlib.sha256(file.read(0, header_bytes)).digest())
        last = max(header_bytes, file.size - SAMPLE_BYTES)
        for sample in range(SAMPLES):
            start = header_bytes + (last - header_bytes) * sample // (SAMPLES - 1)
            digest.update(file.read(start, SAMPLE_BYTES))
    return digest.hexdigest()[:32]
