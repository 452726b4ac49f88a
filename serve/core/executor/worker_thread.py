"""A thread that runs calls in order, and the results it owes: lighter than a thread pool, which costs a step 50 us."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a call that may not have run yet."""

    __slots__ = ("_call", "_error", "_is_open", "_value")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._value: T
        self._error: BaseException | None = None
        # Held until the call has ended.
        self._is_open = threading.Lock()
        self._is_open.acquire()

    def run(self) -> None:
        """Make the call, once; what it raises is raised by result."""
        assert self._call is not None, "a call runs once"
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self._call = None
        self._is_open.release()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the call; give what it returned or raise what it raised. TimeoutError after timeout s."""
        if not self._is_open.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"the call has not ended within {timeout} s")
        self._is_open.release()
        if self._error is not None:
            raise self._error
        return self._value


class WorkerThread:
    """Runs every call on one thread, in the order of submit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        """Queue a call and give its result to be."""
        pending = Pending(lambda: call(*args, **kwargs))
        self._calls.put(pending.run)
        return pending

    def close(self) -> None:
        """End the thread when it has made the calls before."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
            # What a call holds on to must not live until the next one.
            del run
