"""Where figures are kept: one JSON file a run, with the machine they are of."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path("bench-results")


def new_path(folder: Path, what: str = "") -> Path:
    """A file named after this second; the folder is made."""
    folder.mkdir(exist_ok=True)
    return folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}{what}.json"


def write(path: Path, content: Mapping[str, object]) -> dict[str, Any]:
    """Write `content` with the time, the machine and the Python version; what is read from the file."""
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "system": platform.platform(),
            "cpus": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "python": platform.python_version(),
    }
    text = json.dumps(about | dict(content), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return dict(json.loads(text))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
