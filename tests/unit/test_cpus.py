"""Lists of processors, and keeping threads on or off them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from serve.config import DeviceConfig, EngineConfig, ServeConfig, validate
from serve.cpus import check_cpus, parse_cpu_list, usable_set, write_cpu_list
from serve.errors import ConfigError

USABLE = sorted(usable_set())


def device(threads: int | None = None, affinity: str | None = None) -> ServeConfig:
    return ServeConfig(engine=EngineConfig(device=DeviceConfig(cpu_threads=threads, cpu_affinity=affinity)))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8, 1", (8, 1)), ("5-5", (5,)), ("10-11", (10, 11))]
)
def test_list_keeps_its_order(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1", "1--2", "0x1", "1-2-3", "100000"])
def test_text_that_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a processor or a range; write it like 0-3,8"):
        parse_cpu_list(text)


def test_processor_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cpu-affinity 0-3,2 names a processor twice"):
        parse_cpu_list("0-3,2")


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "0,2,4", "1-2,7-9,63"])
def test_written_list_is_read_back(text: str) -> None:
    assert write_cpu_list(parse_cpu_list(text)) == text


def test_processors_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--cpu-affinity: 4-5,9 cannot be used; this process may run on 0-3"):
        check_cpus((0, 4, 5, 9), frozenset(range(4)))
    with pytest.raises(ConfigError, match="9999 cannot be used"):
        validate(device(affinity="9999"))


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_impossible_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"--cpu-threads {threads} is not possible: it must be 1 to 256"):
        validate(device(threads))


def test_more_threads_than_processors_to_tie_them_to_are_refused() -> None:
    one = str(USABLE[0])
    validate(device(1, one))
    with pytest.raises(ConfigError, match=r"--cpu-threads 2 .* at most the 1 processors of --cpu-affinity"):
        validate(device(2, one))


def run_script(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_front_end_keeps_off_processors_unless_there_are_no_others() -> None:
    assert USABLE, "this process runs somewhere"
    shown = run_script(
        "import os; from serve.cpus import keep_off, usable_set, write_cpu_list\n"
        "everything = tuple(sorted(usable_set()))\n"
        "print(write_cpu_list(keep_off(everything)))\n"
        "print(write_cpu_list(keep_off(everything[:1])), write_cpu_list(os.sched_getaffinity(0)))\n"
    )
    others = write_cpu_list(USABLE[1:] or USABLE)
    assert shown == [write_cpu_list(USABLE), others, others]


def test_every_thread_of_a_process_is_kept_on_the_list() -> None:
    last = USABLE[-1]
    shown = run_script(
        "import os, threading; from serve.cpus import keep_process_on, tie_thread, write_cpu_list\n"
        "started, end, tasks = threading.Event(), threading.Event(), []\n"
        "def wait():\n    tasks.append(threading.get_native_id()); started.set(); end.wait()\n"
        "thread = threading.Thread(target=wait); thread.start(); started.wait()\n"
        f"keep_process_on(({last},))\n"
        "print(write_cpu_list(os.sched_getaffinity(tasks[0])), write_cpu_list(os.sched_getaffinity(0)))\n"
        f"tie_thread({last}); end.set(); print(write_cpu_list(os.sched_getaffinity(0)))\n"
    )
    assert shown == [str(last)] * 3
    assert frozenset(USABLE) == frozenset(os.sched_getaffinity(0))
