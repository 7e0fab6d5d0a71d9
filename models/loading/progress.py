"""A progress bar for work that takes over a second, on a terminal's stderr and nowhere else.

Owner: the thread that does the work.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_SECONDS = 1.0


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yields `advance(amount)`. A bar appears once a second has passed and goes when the work is done.

    `total` None means that the length of the work is not known.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return

    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)
    timer = threading.Timer(DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda amount: bar.advance(task, amount)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
