"""What this machine, or the container on it, lets one process use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
TOPOLOGY: Final = Path("/sys/devices/system/cpu")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """Give the number of processors, bounded by this process's affinity and the container's quota."""
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _read(cgroup / "cpu.max").split() or [
        _read(cgroup / "cpu" / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal():
        cpus = min(cpus, max(1, round(int(quota[0]) / int(quota[1]))))
    return cpus


def count_cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> int:
    """Give how many cores some processors belong to; a processor that the system does not describe is a core."""
    return len({_read(topology / f"cpu{cpu}/topology/thread_siblings_list").strip() or f"{cpu}" for cpu in cpus})


def free_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Give the bytes that can be taken without swapping, bounded by the container's limit.

    Where the system does not tell (no /proc), it is half of the physical memory.
    """
    free = _field(_read(meminfo), "MemAvailable:") * 1024
    if free == 0:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit = _read(cgroup / "memory.max").strip()
    if limit.isdecimal():
        used = int(_read(cgroup / "memory.current").strip() or 0)
        # File pages that nobody uses count as used and go when memory is short.
        reclaimable = _field(_read(cgroup / "memory.stat"), "inactive_file")
        free = min(free, int(limit) - max(0, used - reclaimable))
    return max(0, free)


def processor_name() -> str:
    """Give the processor's name as the system reports it, or "CPU"."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def _read(path: Path) -> str:
    """Give a small text file, or nothing when the system does not have it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(text: str, name: str) -> int:
    """Give the number after a name at the start of a line, 0 when it is absent."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return 0
