"""Tables of text, the first row the heading: for a terminal, a Markdown document and a page. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

Row = tuple[str, ...]


def table(heading: str, row: str, points: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A heading and a row for each point, cells with bars between them: `row` is a template for `str.format`."""
    return [tuple(line.split(" | ")) for line in (heading, *(row.format(**point) for point in points))]


def terminal(rows: Sequence[Row], title: str | None = None) -> Table:
    """Numbers to the right. Under a title cells may be of several lines, elsewhere they are cut at the screen's end."""
    head, *body = rows
    table = Table(
        title=title, title_justify="left", box=None, header_style="bold", pad_edge=False, collapse_padding=True
    )
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=title is None)
    for row in body:
        table.add_row(*row)
    return table


def markdown(rows: Sequence[Row]) -> str:
    """Numbers to the right."""
    head, *body = rows
    rule = ("---", *("---:" for _ in head[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def html(rows: Sequence[Row]) -> str:
    cells = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) for row, cell in zip(rows, cells, strict=True)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def short(value: float | None) -> str:
    """Three digits or so."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
