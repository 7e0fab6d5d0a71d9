"""Where weights and pages lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.cpu.memory import ALIGNMENT, Arena

CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE = 2 << 20


def test_pieces_are_aligned_and_zeroed_and_there_are_no_more_than_was_asked_for() -> None:
    arena = Arena(8192)
    first, second = arena.take(10), arena.take(8100)
    assert not first.any()
    assert not second.any()
    assert second.ctypes.data - first.ctypes.data == ALIGNMENT
    with pytest.raises(ValueError, match="has no room for 100 more"):
        arena.take(100)


@pytest.mark.skipif(not CHOICE.exists() or "[never]" in CHOICE.read_text(), reason="the kernel gives no huge pages")
def test_memory_is_asked_for_in_huge_pages() -> None:
    arena = Arena(8 * HUGE)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (span := line.split()[0]):
            low, high = (int(end, 16) for end in span.split("-"))
            inside = low <= arena.memory.ctypes.data < high
        elif inside and span == "THPeligible:":
            assert line.split()[1] == "1"
        elif inside and span == "VmFlags:":
            assert "hg" in line.split()
            return
    pytest.fail("the mapping is not among those of this process")
