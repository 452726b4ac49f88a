"""The worker's thread: calls in order, results and errors to whoever waits."""

from __future__ import annotations

import threading

import pytest

from serve.core.executor.worker_thread import WorkerThread


def test_calls_run_in_order_on_one_other_thread() -> None:
    thread = WorkerThread("worker")
    seen: list[tuple[int, int]] = []
    pending = [thread.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(20)]  # type: ignore[misc]
    assert [call.result(10) for call in pending] == [None] * 20
    thread.close()
    assert [i for i, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_a_result_can_be_asked_for_again() -> None:
    thread = WorkerThread("worker")
    pending = thread.submit(pow, 3, 4)
    assert [pending.result(10), pending.result(10)] == [81, 81]
    thread.close()


def test_an_error_is_raised_by_its_own_result_only() -> None:
    thread = WorkerThread("worker")
    broken, sound = thread.submit(int, "x"), thread.submit(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        broken.result(10)
    assert sound.result(10) == 7
    thread.close()


def test_a_call_that_has_not_ended_times_out_and_may_still_end() -> None:
    thread = WorkerThread("worker")
    may_go = threading.Event()
    pending = thread.submit(may_go.wait, 10)
    with pytest.raises(TimeoutError, match="has not ended"):
        pending.result(0.01)
    may_go.set()
    assert pending.result(10)
    thread.close()


def test_close_waits_for_the_calls_before_it() -> None:
    thread = WorkerThread("worker")
    may_go = threading.Event()
    pending = thread.submit(may_go.wait, 10)
    last = thread.submit(int, "1")
    threading.Timer(0.05, may_go.set).start()
    thread.close()
    assert pending.result(0)
    assert last.result(0) == 1
