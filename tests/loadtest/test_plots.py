"""The charts: well-formed, inside their frame, and right side up."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.plots import HEIGHT, WIDTH, Axis, Series, chart, short, ticks

SVG = "{http://www.w3.org/2000/svg}"
X, Y = Axis("batch & more", 2), Axis("milliseconds < 1", 10)


def drawn(series: list[Series], x: Axis = X, y: Axis = Y) -> ElementTree.Element:
    return ElementTree.fromstring(chart("a <title>", x, y, series))


def test_a_chart_is_xml_with_its_words_and_every_point() -> None:
    root = drawn([Series("one & two", [(1, 3), (2, 30), (64, 250)]), Series("three", [(4, 9), (8, 9)])])
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"a <title>", "batch & more", "milliseconds < 1", "one & two", "three"} <= words
    assert len(list(root.iter(f"{SVG}circle"))) == 5
    assert len(list(root.iter(f"{SVG}polyline"))) == 2


@pytest.mark.parametrize("y", [Y, Axis("linear")])
def test_points_lie_in_the_frame_larger_ones_higher_and_further_right(y: Axis) -> None:
    root = drawn([Series("a", [(1, 3), (3, 30), (70, 250)])], y=y)
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert places == sorted(places)
    assert [at for _, at in places] == sorted((at for _, at in places), reverse=True)
    assert all(0 < across < WIDTH and 0 < down < HEIGHT for across, down in places)


def test_a_logarithmic_axis_gives_equal_ratios_equal_room() -> None:
    root = drawn([Series("a", [(1, 1), (4, 10), (16, 100)])])
    (a, b, c) = [(float(p.attrib["cx"]), float(p.attrib["cy"])) for p in root.iter(f"{SVG}circle")]
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2)
    assert b[1] - a[1] == pytest.approx(c[1] - b[1], abs=0.2)


def test_a_bound_is_dashed_and_has_no_points() -> None:
    root = drawn([Series("a", [(1, 1), (2, 2)]), Series("bound", [(1, 5), (2, 5)], dashed=True)])
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    assert sum("stroke-dasharray" in line.attrib for line in root.iter(f"{SVG}polyline")) == 1


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    root = drawn([Series(name, [(1, 1), (8, 10)]) for name in ("p", "q", "r")])
    heights = sorted(float(t.attrib["y"]) for t in root.iter(f"{SVG}text") if t.text in ("p", "q", "r"))
    assert all(below - above >= 12 for above, below in itertools.pairwise(heights))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        chart("empty", X, Y, [Series("a", [])])
    with pytest.raises(ValueError, match="not above zero"):
        chart("zero", X, Y, [Series("a", [(0, 1)])])


@pytest.mark.parametrize(
    ("low", "high", "base"),
    [(3, 97, 0), (0, 0.004, 0), (5, 5, 0), (0, 0, 0), (1, 64, 2), (3, 5, 2), (8, 8, 2), (0.2, 9, 10), (1, 1e30, 10)],
)
def test_the_grid_covers_the_numbers_with_few_lines(low: float, high: float, base: int) -> None:
    lines = ticks(low, high, base)
    assert lines[0] <= low + 1e-12
    assert lines[-1] >= high - 1e-12
    assert lines[0] < lines[-1]
    assert 2 <= len(lines) <= 11


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (64, "64"), (1024, "1k"), (8192, "8k"), (1500, "1.5k"), (2e6, "2M"), (1 << 30, "1G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
