"""Documents of what was measured: a command measures, or takes figures that were kept, and writes tables and charts.

The text of a document outside its two marks is left as it is. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.plots import Axis, Series, chart
from loadtest.results import RESULTS, new_path, write
from loadtest.tables import Row, markdown

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
