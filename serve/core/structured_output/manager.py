"""Structured output of the engine core: grammars of requests that wait for one, and the masks of each step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from serve.core.request import Request
from serve.core.structured_output.compiler import CompileJob, GrammarCompiler
from serve.core.structured_output.constraint import Constraint
from serve.core.structured_output.grammar import Grammar, GrammarBackend, MaskRow
from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.errors import InvalidRequest, RequestFailed
from serve.sampling_params import SamplingParams, StructuredOutputs
from serve.wire.frontend import SetVocabulary
from serve.wire.step import GrammarOutput

MAX_CACHED_GRAMMARS: Final = 128
# Fewer rows are filled before threads have begun.
PARALLEL_ROWS: Final = 32
ROWS_PER_TASK: Final = 16
MAX_FILL_THREADS: Final = 8

# A request that need not wait any more, and the error it must end with, if any.
Settled = tuple[Request, str | None]


def _fill_row(request: Request, row: MaskRow) -> bool:
    assert request.constraint is not None, f"{request.req_id} has no constraint to fill a row from"
    return request.constraint.fill(row, request.num_output_tokens)


def needs_constraint(params: SamplingParams) -> bool:
    """True when something restricts the answer token by token."""
    return params.structured_outputs is not None or params.reasoning is not None


class StructuredOutputManager:
    """Gives requests their constraints and fills the masks of a step. Belongs to the busy-loop thread.

    make_backend is called once, on a compile thread, with the vocabulary. num_buffers masks may be in use by steps in
    flight at the same time. wake is called from a compile thread when poll has something.
    """

    def __init__(
        self,
        make_backend: Callable[[SetVocabulary], GrammarBackend],
        *,
        num_buffers: int,
        num_threads: int,
        wake: Callable[[], None] = lambda: None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._make_backend = make_backend
        self._lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._vocabulary: SetVocabulary | None = None
        self._compiler = compiler or GrammarCompiler(self._get_backend, wake, num_threads=num_threads)
        self._jobs: dict[StructuredOutputs, CompileJob] = {}
        self._waiters: dict[StructuredOutputs, list[Request]] = {}
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._buffers: list[np.ndarray] = []
        self._num_buffers = num_buffers
        self._num_fills = 0
        fillers = min(num_threads, MAX_FILL_THREADS)
        self._fillers = ThreadPoolExecutor(fillers, thread_name_prefix="mask") if fillers > 1 else None

    @property
    def has_vocabulary(self) -> bool:
        """True once constraints can be compiled."""
        return self._vocabulary is not None

    @property
    def is_idle(self) -> bool:
        """True when no request waits for a grammar."""
        return self._compiler.is_idle

    def set_vocabulary(self, vocabulary: SetVocabulary) -> None:
        """Take the bytes of the tokens; every front end sends the same, so the first message counts."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary

    def start(self, request: Request) -> bool:
        """Give a request its constraint, or begin to compile it; True when the request may run at once."""
        outputs = request.sampling_params.structured_outputs
        if outputs is None:
            self._constrain(request, None)
            return True
        grammar = self._cache.get(outputs)
        if grammar is not None:
            self._cache.move_to_end(outputs)
            self._constrain(request, grammar.copy())
            return True
        self._waiters.setdefault(outputs, []).append(request)
        if outputs not in self._jobs:
            waiters = self._waiters[outputs]
            job = CompileJob(outputs, lambda: any(not waiter.is_final for waiter in waiters))
            self._jobs[outputs] = job
            self._compiler.submit(job)
        return False

    def poll(self) -> list[Settled]:
        """Give the requests whose grammar was settled since the last call."""
        settled: list[Settled] = []
        for job, outcome in self._compiler.take_ended():
            del self._jobs[job.constraint]
            waiters = [request for request in self._waiters.pop(job.constraint) if not request.is_final]
            match outcome:
                case None:
                    # All had gone when its turn came; who came since starts it anew.
                    settled += [(request, None) for request in waiters if self.start(request)]
                case InvalidRequest():
                    settled += [(request, f"invalid_request: {outcome}") for request in waiters]
                case RequestFailed():
                    settled += [(request, str(outcome)) for request in waiters]
                case _:
                    self._keep(job.constraint, outcome)
                    for request in waiters:
                        self._constrain(request, outcome.copy())
                        settled.append((request, None))
        return settled

    def fill(self, requests: Iterable[Request]) -> GrammarOutput | None:
        """Fill a mask row for each request that is restricted now; None when none is.

        The rows stay valid until num_buffers later calls.
        """
        requests = list(requests)
        if not requests:
            return None
        rows = self._take_buffer(len(requests))
        is_restricted = self._fill_rows(requests, rows)
        for request in requests:
            outputs = request.sampling_params.structured_outputs
            if outputs is not None and request.constraint is not None and request.constraint.failure is not None:
                # The next request with this grammar must not begin in a worn-out copy.
                self._cache.pop(outputs, None)
        if not any(is_restricted):
            return None
        used = rows if all(is_restricted) else rows[is_restricted]
        req_ids = [request.req_id for request, has_row in zip(requests, is_restricted, strict=True) if has_row]
        return GrammarOutput(req_ids, used.view(np.int32))

    def _fill_rows(self, requests: list[Request], rows: np.ndarray) -> list[bool]:
        """Fill the row of each request; tells which of them are restricted."""
        if self._fillers is None or len(requests) < PARALLEL_ROWS:
            return [_fill_row(request, row) for request, row in zip(requests, rows, strict=True)]

        def fill_part(start: int) -> list[bool]:
            part = slice(start, start + ROWS_PER_TASK)
            return [_fill_row(request, row) for request, row in zip(requests[part], rows[part], strict=True)]

        parts = self._fillers.map(fill_part, range(0, len(requests), ROWS_PER_TASK))
        return [flag for part in parts for flag in part]

    def shutdown(self) -> None:
        """End the threads."""
        self._compiler.shutdown()
        if self._fillers is not None:
            self._fillers.shutdown()

    def _get_backend(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                assert self._vocabulary is not None, "no request is taken before the vocabulary"
                self._backend = self._make_backend(self._vocabulary)
            return self._backend

    def _constrain(self, request: Request, grammar: Grammar | None) -> None:
        assert self._vocabulary is not None, "no request is taken before the vocabulary"
        params = request.sampling_params
        gate = ReasoningGate(params.reasoning, grammar, self._vocabulary.tokens)
        ends = self._backend.end_token_ids if self._backend is not None else ()
        request.constraint = Constraint(params, gate, ends, can_end=bool(self._vocabulary.eos_token_ids))

    def _keep(self, outputs: StructuredOutputs, grammar: Grammar) -> None:
        self._cache[outputs] = grammar
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)

    def _take_buffer(self, num_rows: int) -> np.ndarray:
        """Give the mask of this fill, [num_rows, mask_words] uint32; it was last used num_buffers fills ago."""
        index = self._num_fills % self._num_buffers
        self._num_fills += 1
        if not self._buffers:
            self._buffers = [np.empty((0, self._mask_words()), np.uint32) for _ in range(self._num_buffers)]
        buffer = self._buffers[index]
        if len(buffer) < num_rows or buffer.shape[1] != self._mask_words():
            self._buffers[index] = np.empty((max(num_rows, 8), self._mask_words()), np.uint32)
        return self._buffers[index][:num_rows]

    def _mask_words(self) -> int:
        if self._backend is not None:
            return self._backend.mask_words
        assert self._vocabulary is not None, "no request is taken before the vocabulary"
        return (len(self._vocabulary.tokens) + 31) // 32
