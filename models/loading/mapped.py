"""A model file mapped into memory: pages are read from disk only when something looks at them.

Owner: the checkpoint that opened it; the map lives as long as any array or tensor made from it. Knows no file format.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.errors import CorruptModelError, ModelNotFoundError


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
        """[count, row_bytes], read-only, not copied."""
        array = np.frombuffer(self.buffer, dtype=np.uint8, count=count * row_bytes, offset=start)
        array.flags.writeable = False
        return array.reshape(count, row_bytes)
