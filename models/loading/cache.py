"""The user's cache folder: derived files that are slow to make, kept between starts.

    $OCTAVO_CACHE_DIR, or octavo/ in the platform's cache folder
        1/                      the format of this folder; another format is another folder
            kernels/            one folder per kind of file
                .lock           held while a file of this kind is built
                3f2a.so         a derived file, named by the key of what it was made from
                3f2a.so.sha256  its checksum, written last

Owner: any thread of any process, several at once. A file is built under a temporary name and moved into place, so a
crash half way leaves nothing behind; one whose checksum does not match is built again. Knows nothing of what it keeps.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from filelock import FileLock

from models.errors import CacheError

FORMAT = "1"
MAX_BYTES = 2 << 30  # of all files together; the ones unused for longest are deleted beyond it
STALE_SECONDS = 24 * 3600.0  # a temporary file older than this belongs to nobody
CHECKSUM = ".sha256"


def cache_root() -> Path:
    """The cache folder, made if need be.

    When it cannot be written (a read-only home), a private folder that lasts as long as this process.
    """
    root = _preferred_root() / FORMAT
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(root, os.W_OK | os.X_OK):
            return root
    except OSError:
        pass
    return Path(_process_folder().name)


def cache_path(kind: str, key: str, suffix: str) -> Path:
    """Where the file of a kind ("kernels", "tokenizers") made from content with that key is kept, there or not.

    `kind` and `key` are letters, digits, dots, dashes and underscores. Raises CacheError.
    """
    for part in (kind, key + suffix):
        if part.startswith(".") or not part.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise CacheError(f"{part!r} cannot be the name of a cached file.")
    return cache_root() / kind / f"{key}{suffix}"


def build_once(path: Path, builder: Callable[[Path], None]) -> Path:
    """The file at `path`, made by `builder` unless it is there and whole.

    `builder` writes to the path it is given, in the same folder; what it raises is passed on, except that an OSError
    becomes a CacheError, and leaves nothing behind. Several processes may ask at once: one builds, the others wait.
    """
    if _whole(path):
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock"):
            if not _whole(path):
                _build(path, builder)
                _delete_oldest(path.parents[1], keep=path)
    except OSError as error:
        reason = error.strerror or error
        raise CacheError(
            f"The cache file {path} cannot be made ({reason}): free some space, or set OCTAVO_CACHE_DIR."
        ) from error
    return path


def _build(path: Path, builder: Callable[[Path], None]) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        builder(temporary)
        digest = _digest(temporary)
        # NOTE: the old checksum goes first, so that it can never vouch for a file it was not made from.
        _checksum_path(path).unlink(missing_ok=True)
        temporary.replace(path)
        temporary.write_text(digest)
        temporary.replace(_checksum_path(path))
    finally:
        temporary.unlink(missing_ok=True)


def _whole(path: Path) -> bool:
    """Whether the file is there with its checksum. If so it counts as used just now."""
    try:
        if _checksum_path(path).read_text() != _digest(path):
            return False
        os.utime(path)
    except OSError:
        return False
    return True


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + CHECKSUM)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delete_oldest(root: Path, keep: Path) -> None:
    """Delete what crashed builds left, then the files unused for longest until all fit in MAX_BYTES."""
    files = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):  # another process may delete it first
            status = path.stat()
            if path.name.startswith(".") and path.name != ".lock" and time.time() - status.st_mtime > STALE_SECONDS:
                path.unlink()
            elif not path.name.startswith(".") and path.suffix != CHECKSUM:
                files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_BYTES:
            break
        if path != keep:
            with contextlib.suppress(OSError):
                _checksum_path(path).unlink(missing_ok=True)
                path.unlink()
                total -= size


def _preferred_root() -> Path:
    if folder := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(folder).expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "octavo"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "octavo" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "octavo"
    return Path.home() / ".cache" / "octavo"


@cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="octavo-cache-", ignore_cleanup_errors=True)
