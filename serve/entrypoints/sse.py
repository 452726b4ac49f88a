"""Phase 11 of 11, last step: server-sent events, with a heartbeat in silence and [DONE] after success only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
from fastapi.responses import Response

from serve.entrypoints.asgi import Receive, Scope, Send, run_while_connected, wait_for_disconnect
from serve.entrypoints.gate import EVENT_STREAM, exchange_of
from serve.entrypoints.http_errors import ErrorReply

DONE: Final = b"data: [DONE]\n\n"
HEARTBEAT: Final = b": ping\n\n"
HEARTBEAT_SECONDS: Final = 15.0
MIN_SLEEP_SECONDS: Final = 1.0
WRITE_STALL_SECONDS: Final = 60.0
_HEADERS: Final = (
    (b"content-type", EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the chunks of one stream: what all of them share is encoded once."""

    def __init__(self, response_id: str, kind: str, created: int, *, model: str) -> None:
        head = _encode({"id": response_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['

    def chunk(self, choice: object, usage: object = None) -> bytes:
        """Give the event of one choice; usage is left out when None."""
        if usage is None:
            return self._head + _encode(choice) + b"]}\n\n"
        return self._head + _encode(choice) + b'],"usage":' + _encode(usage) + b"}\n\n"

    def chunk_with(self, choice: object, extra: dict[str, object], usage: object = None) -> bytes:
        """Give the event of one choice with more fields beside it."""
        fields = extra if usage is None else {**extra, "usage": usage}
        return self._head + _encode(choice) + b"]," + _encode(fields)[1:] + b"\n\n"

    def usage_chunk(self, usage: object, extra: dict[str, object]) -> bytes:
        """Give the event with no choice that reports the totals."""
        return self._head + b"]," + _encode({**extra, "usage": usage})[1:] + b"\n\n"


class EventStream(Response):
    """An answer that sends blocks of events as they come.

    Made by start_stream once the first block exists, so whatever goes wrong earlier is an ordinary HTTP error; an
    error after that is turned into an error event by the gate. A client that leaves, or that reads nothing for
    WRITE_STALL_SECONDS, ends the blocks' generator.
    """

    def __init__(
        self,
        first: bytes,
        blocks: AsyncGenerator[bytes, None],
        *,
        done: bytes = DONE,
        error_event: Callable[[ErrorReply], bytes] | None = None,
    ) -> None:
        """Start with the first block; done follows the last, error_event words what ends the stream before that."""
        super().__init__()
        self._first = first
        self._blocks = blocks
        self._done = done
        self._error_event = error_event
        self._is_writing = False
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        self._last_write = asyncio.get_running_loop().time()
        if self._error_event is not None:
            exchange_of(scope).error_event = self._error_event
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await run_while_connected(self._write_all(send), wait_for_disconnect(receive), self._keep_alive(send))

    async def _write_all(self, send: Send) -> None:
        async with aclosing(self._blocks) as blocks:
            await self._write(send, self._first)
            async for block in blocks:
                await self._write(send, block)
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _write(self, send: Send, block: bytes) -> None:
        self._is_writing = True
        await send({"type": "http.response.body", "body": block, "more_body": True})
        self._is_writing = False
        self._last_write = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment in silence; return when the client has not read for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(MIN_SLEEP_SECONDS, self._last_write + HEARTBEAT_SECONDS - loop.time()))
            silence = loop.time() - self._last_write
            if self._is_writing:
                if silence > WRITE_STALL_SECONDS:
                    return
            elif silence >= HEARTBEAT_SECONDS:
                await self._write(send, HEARTBEAT)


async def start_stream(
    blocks: AsyncGenerator[bytes, None],
    receive: Receive,
    *,
    done: bytes = DONE,
    error_event: Callable[[ErrorReply], bytes] | None = None,
) -> EventStream:
    """Wait for the first block while the client stays, and give the answer that sends it and the rest.

    done is sent after the last block. error_event gives the last event of a stream that fails; None means the usual.
    """
    first = await run_while_connected(_first(blocks), wait_for_disconnect(receive))
    return EventStream(first, blocks, done=done, error_event=error_event)


async def _first(blocks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(blocks)
