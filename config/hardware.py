"""What this machine lets the process use: cores, memory, CPU instructions, GPUs.

Containers are taken at their word: CPU affinity, CPU quota and memory limit of every control group above the process
count. Everything is read from files below `root`, so that a test can describe a machine. Torch is imported only to ask
about GPUs, and only when a driver is there or a GPU was demanded. Read once at start; knows nothing of models.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Instruction sets that decide which kernels can run; everything else in /proc/cpuinfo is noise here.
_ISA = re.compile(r"avx2|fma|f16c|avx512(f|_vnni|_bf16)|avx_vnni|amx_(tile|int8|bf16)|asimd(dp)?|i8mm|bf16")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU. `capability` is (major, minor)."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Hardware:
    """`cores` are physical ones; `free_bytes` is what can be taken without swapping or meeting a container's limit."""

    cpu: str
    cores: int
    memory_bytes: int
    free_bytes: int
    isa: frozenset[str]
    cuda: tuple[CudaDevice, ...] = ()
    triton: bool = False  # whether it can be imported

    @classmethod
    def detect(cls, device: str = "auto", root: Path = Path("/")) -> Hardware:
        """Look at this machine; at its GPUs never for `device` "cpu", always for "cuda", else if a driver is there."""
        processor, isa = _processor(root)
        memory, free = _memory(root)
        asks = device == "cuda" or (device == "auto" and _has_gpu_driver(root))
        cuda = _cuda_devices() if asks else ()
        return cls(processor, _cores(root), memory, free, isa, cuda, find_spec("triton") is not None)


def _processor(root: Path) -> tuple[str, frozenset[str]]:
    name, isa = "unknown processor", frozenset[str]()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            isa = frozenset(filter(_ISA.fullmatch, value.split()))
            break
    return name, isa


def _cores(root: Path) -> int:
    """Physical cores among the CPUs this process may run on, at most the CPU quota rounded up."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = root / "sys/devices/system/cpu"
    # Two hardware threads of a core name the same siblings; a machine that tells nothing gives one core to each CPU.
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus}
    quotas = [math.ceil(quota) for folder in _control_groups(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([len(cores), *quotas]))


def _cpu_quota(group: Path) -> float | None:
    """CPUs' worth of time that a control group may take, None for no limit."""
    quota, _, period = (_read(group / "cpu.max").strip() or "max").partition(" ")  # version 2
    if quota == "max":
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")  # version 1
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _memory(root: Path) -> tuple[int, int]:
    """Bytes of memory in all, and free, within the tightest control group."""
    lines = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    fields = {key: value for key, _, value in lines}
    if "MemTotal" not in fields:
        import psutil  # where there is no /proc

        return psutil.virtual_memory().total, psutil.virtual_memory().available
    total = int(fields["MemTotal"].split()[0]) * 1024
    free = int(fields.get("MemAvailable", fields["MemFree"]).split()[0]) * 1024
    for group in _control_groups(root, "memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        if limit is None or limit >= total:  # version 1 writes "no limit" as a huge number
            continue
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        total, free = min(total, limit), min(free, limit - used + _file_cache(group))
    return total, max(0, free)


def _file_cache(group: Path) -> int:
    """Bytes counted as used that the kernel gives back when asked: cached files not used lately."""
    lines = (line.partition(" ") for line in _read(group / "memory.stat").splitlines())
    stat = {key: value for key, _, value in lines}
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _control_groups(root: Path, controller: str) -> list[Path]:
    """The folders of the process's control groups for `controller`, from its own up to the root one."""
    groups: list[Path] = []
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]
        else:
            continue
        # A container sees its own group as the root although the path names the host's: then only the bases exist.
        own = Path(path.lstrip("/"))
        groups += [base / folder for base in bases for folder in (own, *own.parents) if (base / folder).is_dir()]
    return groups


def _has_gpu_driver(root: Path) -> bool:
    # The last one is the GPU of the Linux subsystem of Windows.
    return any((root / path).exists() for path in ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg"))


def _cuda_devices() -> tuple[CudaDevice, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        devices.append(CudaDevice(torch.cuda.get_device_name(index), total, free, capability))
    return tuple(devices)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
