"""What was measured: figures, kept in one JSON file a run with the machine they are of, and documents of them.

A command measures, or takes figures that were kept, and writes tables and charts between the two marks of a document.
The rest of its text is left as it is. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from loadtest.plots import Axis, Series, chart
from loadtest.tables import Row, markdown

RESULTS = Path("bench-results")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Content = dict[str, Any]
Part = str | list[Row] | tuple[str, str]  # a paragraph, a table, or a chart: its name and an SVG document


def command(name: str, description: str, document: str) -> argparse.ArgumentParser:
    """The flags of `make NAME` that every such command has; `--show FILE` writes from figures that were kept."""
    parser = argparse.ArgumentParser(prog=f"make {name}", description=description)
    parser.add_argument("--show", type=Path, metavar="FILE", help="figures that were kept")
    parser.add_argument("--document", type=Path, default=Path(document), metavar="FILE", help="what to write into")
    return parser


def publish(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kept_as: str,
    measure: Callable[[argparse.Namespace], Content],
    parts: Callable[[Content], Sequence[Part]],
) -> int:
    """Measure, keep the figures, and write. 1 when it failed."""
    options = parser.parse_args(arguments)
    try:
        if options.show:
            content: Content = json.loads(options.show.read_text(encoding="utf-8"))
        else:
            content = write(new_path(RESULTS, f"-{kept_as}"), measure(options))
        fill(options.document, parts(content))
    except (RuntimeError, ValueError, OSError) as error:
        print(f"{parser.prog.removeprefix('make ')}: {error}", file=sys.stderr)
        return 1
    print(f"written to {options.document}")
    return 0


def fill(document: Path, parts: Sequence[Part]) -> None:
    """Write charts beside the document, and all parts between its marks. Raises ValueError without the marks."""
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{document} has no single pair of {BEGIN} and {END}")
    folder = document.parent / "plots"
    folder.mkdir(exist_ok=True)
    before, _, rest = text.partition(BEGIN)
    measured = [before + BEGIN]
    for part in parts:
        if isinstance(part, tuple):
            name, drawing = part
            (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")
            measured.append(f"![{name}](plots/{name}.svg)")
        else:
            measured.append(part if isinstance(part, str) else markdown(part))
    document.write_text("\n\n".join([*measured, END]) + rest.partition(END)[2], encoding="utf-8")


def drawn(name: str, title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Part:
    """A chart as a part."""
    return name, chart(title, x, y, series)


def json_of(*module_and_flags: str) -> Content:
    """What a module prints. Raises RuntimeError."""
    result = subprocess.run([sys.executable, "-m", *module_and_flags], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{module_and_flags[0]} ended with exit code {result.returncode}")
    return dict(json.loads(result.stdout))


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
