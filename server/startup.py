"""How long each phase of the start takes: shown while it happens, exported as a metric afterwards.

Phases may overlap: the tokenizer loads beside the weights. So their sum is more than the time to readiness, which is
counted from the start of the process, interpreter included. Any thread may time a phase of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Phases:
    """Seconds by phase, in the order in which the phases ended."""

    def __init__(self, began: float) -> None:
        """`began` is when the command started, on `time.perf_counter`."""
        self.seconds: dict[str, float] = {}
        self._show: Callable[[str], None] | None = None
        self._began = began

    def show(self, show: Callable[[str], None]) -> None:
        """Give `show` a line for each phase so far, and from now on."""
        self._show = show
        for name in self.seconds:
            show(self._line(name))

    def age_seconds(self) -> float:
        """How long the process has existed; where the system does not tell, how long the command has run."""
        age = _process_age_seconds()
        return time.perf_counter() - self._began if age is None else age

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block. A phase that fails is not recorded."""
        began = time.perf_counter()
        yield
        self.note(name, time.perf_counter() - began)

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name] = seconds
        if self._show is not None:
            self._show(self._line(name))

    def _line(self, name: str) -> str:
        return f"{name:<12}{self.seconds[name]:6.2f} s"


def _process_age_seconds() -> float | None:
    """To a hundredth; None where there is no /proc."""
    try:
        # Field 22, counted after the command's name, which may hold spaces and brackets.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
