"""What `make bench-cache` draws and writes, from figures that were kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest import cache
from loadtest.document import BEGIN, END

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "kvstore.measure", "--quick"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    measured: dict[str, Any] = json.loads(result.stdout)
    swap = {"seconds": 2.0, "tokens_per_second": 10.0, "preemptions": 3.0, "stored": 0.0, "loaded": 4.0}
    return measured | {
        "machine": {"processor": "a processor", "cpus": 2},
        "burst": [{"policy": "fcfs", "computed": 110.0, "fewest": 100, "asked": 1000}],
        "turns_served": [{"turn": turn, "history": 1000, "found": 990} for turn in (2, 3)],
        "preempted": [{"offload": "0", "recomputed": 0.0, **swap}],
        "restart": {"cold": 100.0, "warm": 10.0, "restarted": 11.0},
    }


def test_the_store_wastes_little_and_reuses_most(content: dict[str, Any]) -> None:
    ways = {row["way"]: row for row in content["chats"]}
    assert ways["contiguous"]["wasted"] > 0.6
    assert ways["radix tree"]["wasted"] < 0.04
    found = {row["way"]: row["found_tokens"] for row in content["chats"]}
    assert found["radix tree"] >= found["hashed full blocks"] > found["pages, no sharing"] == found["contiguous"] == 0
    for tree, blocks in zip(content["reuse"][1::2], content["reuse"][::2], strict=True):
        assert tree["found_tokens"] >= blocks["found_tokens"], (tree, blocks)


def test_the_classic_exercise_hits_as_if_the_cache_had_no_bound(content: dict[str, Any]) -> None:
    assert content["classic"]["bounded"] > 0.55
    assert content["classic"]["unbounded"] - content["classic"]["bounded"] < 0.02


def test_no_operation_grows_with_the_tree(content: dict[str, Any]) -> None:
    small, large = content["costs"][0], content["costs"][-1]
    assert large["tokens"] > 20 * small["tokens"]
    for name in cache.OPERATIONS:
        assert large[name] < 4 * small[name] + 5, name  # a busy machine, and still nothing like 20 times


def test_the_document_gets_tables_and_charts(content: dict[str, Any], tmp_path: Path) -> None:
    document, figures = tmp_path / "kv.md", tmp_path / "kept.json"
    document.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    figures.write_text(json.dumps(content))
    assert cache.main(["--show", str(figures), "--document", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert "| fcfs | 1,000 | 110 | 100 | 10.0% |" in text
    assert "1.00% of the history was computed again" in text
    drawings = list((tmp_path / "plots").iterdir())
    assert len(drawings) == 4
    for drawing in drawings:
        assert f"plots/{drawing.name}" in text
        ElementTree.parse(drawing)


def test_figures_that_are_not_there_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["--show", str(tmp_path / "none.json")]) == 1
    assert "bench-cache:" in capsys.readouterr().err
