"""Where figures are kept: one JSON file a run, with the machine they are of."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import psutil

RESULTS = Path("bench-results")


def machine() -> dict[str, object]:
    """This machine, as far as figures depend on it."""
    return {
        "processor": _processor(),
        "system": platform.platform(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def new_path(folder: Path, what: str = "") -> Path:
    """A file named after this second; the folder is made."""
    folder.mkdir(exist_ok=True)
    return folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}{what}.json"


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write `content` with the time, the machine and the Python version."""
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "python": platform.python_version(),
    }
    path.write_text(json.dumps(about | dict(content), indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
