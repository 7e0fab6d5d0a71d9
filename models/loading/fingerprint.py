"""A key of a model's content that is cheap to compute: what derived files in the cache are named by.

Owner: whoever loads. It is made of the size of each file, its whole header, and 64 samples of 4 KiB spread evenly over
the rest: a few milliseconds for any size. Files that differ only between the samples share a key, which no training or
quantisation run produces; it is a cache key and protects against nothing deliberate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from models.loading.mapped import MappedFile

SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint(files: Iterable[tuple[MappedFile, int]], texts: Iterable[bytes] = ()) -> str:
    """32 hexadecimal digits for files given with the length of their header, and for small texts hashed whole."""
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
