"""The native sampler, built for several kinds of machine, and one way to call it and the torch one."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import models.cpu
from models.base import StepOutput
from models.cpu.sampling_abi import SampleOutput, SamplingView, empty_output, sampling_view
from models.sampling import SamplingBatch
from models.torch_sampler import sample

Sampler = Callable[[npt.NDArray[np.float32], SamplingBatch], StepOutput]

SOURCE = Path(models.cpu.__file__).parent / "sampler.cpp"
FLAGS = ("-O3", "-std=c++17", "-fno-fast-math", "-ffp-contract=off", "-Wall", "-Wno-maybe-uninitialized", "-Werror")
MACHINES = ("native", "x86-64-v3", "x86-64")


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Builds the native sampler for a machine (a -march), once a session; skips where that cannot be."""
    built: dict[str, ctypes.CDLL] = {}

    def library(machine: str) -> ctypes.CDLL:
        if machine in built:
            return built[machine]
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("there is no C++ compiler")
        if machine != "native" and platform.machine() != "x86_64":
            pytest.skip(f"this machine cannot run code for {machine}")
        cpu_info = Path("/proc/cpuinfo")
        if machine == "x86-64-v3" and not (cpu_info.exists() and {"avx2", "fma"} <= set(cpu_info.read_text().split())):
            pytest.skip("this machine has no AVX2")
        target = tmp_path_factory.mktemp("sampler") / f"{machine}.so"
        command = [compiler, *FLAGS, f"-march={machine}", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        built[machine] = ctypes.CDLL(str(target))
        return built[machine]

    return library


def run_native(library: ctypes.CDLL, logits: npt.NDArray[np.float32], batch: SamplingBatch) -> StepOutput:
    view = sampling_view(batch, logits.shape[1])
    output, pointers = empty_output(len(logits), batch.num_logprobs)
    library.octavo_sample(
        ctypes.c_void_p(np.ascontiguousarray(logits).ctypes.data), ctypes.byref(view), ctypes.byref(pointers)
    )
    return output


@pytest.fixture(params=("torch", *MACHINES))
def sampler(request: pytest.FixtureRequest, native_library: Callable[[str], ctypes.CDLL]) -> Sampler:
    """Each of the samplers in turn: (float32 logits [L, V], batch) -> StepOutput."""
    if request.param == "torch":
        return lambda logits, batch: sample(torch.from_numpy(logits), batch)
    library = native_library(request.param)
    return lambda logits, batch: run_native(library, logits, batch)


@pytest.fixture
def native_sampler(library: ctypes.CDLL) -> Sampler:
    """The native sampler for each kind of machine."""
    return lambda logits, batch: run_native(library, logits, batch)


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest, native_library: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    """The native sampler's C functions, for each kind of machine."""
    found = native_library(request.param)
    sizes = (ctypes.c_int32 * 2)()
    found.octavo_sampler_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(SamplingView), ctypes.sizeof(SampleOutput)]
    return found
