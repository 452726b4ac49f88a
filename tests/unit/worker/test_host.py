"""Reading what the machine and the container allow."""

from __future__ import annotations

import os
from pathlib import Path

from serve.worker.host import free_memory_bytes, processor_name, usable_cpus


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_quota_of_the_container_bounds_the_processors(tmp_path: Path) -> None:
    assert usable_cpus(write(tmp_path, cpu__max="100000 100000\n")) == 1
    assert usable_cpus(write(tmp_path, cpu__max="20000 100000\n")) == 1
    assert usable_cpus(write(tmp_path, cpu__max="max 100000\n")) == usable_cpus(tmp_path / "absent")
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_free_memory_is_what_the_system_reports(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000 kB\nMemAvailable:    1000 kB\n", encoding="utf-8")
    assert free_memory_bytes(meminfo, tmp_path / "absent") == 1000 * 1024


def test_limit_of_the_container_bounds_the_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    1000 kB\n", encoding="utf-8")
    group = write(
        tmp_path, memory__max="500000\n", memory__current="400000\n", memory__stat="anon 1\ninactive_file 50000\n"
    )
    assert free_memory_bytes(meminfo, group) == 150_000
    write(tmp_path, memory__current="900000\n")
    assert free_memory_bytes(meminfo, group) == 0
    write(tmp_path, memory__max="max\n")
    assert free_memory_bytes(meminfo, group) == 1000 * 1024


def test_memory_without_proc_is_half_of_the_machine(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_memory_bytes(tmp_path / "absent", tmp_path) == physical // 2


def test_processor_has_a_name() -> None:
    assert processor_name()
