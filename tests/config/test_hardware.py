"""Machines described as files: what a process in them may use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from config.hardware import Hardware

GIB = 1 << 30
CPUINFO = "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 sse4_2 avx512_vnni amx_bf16\n"
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: {GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"
SIBLINGS = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu}\n" for cpu in range(8)}


def machine(root: Path, files: Mapping[str, str]) -> Hardware:
    for path, content in ({"proc/cpuinfo": CPUINFO, "proc/meminfo": MEMINFO} | SIBLINGS | dict(files)).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return Hardware.detect("cpu", root)


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_a_plain_machine_is_used_whole(tmp_path: Path) -> None:
    hardware = machine(tmp_path, {})
    assert hardware.cpu == "Some CPU"
    assert hardware.isa == {"avx2", "avx512_vnni", "amx_bf16"}
    assert (hardware.cores, hardware.memory_bytes, hardware.free_bytes) == (8, 16 * GIB, 12 * GIB)


def test_two_hardware_threads_are_one_core(tmp_path: Path) -> None:
    paired = {path: f"{index // 2 * 2}-{index // 2 * 2 + 1}\n" for index, path in enumerate(SIBLINGS)}
    assert machine(tmp_path, paired).cores == 4


def test_only_the_cpus_of_the_affinity_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert machine(tmp_path, {}).cores == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/x": "", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        # Inside a container: the host's path does not exist, the group's own files are at the top.
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_a_cpu_quota_of_any_group_above_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert machine(tmp_path, files).cores == cores


def test_a_memory_limit_counts_what_the_group_uses_but_not_its_file_cache(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
    )
    assert (hardware.memory_bytes, hardware.free_bytes) == (4 * GIB, 2 * GIB)


def test_the_huge_number_that_means_no_memory_limit_is_none(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert (hardware.memory_bytes, hardware.free_bytes) == (16 * GIB, 12 * GIB)


def test_this_machine_is_seen_without_importing_torch() -> None:
    code = """if True:
        import sys
        from config.hardware import Hardware
        hardware = Hardware.detect("cpu")
        assert hardware.cores >= 1 and 0 < hardware.free_bytes <= hardware.memory_bytes, hardware
        assert not {"torch", "numpy", "transformers"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
