"""The ceilings of this machine: measured once, when it is not busy, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from models import roofline
from models.base import Runner
from models.build import build_runner
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source


@pytest.fixture(scope="module", params=["cpu", "torch"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return build_runner(
        open_checkpoint(resolve_source(None)),
        device="cpu",
        dtype="bfloat16",
        quantization="stored" if request.param == "cpu" else "none",
        kv_dtype="bfloat16",
        attention_backend=request.param,
        threads=1,
        max_model_len=64,
    )


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the ceilings; the kernels stay where they are."""
    monkeypatch.setattr(roofline, "cache_path", lambda _, key, suffix: tmp_path / f"{key}{suffix}")
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path


def test_a_model_has_a_cost_and_a_machine_its_ceilings(runner: Runner, folder: Path) -> None:
    found = roofline.roofline(runner, 1)
    assert found is not None
    assert 60e6 < found.cost.weight_bytes < 300e6
    assert found.cost.layer_weights + found.cost.head_weights == pytest.approx(134.5e6, rel=0.01)
    assert found.cost.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert found.best is not None
    bytes_read, operations = found.best
    assert bytes_read > 1e8
    assert operations > 1e9
    assert roofline.roofline(runner, 1) == found


def test_a_busy_machine_is_not_measured(folder: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    for measure in ("_native", "_torch"):
        monkeypatch.setattr(roofline, measure, lambda *_: (1.0, 2.0))
    for load, ceilings in ((1e6, None), (0.0, (1.0, 2.0)), (1e6, (1.0, 2.0))):  # once kept, it may be busy
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found = roofline.roofline(runner, 1)
        assert found is not None
        assert found.best == ceilings
        assert found.cost.weight_bytes > 0


def test_a_runner_of_another_kind_has_none() -> None:
    other: Any = object()
    assert roofline.roofline(other, 1) is None
