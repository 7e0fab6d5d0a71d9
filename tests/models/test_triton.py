"""The kernels of --deterministic, in a process of their own: Triton chooses its interpreter when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("interpreted", ["1", pytest.param("0", marks=GPU)], ids=["interpreter", "GPU"])
def test_the_triton_kernels_compute_a_row_in_the_same_bits_whatever_stands_beside_it(interpreted: str) -> None:
    options = ["-p", "no:cacheprovider", "-W", "ignore:TRITON_DEFAULT_FP_FUSION"]  # of Triton's compiler, on a GPU
    tests = [sys.executable, "-m", "pytest", *options, str(ROOT / "tests/models/triton_kernels.py")]
    environment = os.environ | {"TRITON_INTERPRET": interpreted}
    result = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
