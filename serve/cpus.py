"""Lists of processors, as --cpu-affinity gives them, and which threads of a process may run on them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from serve.errors import ConfigError

_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_TASKS: Final = Path("/proc/self/task")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Give the numbers of a list such as 0-3,8 in its order. Raises ConfigError for anything else."""
    cpus: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first:
            raise ConfigError(f"--cpu-affinity {text!r}: {part!r} is not a processor or a range; write it like 0-3,8")
        cpus.extend(range(first, last + 1))
    if len(set(cpus)) < len(cpus):
        raise ConfigError(f"--cpu-affinity {text} names a processor twice; each takes one thread")
    return tuple(cpus)


def usable_set() -> frozenset[int]:
    """Give the processors this thread may run on; those of the machine where the system does not tell."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def check_cpus(cpus: tuple[int, ...], usable: frozenset[int]) -> None:
    """Raise ConfigError for processors that are not there."""
    if sys.platform != "linux":
        raise ConfigError("--cpu-affinity works on Linux only; drop it")
    missing = sorted(set(cpus) - usable)
    if missing:
        raise ConfigError(
            f"--cpu-affinity: {write_cpu_list(missing)} cannot be used; this process may run on "
            f"{write_cpu_list(usable)}"
        )


def write_cpu_list(cpus: Iterable[int]) -> str:
    """Give processors in the form that parse_cpu_list reads, ascending."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def keep_off(cpus: tuple[int, ...]) -> frozenset[int]:
    """Keep this thread, and those it starts, off some processors where there are others; give what it may use."""
    others = usable_set() - set(cpus)
    if others and sys.platform == "linux":
        os.sched_setaffinity(0, others)
    return others or usable_set()


def keep_process_on(cpus: tuple[int, ...]) -> None:
    """Let all threads of this process run on these processors only."""
    if sys.platform != "linux":
        return
    for task in _TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)


def tie_thread(cpu: int) -> None:
    """Let the calling thread run on one processor only."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {cpu})
