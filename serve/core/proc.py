"""Phases 4 and 10 of 11: the engine-core process. Requests come in and outputs go out; the busy loop is in between.

Three threads: the input thread receives, decodes and prepares; the main thread schedules and never touches a socket;
the output thread encodes and sends, and never looks at a request. Two queues join them.
"""

from __future__ import annotations

import enum
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Final

import msgspec

from serve.core.control import ControlPanel, refuse
from serve.core.engine_core import EngineCore
from serve.core.executor.base import Executor
from serve.core.request import Request
from serve.errors import ExitCode
from serve.wire import sockets
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder, WireError, WireErrors
from serve.wire.frontend import (
    ENGINE_CORE_DEAD,
    ControlCall,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInit,
    FinishReason,
    Ready,
    RequestType,
)

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 2.0
IDLE_WITH_WORK_SECONDS: Final = 0.05
OUTPUT_JOIN_SECONDS: Final = 5.0


class ProcState(enum.Enum):
    """Life of the process; it ends when SHUTTING_DOWN has nothing left to do."""

    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    SHUTTING_DOWN = enum.auto()


class _Wake(enum.Enum):
    """In-process notes on the input queue; they never cross a socket."""

    WAKEUP = enum.auto()
    THREAD_DIED = enum.auto()


class _End(enum.Enum):
    """Last item of the output queue: leave quietly, or tell every client that the engine is dead first."""

    QUIET = enum.auto()
    DEAD = enum.auto()


_InputItem = Request | list[str] | ControlCall | _Wake
_OutputItem = tuple[int, EngineCoreOutputs] | _End


class EngineCoreProc:
    """The engine core with its threads and sockets. Create it (loads the model), then run it in the same thread.

    report is told the stages of the start-up. drain_seconds: how long a first SIGTERM lets requests run on (0: they
    are aborted at once, and their clients told). Raises ConfigError when the model cannot be served.
    """

    def __init__(
        self,
        init: EngineInit,
        executor: Executor,
        *,
        engine_index: int = 0,
        report: Callable[[str], None] = lambda stage: None,
        drain_seconds: float = 0.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._init = init
        self._engine_index = engine_index
        self._executor = executor
        # SimpleQueue.put may be called inside a signal handler; queue.Queue.put could deadlock there.
        self._input_queue: queue.SimpleQueue[_InputItem] = queue.SimpleQueue()
        self._core = EngineCore(
            init.config,
            init.checkpoint,
            executor,
            report=report,
            wake=lambda: self._input_queue.put(_Wake.WAKEUP),
        )
        self._control = ControlPanel(self._core.scheduler, self._core.structured)
        self._context = sockets.new_context()
        self._output_queue: queue.SimpleQueue[_OutputItem] = queue.SimpleQueue()
        self._state = ProcState.RUNNING
        self._drain_seconds = drain_seconds
        self._drain_deadline = 0.0
        self._heartbeat_seconds = heartbeat_seconds
        self._is_stopping = threading.Event()
        self._num_turns = 0
        self._turns_at_beat = 0
        self._is_idle = False
        self._wire_errors = WireErrors("an API server")

    @property
    def ready(self) -> Ready:
        """What the launcher and the clients learn when the engine serves."""
        return self._core.ready

    def run(self) -> ExitCode:
        """Serve until told to stop; gives the exit code of the process."""
        self._handle_signals()
        output_thread = threading.Thread(target=self.run_output_thread, name="EngineCoreOutput", daemon=True)
        input_thread = threading.Thread(target=self.run_input_thread, name="EngineCoreInput", daemon=True)
        output_thread.start()
        input_thread.start()
        code = ExitCode.OK
        try:
            self._run_busy_loop()
            self._output_queue.put(_End.QUIET)
        except Exception:
            log.exception("engine core failed (%s)", self._core.describe_failure())
            self._output_queue.put(_End.DEAD)
            code = ExitCode.ENGINE_DIED
        output_thread.join(OUTPUT_JOIN_SECONDS)
        self._is_stopping.set()
        if not output_thread.is_alive():
            # Wakes the input thread, which closes its sockets, and waits for the last outputs to leave.
            self._context.term()
        self._core.structured.shutdown()
        self._executor.shutdown()
        return code

    def request_shutdown(self) -> None:
        """Ask the busy loop to end; asked again, it does not wait for running requests. Safe in a signal handler."""
        if self._state is ProcState.RUNNING:
            self._state = ProcState.REQUESTED
        else:
            self._drain_deadline = 0.0
        self._input_queue.put(_Wake.WAKEUP)

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def on_sigterm(signum: int, frame: FrameType | None) -> None:
            self.request_shutdown()

        signal.signal(signal.SIGTERM, on_sigterm)
        # Ctrl-C reaches the whole process group. The launcher drains and then ends this process itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _run_busy_loop(self) -> None:
        core = self._core
        while self._should_continue():
            self._num_turns += 1
            self._process_input()
            if core.has_work:
                outputs, is_moving = core.step_once()
                self._send(outputs.items())
                if not is_moving:
                    # Only requests without a grammar are left: a compile thread wakes this one.
                    self._send(core.take_changed_stats().items())
                    self._wait_for_input(IDLE_WITH_WORK_SECONDS)
            self._send(self._control.poll())
        self._send(core.abort_all().items())
        self._process_pending_input()

    def _should_continue(self) -> bool:
        """Advance the shutdown; False when it was asked for and nothing is left to do."""
        if self._state is ProcState.RUNNING:
            return True
        if self._state is ProcState.REQUESTED:
            self._state = ProcState.SHUTTING_DOWN
            self._drain_deadline = time.monotonic() + self._drain_seconds
            log.info("shutting down: unfinished_requests=%d", self._core.scheduler.num_unfinished)
        if time.monotonic() >= self._drain_deadline:
            self._send(self._core.abort_all().items())
        return self._core.has_work

    def _process_input(self) -> None:
        """Take what has arrived; wait for it when there is no work."""
        self._process_pending_input()
        if self._core.has_work or self._state is not ProcState.RUNNING:
            return
        self._core.apply_aborts()
        # A pause stops steps, but whoever waits for a grammar that cannot be is told.
        self._send(self._core.settle_grammars().items())
        self._core.check_idle()
        self._send(self._core.take_changed_stats().items())
        self._send(self._control.poll())
        self._wait_for_input(None)
        self._process_pending_input()

    def _process_pending_input(self) -> None:
        while not self._input_queue.empty():
            self._accept(self._input_queue.get_nowait())

    def _wait_for_input(self, timeout: float | None) -> None:
        self._is_idle = timeout is None
        try:
            item = self._input_queue.get(timeout=timeout)
        except queue.Empty:
            return
        finally:
            self._is_idle = False
        self._accept(item)

    def _accept(self, item: _InputItem) -> None:
        """Apply one item of the input queue to the scheduler."""
        is_running = self._state is ProcState.RUNNING
        match item:
            case Request() if not is_running:
                output = EngineCoreOutput(item.req_id, [], finish_reason=FinishReason.ABORT)
                self._output_queue.put((item.client_index, EngineCoreOutputs(outputs=[output])))
            case Request():
                try:
                    self._core.add_request(item)
                except ValueError as error:
                    # An answer would reach the request that has the id, so the second one is only logged.
                    log.error("request dropped: %s", error)
            case ControlCall() if not is_running:
                self._send([refuse(item, "the engine core is shutting down")])
            case ControlCall():
                self._send(self._control.call(item))
            case _Wake.THREAD_DIED:
                raise RuntimeError("an IO thread of the engine core ended; its traceback is above")
            case _Wake.WAKEUP:
                return
            case _:
                self._core.abort_requests(item)

    def _send(self, messages: Iterable[tuple[int, EngineCoreOutputs]]) -> None:
        for item in messages:
            self._output_queue.put(item)

    def run_input_thread(self) -> None:
        """Receive, decode and prepare requests until the context ends."""
        dealers = [
            sockets.connect_dealer(self._context, address, engine_index=self._engine_index)
            for address in self._init.input_addresses
        ]
        try:
            for dealer in dealers:
                # A ROUTER cannot address a peer that has not spoken.
                dealer.send(msgspec.msgpack.encode(self.ready))
            self._receive_forever(dealers)
        except sockets.SocketError:
            if not self._is_stopping.is_set():
                raise
        finally:
            for dealer in dealers:
                dealer.close()
            self._input_queue.put(_Wake.WAKEUP if self._is_stopping.is_set() else _Wake.THREAD_DIED)

    def _receive_forever(self, dealers: Sequence[sockets.Socket]) -> None:
        receive_add = MsgpackDecoder(EngineCoreRequest)
        receive_abort = MsgpackDecoder(list[str])
        receive_call = MsgpackDecoder(ControlCall)

        def receive(request_type: bytes, frames: Sequence[bytes]) -> None:
            match request_type:
                case RequestType.ADD.value:
                    self._prepare(receive_add.decode(frames))
                case RequestType.ABORT.value:
                    self._queue_abort(receive_abort.decode(frames))
                case RequestType.CONTROL.value:
                    call = receive_call.decode(frames)
                    self._check_client(call.client_index)
                    self._input_queue.put(call)
                case _:
                    raise WireError(f"unknown request type {request_type[:8]!r}")

        while True:
            for dealer in sockets.poll(dealers, None):
                request_type, *frames = dealer.recv_multipart()
                try:
                    receive(request_type, frames)
                except WireError as error:
                    self._wire_errors.report(error)

    def _prepare(self, message: EngineCoreRequest) -> None:
        """Build the request here, so that hashing long prompts does not hold up a step; a failure is its alone."""
        self._check_client(message.client_index)
        try:
            request = self._core.prepare_request(message)
        except ValueError as error:
            output = EngineCoreOutput(
                message.request_id, [], finish_reason=FinishReason.ERROR, error=f"invalid_request: {error}"
            )
            self._output_queue.put((message.client_index, EngineCoreOutputs(outputs=[output])))
            return
        self._input_queue.put(request)

    def _queue_abort(self, req_ids: list[str]) -> None:
        """Queue an abort twice: to take effect before a running step is folded in, and in order with its ADD."""
        self._core.aborts.put(req_ids)
        self._input_queue.put(req_ids)

    def _check_client(self, client_index: int) -> None:
        if not 0 <= client_index < len(self._init.output_addresses):
            raise WireError(f"client index {client_index} is not connected")

    def run_output_thread(self) -> None:
        """Encode and send outputs; while there are none, a heartbeat tells that the busy loop moves."""
        pushes = [sockets.connect_push(self._context, address) for address in self._init.output_addresses]
        has_ended = False
        try:
            end = self._send_until_end(MsgpackEncoder(), pushes)
            for push in pushes if end is _End.DEAD else ():
                push.send(ENGINE_CORE_DEAD)
            has_ended = True
        finally:
            for push in pushes:
                push.close()
            if not has_ended:
                self._input_queue.put(_Wake.THREAD_DIED)

    def _send_until_end(self, encoder: MsgpackEncoder, pushes: Sequence[sockets.Socket]) -> _End:
        while True:
            try:
                item = self._output_queue.get(timeout=self._heartbeat_seconds)
            except queue.Empty:
                self._beat(encoder, pushes)
                continue
            if isinstance(item, _End):
                return item
            client_index, outputs = item
            outputs.engine_index = self._engine_index
            pushes[client_index].send_multipart(encoder.encode(outputs))

    def _beat(self, encoder: MsgpackEncoder, pushes: Sequence[sockets.Socket]) -> None:
        """Send a heartbeat to every client if the busy loop turned since the last one, or waits for input."""
        turns = self._num_turns
        if turns == self._turns_at_beat and not self._is_idle:
            return
        self._turns_at_beat = turns
        for push in pushes:
            push.send_multipart(encoder.encode(EngineCoreOutputs(engine_index=self._engine_index, outputs=[])))
