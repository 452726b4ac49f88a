"""The threads that share a loop: every item once, whoever calls, and no helper is waited for that does not come."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from serve.kernels.cpu import binding

pytestmark = pytest.mark.skipif(binding.load_library().library is None, reason="there is no library to test")

RANGE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
# Longer than any wait of a test that passes.
LIMIT = 60.0


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield None
    binding.set_num_threads(1)


def run_loop(total: int, body: Callable[[int, int], None], *, min_range: int = 1, grain: int = 1) -> None:
    function = RANGE_FUNCTION(lambda _context, begin, end: body(begin, end))
    binding.library().serve_run_ranges(total, min_range, grain, ctypes.cast(function, ctypes.c_void_p), None)


def ranges_of(total: int, *, min_range: int = 1, grain: int = 1) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    run_loop(total, lambda begin, end: ranges.append((begin, end)), min_range=min_range, grain=grain)
    return sorted(ranges)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [1, 2, 15, 16, 17, 1000, 2**40])
@pytest.mark.parametrize("grain", [1, 4])
def test_ranges_cover_every_item_once(num_threads: int, total: int, grain: int) -> None:
    assert binding.set_num_threads(num_threads) == num_threads
    ranges = ranges_of(total, grain=grain)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]
    assert all(begin < end and begin % grain == 0 for begin, end in ranges)


def test_ranges_are_not_shorter_than_asked() -> None:
    binding.set_num_threads(4)
    assert all(end - begin >= 25 for begin, end in ranges_of(100, min_range=25))
    assert len(ranges_of(100, min_range=25)) == 4


def test_loop_without_items_calls_nothing() -> None:
    binding.set_num_threads(2)
    assert ranges_of(0) == []
    assert ranges_of(-3) == []


def test_loop_within_a_loop_runs_where_it_is() -> None:
    binding.set_num_threads(3)
    items: list[int] = []

    def inner(begin: int, end: int) -> None:
        items.extend(range(begin, end))

    def outer(begin: int, end: int) -> None:
        for _ in range(begin, end):
            run_loop(5, inner)

    run_loop(6, outer)
    assert sorted(items) == sorted(6 * list(range(5)))


def test_callers_at_the_same_time_each_get_all_of_their_items() -> None:
    binding.set_num_threads(3)
    results: list[list[int]] = [[] for _ in range(4)]

    def call(own: list[int]) -> None:
        for _ in range(50):
            run_loop(20, lambda begin, end: own.extend(range(begin, end)))

    callers = [threading.Thread(target=call, args=(own,)) for own in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LIMIT)
    for own in results:
        assert sorted(own) == sorted(50 * list(range(20)))


def test_sleeping_helper_is_woken_for_a_loop() -> None:
    binding.set_num_threads(2)
    both = threading.Barrier(2)

    def meet(_begin: int, _end: int) -> None:
        both.wait(LIMIT)  # each of two chunks waits for the other: one thread alone would break it

    for _ in range(3):
        run_loop(2, meet)
        assert not both.broken


@pytest.mark.parametrize("num_threads", [5, 1, 3, 2])
def test_no_more_threads_than_in_force_share_a_loop(num_threads: int) -> None:
    binding.set_num_threads(5)
    run_loop(64, lambda _begin, _end: None)
    assert binding.set_num_threads(num_threads) == num_threads
    threads: set[int] = set()
    for _ in range(50):
        run_loop(64, lambda _begin, _end: threads.add(threading.get_native_id()))
    assert len(threads) <= num_threads


def test_helpers_that_only_cost_time_are_sent_away_and_tried_again_later() -> None:
    binding.set_num_threads(2)
    caller = threading.get_native_id()
    num_ranges: list[int] = []

    def run_slow_helper() -> None:
        has_come, ranges = threading.Event(), []

        def body(begin: int, end: int) -> None:
            ranges.append((begin, end))
            if threading.get_native_id() != caller:
                has_come.set()
                threading.Event().wait(0.001)
            elif end - begin == 1 and len(ranges) == 1:
                has_come.wait(LIMIT)

        run_loop(2, body)
        num_ranges.append(len(ranges))

    def run_until(count: int) -> None:
        for _ in range(20_000):
            run_slow_helper()
            if num_ranges[-1] == count:
                return

    run_until(2)
    assert num_ranges[-1] == 2
    run_until(1)
    assert num_ranges[-1] == 1
    run_until(2)
    assert num_ranges[-1] == 2


def test_helpers_are_tied_to_processors_that_exist() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ties threads to processors")
    cpu = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    binding.set_num_threads(3)
    assert binding.pin_helpers([cpu]) == 1
    assert binding.pin_helpers([cpu, cpu]) == 2
    assert binding.pin_helpers([100_000, -1]) == 0
    assert binding.pin_helpers([]) == 0
    assert os.sched_getaffinity(0) == before
    assert len(ranges_of(100)) == 24


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False)


PREPARE = """
import ctypes, os, sys
from serve.kernels.cpu import binding
F = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
seen = []
function = F(lambda _context, begin, end: seen.extend(range(begin, end)))
def run(total):
    seen.clear()
    binding.library().serve_run_ranges(total, 1, 1, ctypes.cast(function, ctypes.c_void_p), None)
    return sorted(seen) == list(range(total))
assert binding.set_num_threads(3) == 3
assert run(100)
"""


def test_forked_child_has_threads_of_its_own() -> None:
    done = run_script(
        PREPARE
        + """
pid = os.fork()
if pid == 0:
    library = binding.library()
    good = library.serve_num_threads() == 1 and run(50) and binding.set_num_threads(2) == 2 and run(70)
    os._exit(0 if good else 9)
assert os.waitpid(pid, 0)[1] == 0
assert run(30)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_program_ends_while_helpers_sleep_or_spin() -> None:
    done = run_script(PREPARE + "run(10); sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")
