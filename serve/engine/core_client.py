"""Phases 3 and 10 of 11: requests leave for the engine core, its outputs come back; ZeroMQ inside one event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Final

from serve.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder, WireError, WireErrors
from serve.wire.frontend import (
    ENGINE_CORE_DEAD,
    Control,
    ControlCall,
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    RequestType,
)
from serve.wire.sockets import (
    PullReader,
    SocketError,
    bind_router_async,
    engine_identity,
    ipc_endpoint,
    new_async_context,
)

SEND_TIMEOUT: Final = 1.0  # seconds a request may wait for room in the queue to the engine
READY_TIMEOUT: Final = 600.0


class CoreClient:
    """The API server's end of the two sockets to one engine core.

    Binds at once, so that the addresses can be given to the engine before it starts. All methods except notify_dead
    belong to the event loop's thread.
    """

    def __init__(self, endpoint_dir: Path, *, client_index: int = 0, engine_index: int = 0) -> None:
        self.client_index = client_index
        self.input_address = ipc_endpoint(endpoint_dir, f"input{client_index}")
        self.output_address = ipc_endpoint(endpoint_dir, f"output{client_index}")
        self.last_message_at = time.monotonic()
        self.wire_errors = WireErrors("the engine core")
        self._identity = engine_identity(engine_index)
        self._context = new_async_context()
        self._input = bind_router_async(self._context, self.input_address)
        self._output = PullReader(self._context, self.output_address)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = itertools.count(1)
        self._ready: Ready | None = None
        self._ready_lock = asyncio.Lock()
        self._dead = asyncio.Event()
        self._dead_reason: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent_aborts: list[str] = []
        self._receiving: asyncio.Future[None] | None = None

    @property
    def is_dead(self) -> bool:
        """True once the engine core is known to be gone."""
        return self._dead_reason is not None

    def dead_error(self) -> EngineDead:
        """Give the error that requests get after the engine's death."""
        return EngineDead(f"engine_dead: {self._dead_reason or 'the engine core stopped'}; the server is going down")

    def notify_dead(self, reason: str) -> None:
        """Tell the client that the engine process is gone. Any thread may call; the first reason stays."""
        if self._dead_reason is None:
            self._dead_reason = reason
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_dead)

    async def wait_ready(self, timeout: float = READY_TIMEOUT) -> Ready:
        """Give the engine's first message; requests can be routed from then on. Raises EngineDead."""
        async with self._ready_lock:
            if self._ready is None:
                self._ready = await self._receive_ready(timeout)
        return self._ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send one request.

        Raises InvalidRequest for content that has no encoding, Overloaded (engine_busy) when the queue to the engine
        stays full for SEND_TIMEOUT, EngineDead.
        """
        try:
            frames = self._encoder.encode(request)
        except (UnicodeEncodeError, OverflowError) as error:
            raise InvalidRequest(f"the request holds a value that cannot be encoded: {error}") from error
        await self._send(RequestType.ADD, frames)

    async def abort(self, request_ids: list[str]) -> None:
        """Tell the engine to drop requests; a full queue delays that to the next call. A dead engine is not told."""
        if not request_ids or self.is_dead:
            return
        request_ids, self._unsent_aborts = self._unsent_aborts + request_ids, []
        try:
            await self._send(RequestType.ABORT, self._encoder.encode(request_ids))
        except Overloaded:
            self._unsent_aborts.extend(request_ids)
        except EngineDead:
            return

    async def control(self, control: Control) -> bool:
        """Make a control call on the engine's loop and give its answer. Raises RequestFailed when it failed there."""
        call_id = next(self._call_ids)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            call = ControlCall(self.client_index, call_id, control)
            await self._send(RequestType.CONTROL, self._encoder.encode(call))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the engine's next message. Raises EngineDead; undecodable messages are counted and dropped."""
        self._loop = asyncio.get_running_loop()
        while True:
            frames = await self._receive()
            if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
                self.notify_dead("the engine core hit an error it could not survive, see its log")
                self._on_dead()
                raise self.dead_error()
            try:
                outputs = self._decoder.decode(frames)
            except WireError as error:
                self.wire_errors.report(error)
                continue
            self.last_message_at = time.monotonic()
            if outputs.control_result is not None:
                self._finish_call(outputs)
            return outputs

    def close(self) -> None:
        """Close both sockets; messages that were not sent yet are dropped."""
        self.notify_dead("the server is shutting down")
        self._input.close()
        self._output.close()
        self._context.term()

    async def _receive(self) -> list[bytes]:
        """Give the next message; what a dead engine had sent before it died comes first, then EngineDead."""
        while (frames := self._output.receive_nowait()) is None:
            if self.is_dead:
                self._on_dead()
                raise self.dead_error()
            self._receiving = self._output.readable()
            try:
                await self._receiving
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self.is_dead or (task and task.cancelling()):
                    raise
            finally:
                self._receiving = None
        return frames

    async def _receive_ready(self, timeout: float) -> Ready:
        self._loop = asyncio.get_running_loop()
        receiving = asyncio.ensure_future(self._input.recv_multipart())
        dying = asyncio.ensure_future(self._dead.wait())
        if self.is_dead:
            self._dead.set()
        try:
            await asyncio.wait({receiving, dying}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return MsgpackDecoder(Ready).decode(receiving.result()[1:])
        except WireError as error:
            self.notify_dead(f"the engine core's first message is broken: {error}")
        finally:
            receiving.cancel()
            dying.cancel()
        if not self.is_dead:
            self.notify_dead(f"the engine core did not report ready within {timeout:.0f} s")
        raise self.dead_error()

    async def _send(self, kind: RequestType, frames: list[bytes | memoryview]) -> None:
        if self.is_dead:
            raise self.dead_error()
        if self._ready is None:
            await self.wait_ready()
        try:
            sending = asyncio.ensure_future(self._input.send_multipart([self._identity, kind.value, *frames]))
            # Nearly always done at once; a timer only where it is needed.
            await (sending if sending.done() else asyncio.wait_for(sending, SEND_TIMEOUT))
        except TimeoutError:
            raise Overloaded(
                f"engine_busy: the engine core took no message for {SEND_TIMEOUT:g} s; try again later",
                code="engine_busy",
            ) from None
        except SocketError as error:
            self.notify_dead(f"the engine core is not connected ({error.strerror})")
            raise self.dead_error() from error

    def _finish_call(self, outputs: EngineCoreOutputs) -> None:
        result = outputs.control_result
        answer = self._calls.get(result.call_id) if result is not None else None
        if result is None or answer is None or answer.done():
            return
        if result.failure_message is not None:
            answer.set_exception(RequestFailed(result.failure_message, cause="control_failed"))
        else:
            answer.set_result(bool(result.result))

    def _on_dead(self) -> None:
        self._dead.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self.dead_error())
        if self._receiving is not None:
            self._receiving.cancel()
