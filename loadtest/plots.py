"""Line charts as SVG text: a few series over one axis each way, nothing else.

Both axes are linear or logarithmic (base 2 or 10). Every series has its name at the end of its line, so that no legend
is needed and no colour has to be told from another. Pure functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 36, 46
# Told apart with every kind of colour vision (Okabe and Ito: Color Universal Design, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Axis:
    """`base` 0 is linear from zero; 2 and 10 are logarithmic, for numbers above zero."""

    title: str
    base: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """One line. A dashed one is a bound, not something measured; a scattered one is its points alone."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    scattered: bool = False


def line(name: str, points: Iterable[Mapping[str, Any]], x: str, y: str, scale: float = 1.0) -> Series:
    """Two fields of what was measured, the second times `scale`."""
    return Series(name, [(point[x], point[y] * scale) for point in points])


def _scale(grid: Sequence[float], start: float, end: float, base: int) -> Callable[[float], float]:
    """From numbers to places on one axis, the first line of the grid at `start` and the last at `end`."""
    even: Callable[[float], float] = math.log if base else float
    low, high = even(grid[0]), even(grid[-1])
    return lambda value: start + (even(value) - low) / (high - low) * (end - start)


def ticks(low: float, high: float, base: int) -> list[float]:
    """Where the lines of the grid are, the first at or below `low`, the last at or above `high`."""
    if base:
        first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
        stride = max(1, math.ceil((last - first) / 8))
        return [float(base) ** power for power in range(first, max(last, first + 1) + stride, stride)]
    size = 10.0 ** math.floor(math.log10(high / 4)) if high > 0 else 1.0
    step = next(size * factor for factor in (1, 2, 5, 10) if high / (size * factor) <= 6)
    return [step * index for index in range(max(1, math.ceil(high / step - 1e-9)) + 1)]


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A whole SVG document. Raises ValueError without a point, or for one that a logarithmic axis cannot show."""
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError(f"nothing to draw in {title!r}")
    grids = []
    for axis, values in zip((x, y), zip(*points, strict=True), strict=True):
        if axis.base and min(values) <= 0:
            raise ValueError(f"{axis.title!r} is logarithmic and {min(values)} is not above zero")
        grids.append(ticks(min(values), max(values), axis.base))
    across, up = grids
    scale_x = _scale(across, LEFT, WIDTH - RIGHT, x.base)
    scale_y = _scale(up, HEIGHT - BOTTOM, TOP, y.base)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title, size=14),
        *(_rule(scale_x(value), HEIGHT - BOTTOM, scale_x(value), TOP) for value in across),
        *(_rule(LEFT, scale_y(value), WIDTH - RIGHT, scale_y(value)) for value in up),
        *(_text(scale_x(value), HEIGHT - BOTTOM + 16, short(value), "middle") for value in across),
        *(_text(LEFT - 6, scale_y(value) + 4, short(value), "end") for value in up),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x.title, "middle"),
        f'<g transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y.title, "middle")}</g>',
    ]
    ends = _spread([scale_y(one.points[-1][1]) for one in series if one.points])
    for one, end, colour in zip((one for one in series if one.points), ends, COLOURS * len(series), strict=False):
        places = [(scale_x(a), scale_y(b)) for a, b in one.points]
        parts += _line(places, colour, one)
        parts.append(_text(places[-1][0] + 8, end + 4, one.name, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def short(value: float) -> str:
    """1500 -> 1.5k; three digits or fewer."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            # Powers of two read better in their own thousands: 8192 is 8k.
            binary = {1e9: 1 << 30, 1e6: 1 << 20, 1e3: 1 << 10}[size]
            return f"{value / (binary if value % binary == 0 else size):.3g}{letter}"
    return f"{value:.3g}"


def _spread(places: Sequence[float], least: float = 13.0) -> list[float]:
    """The heights of labels, pushed down where two would touch."""
    moved = list(places)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for above, below in itertools.pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def _line(places: Sequence[tuple[float, float]], colour: str, one: Series) -> list[str]:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dash = ' stroke-dasharray="5 4"' if one.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    if one.scattered:
        parts = []
    if not one.dashed:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#333", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
