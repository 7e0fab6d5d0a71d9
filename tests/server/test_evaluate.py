"""`octavo eval`: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from models.evaluation import Score
from server.cli import main
from server.evaluate import report, table

SCORE = Score("int8", 4000, 2.8e-3, 1.1e-2, 3.4e-2, 0.9625, 26.058, 25.939, 4.3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--weights", "int3"], "--weights must be of float32, bfloat16, stored, int8, int4, not int3"),
        (["--context", "1"], "--context must be 2 to 8192, not 1"),
        (["--tokens", "1"], "--tokens must be 2 or more, not 1"),
        (["--tokens", "-5"], "--tokens must be 2 or more, not -5"),
        (["--threads", "0"], "--threads must be 1 or more, not 0"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read"),
        (["--txt", "a"], "unexpected argument '--txt'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
    assert printed.err.count("\n") == 1


def test_the_table_has_the_reference_and_every_score() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table("model", "native", [SCORE]))
    lines = captured.get().splitlines()
    assert "model against float32 (native), 4000 tokens" in lines[0]
    assert lines[2].split() == ["float32", "(reference)", "-", "-", "-", "-", "25.939", "-"]
    assert lines[3].split() == ["int8", "2.8e-03", "1.1e-02", "3.4e-02", "96.25%", "26.058", "+0.459%"]


def test_the_report_is_json_with_what_was_missed() -> None:
    content = json.loads(json.dumps(report("model", "native", [SCORE])))
    assert content["scores"][0]["perplexity_change"] == pytest.approx(26.058 / 25.939 - 1)
    assert content["scores"][0]["misses"] == []


@pytest.mark.e2e
def test_the_default_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris, and the capital of Italy is Rome. " * 4)
    arguments = ["eval", "--text", str(text), "--tokens", "48", "--context", "24", "--weights", "bfloat16", "--json"]
    assert main(arguments) in (0, 1)  # forty-eight tokens are too few to hold to the limits
    [score] = json.loads(capsys.readouterr().out)["scores"]
    assert score["tokens"] == 48
    assert 0 < score["kl_mean"] < 0.01
    assert score["perplexity"] == pytest.approx(score["reference_perplexity"], rel=0.05)
