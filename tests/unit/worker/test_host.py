"""Reading what the machine and the container allow."""

from __future__ import annotations

import os
from pathlib import Path

from serve.worker.host import count_cores, free_memory_bytes, processor_name, usable_cpus


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_quota_of_the_container_bounds_the_processors(tmp_path: Path) -> None:
    assert usable_cpus(write(tmp_path, cpu__max="100000 100000\n")) == 1
    assert usable_cpus(write(tmp_path, cpu__max="20000 100000\n")) == 1
    assert usable_cpus(write(tmp_path, cpu__max="max 100000\n")) == usable_cpus(tmp_path / "absent")
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_quota_of_an_older_container_counts_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    write(tmp_path / "cpu", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    assert usable_cpus(tmp_path) == 1
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1\n")
    assert usable_cpus(tmp_path) == usable_cpus(tmp_path / "absent")


def test_processors_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n", encoding="utf-8")
    assert count_cores(range(4), tmp_path) == 2
    assert count_cores([0, 1], tmp_path) == 2
    assert count_cores([0, 2], tmp_path) == 1
    assert count_cores([7, 8, 9], tmp_path) == 3


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
