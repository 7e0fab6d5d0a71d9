"""A progress bar for work that takes over a second, on a terminal's stderr and nowhere else.

Owner: the thread that does the work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_SECONDS = 1.0


@contextmanager
def progress(
    description: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yields `advance(amount)`. Nothing is shown until a second has passed, and nothing stays when the work is done."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return

    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)
    started = clock()

    def advance(amount: int) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and clock() - started > DELAY_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
