"""The build of the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.cpu.library import build
from models.errors import KernelError


@pytest.mark.parametrize(
    ("script", "says"),
    [("echo no such flag >&2; exit 3", "no such flag"), ("exit 3", "it ended with 3 and said nothing")],
)
def test_a_compiler_that_fails_is_told_of_in_its_words_or_that_it_had_none(
    tmp_path: Path, script: str, says: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    with pytest.raises(KernelError, match=f"^{re.escape(str(compiler))} could not build the CPU kernels: {says}$"):
        build(str(compiler), tmp_path / "kernels.so")
