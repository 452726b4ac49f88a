"""The engine-core process over its real sockets, run in a thread of the test: addressing, aborts, shutdown, death."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serve.config import CacheConfig, EngineConfig
from serve.core.executor.uniproc import UniprocExecutor
from serve.core.proc import EngineCoreProc
from serve.errors import ExitCode
from serve.sampling_params import SamplingParams, StructuredOutputs
from serve.wire import sockets
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder
from serve.wire.frontend import (
    ENGINE_CORE_DEAD,
    CheckIntegrity,
    Control,
    ControlCall,
    ControlResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInit,
    FinishReason,
    IsPaused,
    PauseScheduler,
    Ready,
    RequestType,
    ResumeScheduler,
    SchedulerStats,
    SetVocabulary,
)
from tests.source_tree import ROOT
from tests.unit.core.scripted import VOCAB_SIZE, ScriptedWorker, continue_text, make_checkpoint, make_config

LIMIT = 20.0


class Client:
    """One API server's end of the wire."""

    def __init__(self, context: sockets.Context, directory: Path, index: int) -> None:
        self.index = index
        self.input_address = sockets.ipc_endpoint(directory, f"in{index}")
        self.output_address = sockets.ipc_endpoint(directory, f"out{index}")
        self.router = sockets.bind_router(context, self.input_address)
        self.pull = sockets.bind_pull(context, self.output_address)
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.stats: list[SchedulerStats] = []
        self.results: list[ControlResult] = []
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def receive_ready(self) -> Ready:
        assert sockets.poll([self.router], LIMIT), "no ready message"
        identity, payload = self.router.recv_multipart()
        assert identity == b"\x00\x00"
        return msgspec.msgpack.decode(payload, type=Ready)

    def send(self, request_type: bytes, *frames: bytes) -> None:
        self.router.send_multipart([b"\x00\x00", request_type, *frames])

    def add(self, req_id: str, prompt: list[int], *, client_index: int | None = None, **params: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
        index = self.index if client_index is None else client_index
        request = EngineCoreRequest(req_id, prompt, sampling, 0.0, client_index=index)
        self.send(RequestType.ADD.value, *map(bytes, self.encoder.encode(request)))

    def abort(self, *req_ids: str) -> None:
        self.send(RequestType.ABORT.value, *map(bytes, self.encoder.encode(list(req_ids))))

    def call(self, control: Control, call_id: int = 5) -> None:
        call = ControlCall(self.index, call_id, control)
        self.send(RequestType.CONTROL.value, *map(bytes, self.encoder.encode(call)))

    def receive(self) -> EngineCoreOutputs | None:
        """Give the next message; None is the death notice."""
        assert sockets.poll([self.pull], LIMIT), "no message from the engine core"
        frames = self.pull.recv_multipart()
        if frames == [ENGINE_CORE_DEAD]:
            return None
        message = self.decoder.decode(frames)
        if message.scheduler_stats is not None:
            self.stats.append(message.scheduler_stats)
        if message.control_result is not None:
            self.results.append(message.control_result)
        for output in message.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return message

    def receive_end(self, req_id: str) -> list[EngineCoreOutput]:
        """Give all outputs of a request when its last one has come."""
        while (found := self.outputs.get(req_id, [])) == [] or found[-1].finish_reason is None:
            assert self.receive() is not None, "the engine core died"
        return found

    def tokens_of(self, req_id: str) -> list[int]:
        """Give all tokens of a request when it has ended."""
        return [token for output in self.receive_end(req_id) for token in output.new_token_ids]

    def wait_received(self) -> None:
        """Return when the engine's input thread has queued all that was sent so far; the busy loop may stand."""
        self.add("marker", [])
        (output,) = self.receive_end("marker")
        assert output.finish_reason is FinishReason.ERROR

    def receive_result(self) -> ControlResult:
        while not self.results:
            assert self.receive() is not None, "the engine core died"
        return self.results.pop()

    def receive_stats(self, num_running: int, num_waiting: int) -> SchedulerStats:
        while True:
            for stats in self.stats:
                if (stats.num_running_reqs, stats.num_waiting_reqs) == (num_running, num_waiting):
                    return stats
            assert self.receive() is not None, "the engine core died"


class Running:
    """An engine-core process in a thread, with its clients."""

    def __init__(self, config: EngineConfig, worker: ScriptedWorker, *, num_clients: int = 1, **options: float) -> None:
        self.directory = sockets.make_endpoint_dir(Path(tempfile.gettempdir()))
        self.context = sockets.new_context()
        self.clients = [Client(self.context, self.directory, index) for index in range(num_clients)]
        inputs, outputs = zip(*((c.input_address, c.output_address) for c in self.clients), strict=True)
        executor = UniprocExecutor(lambda config, checkpoint: worker, config, make_checkpoint())
        init = EngineInit(config, make_checkpoint(), list(inputs), list(outputs))
        self.proc = EngineCoreProc(init, executor, **options)  # type: ignore[arg-type]
        self.code: ExitCode | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        for client in self.clients:
            assert client.receive_ready() == self.proc.ready

    def _run(self) -> None:
        self.code = self.proc.run()

    def wait_end(self) -> ExitCode | None:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "the engine core does not end"
        return self.code

    def close(self) -> None:
        self.proc.request_shutdown()
        self.proc.request_shutdown()
        self.thread.join(LIMIT)
        for client in self.clients:
            client.router.close(0)
            client.pull.close(0)
        self.context.term()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


class BlockingWorker(ScriptedWorker):
    """Waits in the forward pass of one step until it is let go."""

    def __init__(self, block_at_step: int) -> None:
        super().__init__()
        self.block_at_step = block_at_step
        self.is_blocked = threading.Event()
        self.may_go = threading.Event()

    def execute_model(self, scheduler_output):  # type: ignore[no-untyped-def]
        if len(self.runner.steps) == self.block_at_step:
            self.is_blocked.set()
            assert self.may_go.wait(LIMIT)
        return super().execute_model(scheduler_output)


@contextlib.contextmanager
def engine(
    worker: ScriptedWorker | None = None,
    *,
    num_clients: int = 1,
    drain_seconds: float = 0.0,
    heartbeat_seconds: float = 60.0,
    **scheduler: object,
) -> Iterator[Running]:
    running = Running(
        make_config(**scheduler),  # type: ignore[arg-type]
        worker or ScriptedWorker(),
        num_clients=num_clients,
        drain_seconds=drain_seconds,
        heartbeat_seconds=heartbeat_seconds,
    )
    try:
        yield running
    finally:
        running.close()
        gc.unfreeze()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_request_comes_back_token_by_token(is_async: bool) -> None:
    with engine(async_scheduling=is_async) as running:
        (client,) = running.clients
        client.add("a", [1, 2, 3])
        assert client.tokens_of("a") == continue_text([1, 2, 3], 8)
        assert client.receive_end("a")[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_constraints_work_once_the_vocabulary_is_known(is_async: bool) -> None:
    any_text = StructuredOutputs("regex", "(.|\n)*")
    with engine(async_scheduling=is_async) as running:
        (client,) = running.clients
        client.add("early", [1, 2, 3], structured_outputs=any_text)
        assert "vocabulary" in (client.receive_end("early")[-1].error or "")
        client.call(SetVocabulary([bytes([32 + index % 90]) for index in range(VOCAB_SIZE)], [], []))
        assert client.receive_result().result is True
        client.add("a", [1, 2, 3], structured_outputs=any_text)
        assert client.tokens_of("a") == continue_text([1, 2, 3], 8)
        client.add("refused", [1, 2, 3], structured_outputs=StructuredOutputs("regex", "(a"))
        assert (client.receive_end("refused")[-1].error or "").startswith("invalid_request: regex ")
        # The scripted model samples what it likes; a grammar notices.
        client.add("misfit", [1, 2, 3], structured_outputs=StructuredOutputs("choice", '["!"]'))
        assert (client.receive_end("misfit")[-1].error or "").startswith("grammar_error: ")
        client.call(PauseScheduler("wait"))
        client.receive_result()
        client.add("refused in a pause", [1, 2, 3], structured_outputs=StructuredOutputs("regex", "(b"))
        assert (client.receive_end("refused in a pause")[-1].error or "").startswith("invalid_request: regex ")
        client.call(ResumeScheduler())
        client.receive_result()
        client.add("after", [1, 2, 3])
        assert client.tokens_of("after") == continue_text([1, 2, 3], 8)


def test_answers_go_back_to_the_client_that_asked() -> None:
    with engine(num_clients=2) as running:
        first, second = running.clients
        first.add("a", [1, 2, 3])
        second.add("b", [4, 5, 6])
        for client, req_id, prompt in ((first, "a", [1, 2, 3]), (second, "b", [4, 5, 6])):
            assert client.tokens_of(req_id) == continue_text(prompt, 8)


def test_an_abort_during_a_step_frees_everything_and_sends_nothing_more() -> None:
    worker = BlockingWorker(block_at_step=2)
    with engine(worker) as running:
        (client,) = running.clients
        client.add("a", [1, 2, 3], max_tokens=200)
        assert worker.is_blocked.wait(LIMIT)
        client.abort("a")
        client.call(IsPaused())
        client.wait_received()
        worker.may_go.set()
        client.receive_result()
        stats = client.receive_stats(0, 0)
        assert stats.kv_cache_usage == 0.0


def test_gauges_fall_at_once_when_a_waiting_request_is_aborted() -> None:
    with engine() as running:
        (client,) = running.clients
        client.call(PauseScheduler("wait"))
        assert client.receive_result().result is True
        client.add("a", [1, 2, 3])
        client.receive_stats(0, 1)
        client.stats.clear()
        client.abort("a")
        client.receive_stats(0, 0)


def test_an_abort_sent_right_behind_its_request_is_not_lost() -> None:
    with engine() as running:
        (client,) = running.clients
        for index in range(20):
            client.add(f"a{index}", [1, 2, 3], max_tokens=250)
            client.abort(f"a{index}")
        client.add("last", [4, 5])
        client.receive_end("last")
        client.call(CheckIntegrity())
        assert client.receive_result().result is True
        client.receive_stats(0, 0)


def test_a_request_that_cannot_be_prepared_gets_an_error_alone() -> None:
    with engine() as running:
        (client,) = running.clients
        client.add("bad", [1, 99_999])
        client.add("good", [1, 2, 3])
        (output,) = client.receive_end("bad")
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "invalid_request: a prompt token id is outside the vocabulary of 97 tokens"
        assert client.receive_end("good")[-1].finish_reason is FinishReason.LENGTH


def test_junk_is_dropped_and_logged_and_the_engine_lives(caplog: pytest.LogCaptureFixture) -> None:
    with engine() as running, caplog.at_level(logging.WARNING):
        (client,) = running.clients
        client.send(b"\x09", b"x")
        client.send(b"\x00", b"\xc1\xc1")
        client.send(b"\x00")
        client.send(b"\x03", b"\x90")
        client.add("elsewhere", [1], client_index=3)
        client.add("a", [1, 2, 3])
        assert client.receive_end("a")[-1].finish_reason is FinishReason.LENGTH
        assert "dropped a message of an API server: total=1 error=unknown request type" in caplog.text


def test_a_second_request_with_a_live_id_does_not_disturb_the_first(caplog: pytest.LogCaptureFixture) -> None:
    worker = BlockingWorker(block_at_step=0)
    with engine(worker) as running:
        (client,) = running.clients
        client.add("a", [1, 2, 3])
        assert worker.is_blocked.wait(LIMIT)
        client.add("a", [7, 7, 7])
        client.wait_received()
        worker.may_go.set()
        assert client.tokens_of("a") == continue_text([1, 2, 3], 8)
        assert "request id a is already in use" in caplog.text


def test_pause_is_answered_over_the_wire_after_the_outputs_it_made() -> None:
    worker = BlockingWorker(block_at_step=1)
    with engine(worker) as running:
        (client,) = running.clients
        client.add("a", [1, 2, 3])
        assert worker.is_blocked.wait(LIMIT)
        client.call(PauseScheduler("abort"), call_id=9)
        client.wait_received()
        worker.may_go.set()
        assert client.receive_end("a")[-1].finish_reason is FinishReason.ABORT
        assert client.receive_result() == ControlResult(9, result=True)


def test_shutdown_aborts_running_and_waiting_requests_and_tells_their_clients() -> None:
    worker = BlockingWorker(block_at_step=1)
    with engine(worker, max_num_seqs=1) as running:
        (client,) = running.clients
        client.add("running", [1, 2, 3], max_tokens=200)
        assert worker.is_blocked.wait(LIMIT)
        client.add("waiting", [1, 2, 3])
        running.proc.request_shutdown()
        client.wait_received()
        worker.may_go.set()
        assert client.receive_end("running")[-1].finish_reason is FinishReason.ABORT
        assert client.receive_end("waiting")[-1].finish_reason is FinishReason.ABORT
        assert running.wait_end() is ExitCode.OK
        assert worker.calls[-1] == "shutdown"


def test_while_draining_running_requests_finish_and_new_work_is_answered() -> None:
    worker = BlockingWorker(block_at_step=1)
    with engine(worker, drain_seconds=60.0) as running:
        (client,) = running.clients
        client.add("old", [1, 2, 3])
        assert worker.is_blocked.wait(LIMIT)
        running.proc.request_shutdown()
        client.add("new", [1, 2, 3])
        client.call(IsPaused(), call_id=4)
        client.wait_received()
        worker.may_go.set()
        assert client.tokens_of("old") == continue_text([1, 2, 3], 8)
        (new,) = client.receive_end("new")
        assert new.finish_reason is FinishReason.ABORT
        assert client.receive_result() == ControlResult(4, failure_message="the engine core is shutting down")
        assert running.wait_end() is ExitCode.OK


def test_a_second_request_to_stop_ends_the_drain() -> None:
    worker = BlockingWorker(block_at_step=1)
    with engine(worker, drain_seconds=60.0) as running:
        (client,) = running.clients
        client.add("a", [1, 2, 3], max_tokens=250)
        assert worker.is_blocked.wait(LIMIT)
        running.proc.request_shutdown()
        worker.is_blocked.clear()
        worker.block_at_step = 20
        worker.may_go.set()
        worker.may_go.clear()
        assert worker.is_blocked.wait(LIMIT)
        running.proc.request_shutdown()
        worker.may_go.set()
        assert client.receive_end("a")[-1].finish_reason is FinishReason.ABORT
        assert running.wait_end() is ExitCode.OK


def test_a_failing_forward_pass_sends_the_death_notice_to_every_client_and_names_the_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = ScriptedWorker()
    worker.fail_at_step = 2
    with engine(worker, num_clients=2) as running:
        running.clients[0].add("doomed", [1, 2, 3])
        for client in running.clients:
            while client.receive() is not None:
                pass
        assert running.wait_end() is ExitCode.ENGINE_DIED
    assert "engine core failed (step 2: doomed" in caplog.text
    assert "injected failure of the forward pass" in caplog.text


def test_an_idle_engine_sends_heartbeats_and_a_stuck_one_does_not() -> None:
    worker = BlockingWorker(block_at_step=0)
    with engine(worker, heartbeat_seconds=0.05) as running:
        (client,) = running.clients
        for _ in range(3):
            message = client.receive()
            assert message is not None
            assert (message.outputs, message.scheduler_stats, message.control_result) == ([], None, None)
        client.add("a", [1, 2, 3])
        assert worker.is_blocked.wait(LIMIT)
        # At most the beats that were due before the loop got stuck may still come.
        quiet = 0
        for _ in range(20):
            if not sockets.poll([client.pull], 0.15):
                quiet += 1
                break
            client.receive()
        assert quiet == 1
        worker.may_go.set()
        client.receive_end("a")


def test_a_process_ends_on_sigterm_and_ignores_sigint() -> None:
    command = [sys.executable, "-m", "tests.unit.core.proc_with_signals"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served after SIGINT\n"


def test_ready_tells_the_resolved_limits() -> None:
    with engine(cache=CacheConfig(num_gpu_blocks_override=9), max_model_len=-1) as running:
        assert running.proc.ready.max_model_len == 128
        assert running.proc.ready.num_gpu_blocks == 9
