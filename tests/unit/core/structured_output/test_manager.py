"""Requests and their grammars: who waits, who shares, what fails, and the masks of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from serve.core.request import Request, RequestStatus
from serve.core.structured_output.compiler import GrammarCompiler
from serve.core.structured_output.manager import MAX_CACHED_GRAMMARS, Settled, StructuredOutputManager
from serve.sampling_params import ReasoningBounds, SamplingParams, StructuredOutputs
from serve.wire.frontend import SetVocabulary
from tests.unit.core.scripted import make_request
from tests.unit.core.structured_output.fakes import WAIT_SECONDS, TextBackend, allowed_ids, choice

TOKENS = [b"a", b"b", b"c", b"<eos>"]
EOS = 3
VOCABULARY = SetVocabulary(TOKENS, [], [EOS])


class Rig:
    """A manager over the text grammars, and the means to wait for it."""

    def __init__(self, *, num_threads: int = 1, num_buffers: int = 2, compile_seconds: float = WAIT_SECONDS) -> None:
        self.backend = TextBackend(VOCABULARY)
        self.woken = threading.Event()
        self.num_built = 0
        compiler = GrammarCompiler(self.build, self.woken.set, num_threads=num_threads, compile_seconds=compile_seconds)
        self.manager = StructuredOutputManager(
            lambda vocabulary: self.backend, num_buffers=num_buffers, num_threads=num_threads, compiler=compiler
        )
        self.manager.set_vocabulary(VOCABULARY)

    def build(self) -> TextBackend:
        self.num_built += 1
        return self.backend

    def start(self, req_id: str, constraint: StructuredOutputs | None, **params: object) -> tuple[Request, bool]:
        sampling = SamplingParams(structured_outputs=constraint, **params)  # type: ignore[arg-type]
        request = make_request(req_id, 3, params=sampling)
        return request, self.manager.start(request)

    def wait(self) -> list[Settled]:
        """Wait until something has been settled and give it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (settled := self.manager.poll()):
            self.woken.wait(0.01)
            self.woken.clear()
            assert time.monotonic() < deadline, "nothing was compiled"
        return settled

    def settle(self, req_id: str, *texts: str) -> Request:
        request, is_ready = self.start(req_id, choice(*texts))
        if not is_ready:
            assert self.wait() == [(request, None)]
        return request


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.backend.released.set()
    rig.manager.shutdown()


def test_the_first_request_waits_and_the_next_with_the_same_text_does_not(rig: Rig) -> None:
    first, is_ready = rig.start("1", choice("ab"))
    assert not is_ready
    assert not rig.manager.is_idle
    assert rig.wait() == [(first, None)]
    assert rig.manager.is_idle
    second, is_ready = rig.start("2", choice("ab"))
    assert is_ready
    assert first.constraint is not None
    assert second.constraint is not None
    assert first.constraint.accept(0)
    # A copy: what the first has done does not show.
    assert rig.manager.fill([second]) is not None
    assert second.constraint.accept(0)
    assert rig.backend.num_compiled == 1


def test_requests_that_wait_for_the_same_text_share_one_compilation(rig: Rig) -> None:
    requests = [rig.start(str(i), choice("slow"))[0] for i in range(3)]
    rig.backend.released.set()
    assert rig.wait() == [(request, None) for request in requests]
    assert rig.backend.num_compiled == 1


def test_a_cached_text_is_ready_while_another_compiles(rig: Rig) -> None:
    rig.settle("1", "ab")
    slow, is_ready = rig.start("2", choice("slow"))
    assert not is_ready
    assert rig.backend.started.wait(WAIT_SECONDS)
    assert rig.start("3", choice("ab"))[1]
    rig.backend.released.set()
    assert rig.wait() == [(slow, None)]


def test_a_refusal_reaches_every_waiter_and_nobody_later(rig: Rig) -> None:
    requests = [rig.start(str(i), choice("refused"))[0] for i in range(2)]
    assert rig.wait() == [(request, "invalid_request: refused") for request in requests]
    assert not rig.start("later", choice("refused"))[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_library_ends_its_request_and_the_next_compiles(rig: Rig) -> None:
    others = set(threading.enumerate())
    broken, _ = rig.start("1", choice("broken"))
    [(request, error)] = rig.wait()
    # Its traceback belongs to this test.
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_SECONDS)
    assert request is broken
    assert (error or "").startswith("grammar_error: ")
    rig.settle("2", "ab")


def test_a_text_that_takes_too_long_is_refused_and_others_go_on() -> None:
    rig = Rig(compile_seconds=0.05)
    slow, _ = rig.start("1", choice("slow"))
    [(request, error)] = rig.wait()
    assert request is slow
    assert (error or "").startswith("invalid_request: ")
    assert "0.05 s" in (error or "")
    # The thread is still inside the library; another one does the work.
    assert not rig.backend.released.is_set()
    rig.settle("2", "ab")
    rig.backend.released.set()
    rig.manager.shutdown()


def test_what_nobody_waits_for_any_more_is_not_compiled(rig: Rig) -> None:
    slow, _ = rig.start("1", choice("slow"))
    assert rig.backend.started.wait(WAIT_SECONDS)
    gone, _ = rig.start("2", choice("ab"))
    gone.move_to(RequestStatus.FINISHED_ABORTED)
    rig.backend.released.set()
    assert rig.wait() == [(slow, None)]
    rig.settle("3", "cc")
    assert rig.backend.num_compiled == 2


def test_one_who_comes_while_an_abandoned_job_is_dropped_starts_it_anew(rig: Rig) -> None:
    gone, _ = rig.start("1", choice("ab"))
    gone.move_to(RequestStatus.FINISHED_ABORTED)
    late, is_ready = rig.start("2", choice("ab"))
    assert not is_ready
    assert rig.wait() == [(late, None)]


def test_the_cache_keeps_the_texts_used_last(rig: Rig) -> None:
    rig.settle("first", "a")
    for index in range(MAX_CACHED_GRAMMARS - 1):
        rig.settle(f"{index}", f"b{index}")
    rig.settle("again", "a")
    num_compiled = rig.backend.num_compiled
    rig.settle("one more", "c")
    rig.settle("kept", "a")
    assert rig.backend.num_compiled == num_compiled + 1
    rig.settle("dropped", "b0")
    assert rig.backend.num_compiled == num_compiled + 2


def test_a_mask_has_a_row_for_each_request_that_is_restricted(rig: Rig) -> None:
    first, last = rig.settle("1", "ab"), rig.settle("3", "cb")
    thinker, is_ready = rig.start("2", None, reasoning=ReasoningBounds("</t>", (2,), None, 9))
    assert is_ready
    output = rig.manager.fill([first, thinker, last])
    assert output is not None
    assert output.req_ids == ["1", "3"]
    assert output.bitmask.dtype == np.int32
    assert [allowed_ids(row) for row in output.bitmask.view(np.uint32)] == [[0], [2]]
    assert rig.manager.fill([thinker]) is None
    assert rig.manager.fill([]) is None


def test_a_spent_budget_is_forced_before_any_grammar_was_compiled(rig: Rig) -> None:
    thinker, _ = rig.start("1", None, reasoning=ReasoningBounds("</t>", (2,), None, 0))
    output = rig.manager.fill([thinker])
    assert output is not None
    assert allowed_ids(output.bitmask.view(np.uint32)[0]) == [2]


def test_masks_of_steps_in_flight_do_not_share_memory(rig: Rig) -> None:
    request, other = rig.settle("1", "ab"), rig.settle("2", "cb")
    older = rig.manager.fill([request])
    newer = rig.manager.fill([other])
    assert older is not None
    assert newer is not None
    assert allowed_ids(older.bitmask.view(np.uint32)[0]) == [0]
    assert allowed_ids(newer.bitmask.view(np.uint32)[0]) == [2]


def test_a_grammar_that_fails_in_use_is_compiled_anew_for_the_next(rig: Rig) -> None:
    request = rig.settle("1", "fails", "a")
    assert request.constraint is not None
    assert request.constraint.accept(0)
    request.all_token_ids.append(0)
    assert rig.manager.fill([request]) is None
    assert request.constraint.failure == "invalid_request: too complex"
    assert not rig.start("2", choice("fails", "a"))[1]


def test_many_rows_filled_by_threads_are_those_of_one_thread() -> None:
    rig = Rig(num_threads=4)
    texts = ("ab", "ba", "cb")
    requests = [rig.settle(str(i), texts[i % 3]) for i in range(50)]
    thinker, _ = rig.start("thinker", None, reasoning=ReasoningBounds("</t>", (2,)))
    output = rig.manager.fill([*requests[:20], thinker, *requests[20:]])
    rig.manager.shutdown()
    assert output is not None
    assert output.req_ids == [request.req_id for request in requests]
    assert [allowed_ids(row) for row in output.bitmask.view(np.uint32)] == [[i % 3] for i in range(50)]


def test_the_first_vocabulary_counts_and_the_backend_is_built_once() -> None:
    built: list[SetVocabulary] = []

    def build(vocabulary: SetVocabulary) -> TextBackend:
        built.append(vocabulary)
        return TextBackend(vocabulary)

    woken = threading.Event()
    manager = StructuredOutputManager(build, num_buffers=1, num_threads=2, wake=woken.set)
    assert not manager.has_vocabulary
    manager.set_vocabulary(VOCABULARY)
    manager.set_vocabulary(SetVocabulary([b"x"], [], []))
    assert manager.has_vocabulary
    waiting = {str(i) for i in range(4)}
    for req_id in sorted(waiting):
        params = SamplingParams(structured_outputs=choice("a" * (int(req_id) + 1)))
        assert not manager.start(make_request(req_id, 2, params=params))
    while waiting:
        assert woken.wait(WAIT_SECONDS)
        woken.clear()
        waiting -= {request.req_id for request, _ in manager.poll()}
    manager.shutdown()
    assert built == [VOCABULARY]
