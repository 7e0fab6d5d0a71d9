"""Amounts of memory as people write them: `2GiB`, `512MiB`, `70%`, or a plain number of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_UNITS |= {"k": KIB, "m": MIB, "g": GIB, "t": TIB}  # the suffixes of JVM and container flags are binary too
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class MemoryAmount:
    """Either a number of bytes or a share, above 0 and at most 1, of the memory that is free; the other is None."""

    bytes: int | None = None
    share: float | None = None

    def of(self, free_bytes: int) -> int:
        """The amount in bytes when `free_bytes` are free."""
        return self.bytes if self.bytes is not None else int(free_bytes * (self.share or 0.0))

    def __str__(self) -> str:
        return format_size(self.bytes) if self.bytes is not None else f"{(self.share or 0.0) * 100:g}%"


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`. Raises ValueError."""
    match = _SIZE.fullmatch(str(text).strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("must be a size such as 2GiB or 512MiB, or a number of bytes")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_amount(text: str | int) -> MemoryAmount:
    """The amount meant by `text`, which may also be a percentage. Raises ValueError."""
    if match := _SHARE.fullmatch(str(text).strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise ValueError("must be above 0% and at most 100%")
        return MemoryAmount(share=share)
    try:
        size = parse_size(text)
    except ValueError:
        raise ValueError("must be a size such as 2GiB or 512MiB, or a share such as 70%") from None
    if size <= 0:
        raise ValueError("must be more than nothing")
    return MemoryAmount(bytes=size)


def format_size(size_bytes: int) -> str:
    """`size_bytes` with the largest unit that leaves a number of one or more: `2 GiB`, `371.2 KiB`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{round(size_bytes / unit, 1):g} {name}"
    return f"{size_bytes} B"
