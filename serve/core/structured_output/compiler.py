"""Compiles constraints on threads beside the loop, with a limit on the time of each."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from serve.core.structured_output.grammar import Grammar, GrammarBackend
from serve.errors import InvalidRequest, RequestFailed
from serve.sampling_params import StructuredOutputs

log = logging.getLogger(__name__)

COMPILE_SECONDS: Final = 2.0
QUEUE_SECONDS: Final = 60.0
MAX_LOST_THREADS: Final = 4

Outcome = Grammar | InvalidRequest | RequestFailed


def default_threads() -> int:
    """Give half of the processors this process may use, at least one."""
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cpus // 2)


class CompileJob:
    """One constraint on its way to a grammar. is_wanted is asked before the work begins."""

    __slots__ = ("constraint", "has_ended", "is_wanted", "queued_at", "started_at", "thread")

    def __init__(self, constraint: StructuredOutputs, is_wanted: Callable[[], bool]) -> None:
        self.constraint = constraint
        self.is_wanted = is_wanted
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.thread: threading.Thread | None = None
        # Set by the owner's thread: the outcome was taken, or the job was given up.
        self.has_ended = False


class GrammarCompiler:
    """A few daemon threads. A job that exceeds its time is reported as failed and its thread replaced.

    A thread cannot be stopped inside the library; a lost one ends with its job, and at most MAX_LOST_THREADS are
    replaced. get_backend builds or gives the backend; wake is called when a job has ended. All methods belong to one
    thread.
    """

    def __init__(
        self,
        get_backend: Callable[[], GrammarBackend],
        wake: Callable[[], None],
        *,
        num_threads: int,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._get_backend = get_backend
        self._wake = wake
        self._num_threads = num_threads
        self._compile_seconds = compile_seconds
        self._queue: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[CompileJob, Outcome | None]] = queue.SimpleQueue()
        self._open: list[CompileJob] = []
        self._threads: list[threading.Thread] = []
        self._lost: list[threading.Thread] = []
        # Threads that the library has broken; they count no more, even while they still write their traceback.
        self._dying: set[threading.Thread] = set()

    @property
    def is_idle(self) -> bool:
        """True when no job is open."""
        return not self._open

    def submit(self, job: CompileJob) -> None:
        """Queue a job."""
        self._open.append(job)
        self._add_threads()
        self._queue.put(job)

    def take_ended(self) -> list[tuple[CompileJob, Outcome | None]]:
        """Give the jobs that ended since the last call and their outcomes; None for one nobody wanted any more."""
        ended: list[tuple[CompileJob, Outcome | None]] = []
        while not self._done.empty():
            job, outcome = self._done.get_nowait()
            if not job.has_ended:
                ended.append((job, outcome))
        ended += self._give_up(time.monotonic(), {job for job, _ in ended})
        for job, _ in ended:
            job.has_ended = True
            self._open.remove(job)
        if ended and self._open:
            self._add_threads()
        return ended

    def shutdown(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        for _ in self._threads:
            self._queue.put(None)

    def _give_up(self, now: float, ended: set[CompileJob]) -> list[tuple[CompileJob, Outcome | None]]:
        """Give the jobs that ran or waited too long."""
        late: list[tuple[CompileJob, Outcome | None]] = []
        for job in self._open:
            if job in ended:
                continue
            if job.started_at is not None and now - job.started_at > self._compile_seconds:
                late.append(
                    (
                        job,
                        InvalidRequest(
                            f"{job.constraint.kind} takes more than {self._compile_seconds:g} s to compile; "
                            "use a simpler one"
                        ),
                    )
                )
                self._lose(job)
            elif job.started_at is None and now - job.queued_at > QUEUE_SECONDS:
                text = f"grammar_timeout: the constraint waited {QUEUE_SECONDS:g} s to be compiled"
                late.append((job, RequestFailed(text, cause="grammar_timeout")))
        return late

    def _lose(self, job: CompileJob) -> None:
        self._lost = [lost for lost in self._lost if lost.is_alive()]
        if job.thread in self._threads and len(self._lost) < MAX_LOST_THREADS:
            self._threads.remove(job.thread)
            self._lost.append(job.thread)
        log.warning("a constraint was given up while it was compiled: kind=%s", job.constraint.kind)

    def _add_threads(self) -> None:
        dying = self._dying.copy()
        self._threads = [thread for thread in self._threads if thread not in dying]
        self._dying -= dying
        while len(self._threads) < min(self._num_threads, len(self._open)):
            thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while (job := self._queue.get()) is not None:
            job.thread = me
            self._work(job)
            if me in self._lost:
                return

    def _work(self, job: CompileJob) -> None:
        # What stays when the library breaks: this thread then ends with the traceback, and another takes its place.
        broken = RequestFailed(
            "grammar_error: the grammar compiler failed, see the server's log", cause="grammar_error"
        )
        outcome: Outcome | None = broken
        try:
            if job.is_wanted():
                backend = self._get_backend()
                job.started_at = time.monotonic()
                outcome = backend.compile(job.constraint)
            else:
                outcome = None
        except InvalidRequest as error:
            outcome = error
        finally:
            if outcome is broken:
                self._dying.add(threading.current_thread())
            self._done.put((job, outcome))
            self._wake()
