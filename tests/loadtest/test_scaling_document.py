"""The document of how the engine scales: tables, charts, and what is left as it was."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from loadtest.document import BEGIN, END
from loadtest.scaling import main, memory_rows, parts, scheduler_rows, step_rows

CEILINGS = {"bytes_read": 20e9, "int8_operations": 1e12, "bfloat16_operations": 5e11}


def step(batch: int, context: int, seconds: float, rows: int | None = None) -> dict[str, Any]:
    sizes = {"batch": batch, "context": context, "rows": batch if rows is None else rows}
    return sizes | {"seconds": seconds, "bytes_read": 10**8, "operations": 10**9}


CONTENT: dict[str, Any] = {
    "time": "2026-01-02T03:04:05+00:00",
    "machine": {"processor": "some processor"},
    "model": "some model",
    "weights": "stored",
    "threads": 2,
    "ceilings": CEILINGS,
    "decode": [step(b, 128, 0.01 * b) for b in (1, 2, 4, 8)] + [step(1, c, 0.02) for c in (256, 512, 1024)],
    "prefill": [step(1, n, 0.001 * n, rows=n) for n in (16, 512)],
    "memory": [{"pages": n, "pool_bytes": n << 20, "resident_bytes": (n + 500) << 20} for n in (100, 200)],
    "scheduler": [{"running": n, "steps": 9, "plan": 8 / n, "apply": 4 / n, "other": 1.0} for n in (1, 4)],
}


def test_a_step_stands_beside_the_machines_best() -> None:
    assert step_rows([step(4, 8192, 0.02)], CEILINGS)[1] == ("4", "8,192", "20.00", "200", "5.0", "25%", "50", "5%")


def test_memory_and_scheduler_have_their_rows() -> None:
    assert memory_rows(CONTENT["memory"])[1] == ("100", "100", "600", "500")
    assert scheduler_rows(CONTENT["scheduler"])[2] == ("4", "2.0", "1.0", "1.0", "4.0")


def test_every_chart_is_xml_and_a_line_needs_several_points() -> None:
    drawn = dict(part for part in parts(CONTENT) if isinstance(part, tuple))
    assert set(drawn) == {"decode-batch", "decode-context", "prefill", "memory", "scheduler"}
    roots = {name: ElementTree.fromstring(text) for name, text in drawn.items()}
    words = {element.text for element in roots["decode-batch"].iter("{http://www.w3.org/2000/svg}text")}
    assert "128 tokens" in words
    assert "256 tokens" not in words


def test_only_what_is_between_the_marks_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, kept = tmp_path / "performance.md", tmp_path / "kept.json"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    kept.write_text(json.dumps(CONTENT))
    for _ in range(2):
        assert main(["--show", str(kept), "--document", str(document)]) == 0
    text = document.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("## Decode") == 1
    assert "some model, weights stored, 2 threads, some processor, 2026-01-02." in text
    drawings = list((tmp_path / "plots").iterdir())
    assert len(drawings) == 5
    assert all(f"(plots/{drawing.name})" in text for drawing in drawings)


def test_a_document_without_marks_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, kept = tmp_path / "performance.md", tmp_path / "kept.json"
    document.write_text("nothing")
    kept.write_text(json.dumps(CONTENT))
    assert main(["--show", str(kept), "--document", str(document)]) == 1
    assert "has no single pair of" in capsys.readouterr().err
    assert document.read_text() == "nothing"


def test_a_measurement_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main([]) == 1
    assert capsys.readouterr().err == "plots: scheduler.scaling ended with exit code 1\n"


def test_the_documents_marks_are_there() -> None:
    text = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
