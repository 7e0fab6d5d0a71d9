"""The prefix cache across restarts: one file in `--kv-cache-dir` for each model, format and build.

Taken back at start and written at the end, and in between when an admin asks; then the engine does it between two of
its steps. A file that cannot be used is a line in the log and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import saved
from kvstore.errors import SavedCacheError

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from server.loading import Model

logger = logging.getLogger("octavo")


class SavedCache:
    """`save` and `load` need the store for themselves: `Engine.between_steps`, or an engine that does not run."""

    def __init__(self, folder: Path, engine: Engine, model: Model) -> None:
        self._engine = engine
        self._model = model
        key = hashlib.sha256("\n".join(model.identity.values()).encode()).hexdigest()[:24]
        self.path = folder / f"{model.plan.model.replace('/', '_')}-{key}.kv"

    def save(self) -> int:
        """Pages written. Raises OSError."""
        return saved.save(self.path, self._engine.kv, self._model.runner, *self._format())

    def load(self) -> int:
        """Pages taken back. Raises SavedCacheError."""
        return saved.load(self.path, self._engine.kv, self._model.runner, *self._format())

    def _format(self) -> tuple[int, dict[str, str]]:
        return self._model.runner.page_bytes(self._model.plan.page_size), dict(self._model.identity)

    def load_at_start(self) -> None:
        if not self.path.exists():
            return
        began = time.perf_counter()
        try:
            pages = self.load()
        except SavedCacheError as error:
            logger.warning("the saved cache %s is ignored: %s", self.path, error)
        else:
            logger.info("%d pages of the saved cache in %.1f s", pages, time.perf_counter() - began)

    def save_at_end(self) -> None:
        try:
            logger.info("%d pages of the cache written to %s", self.save(), self.path)
        except OSError as error:
            logger.warning("the cache was not saved: %s", error)
