"""The real daemon in float32, for other people's clients. `make conformance` runs these tests, in an environment of
their own; elsewhere they are skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    """Where it answers."""
    command = [PYTHON, "-m", "server.cli", "serve", "--port", "0", "--dtype", "float32", "--quantization", "none"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = next((line for line in process.stdout if line.startswith("ready in")), "")
    assert last, "it did not start"
    yield last.split()[-1]
    process.terminate()
    assert process.wait(timeout=60) == 0
    process.stdout.close()
