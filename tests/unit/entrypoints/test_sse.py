"""Server-sent events: framing, silence, clients that do not read, and several tokens in one hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from serve.entrypoints import sse
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.http_errors import ClientGone
from serve.entrypoints.sse import ChunkWriter, EventStream
from tests.waiting import async_wait_until


class Wire:
    """Both ends of one connection; while closed_gate is set, writes wait."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.leave = asyncio.Event()

    async def receive(self) -> dict:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.gate.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


async def blocks(*items: bytes | asyncio.Event) -> AsyncGenerator[bytes, None]:
    for item in items:
        if isinstance(item, asyncio.Event):
            await item.wait()
        else:
            yield item


def test_writer_gives_one_data_line_per_event_with_shared_fields() -> None:
    writer = ChunkWriter("id-1", "kind", 7, model='m"x')
    event = writer.chunk({"index": 0, "text": "a\nb"}, {"total_tokens": 1})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert msgspec.json.decode(event[6:]) == {
        "id": "id-1",
        "object": "kind",
        "created": 7,
        "model": 'm"x',
        "choices": [{"index": 0, "text": "a\nb"}],
        "usage": {"total_tokens": 1},
    }
    last = msgspec.json.decode(writer.usage_chunk({"total_tokens": 2}, {"extra": 1})[6:])
    assert (last["choices"], last["usage"], last["extra"]) == ([], {"total_tokens": 2}, 1)


def test_done_follows_success() -> None:
    async def work() -> None:
        wire = Wire()
        await EventStream(b"first", blocks(b"second"))({}, wire.receive, wire.send)
        assert wire.body == b"firstsecond" + sse.DONE
        assert [m.get("more_body") for m in wire.sent[1:]] == [True, True, False]

    asyncio.run(work())


def test_silence_is_filled_with_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(sse, "MIN_SLEEP_SECONDS", 0.01)

    async def work() -> None:
        wire, go = Wire(), asyncio.Event()
        task = asyncio.ensure_future(EventStream(b"a", blocks(go, b"b"))({}, wire.receive, wire.send))
        await async_wait_until(lambda: wire.body.count(sse.HEARTBEAT) >= 2, 5, "two heartbeats")
        go.set()
        await asyncio.wait_for(task, 5)
        assert wire.body.replace(sse.HEARTBEAT, b"") == b"ab" + sse.DONE

    asyncio.run(work())


def test_client_that_reads_nothing_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(sse, "MIN_SLEEP_SECONDS", 0.01)
    monkeypatch.setattr(sse, "WRITE_STALL_SECONDS", 0.05)

    async def work() -> None:
        wire = Wire()
        is_closed = asyncio.Event()

        async def endless() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    wire.gate.clear()
                    yield b"x"
            finally:
                is_closed.set()

        with pytest.raises(ClientGone):
            await asyncio.wait_for(EventStream(b"a", endless())({}, wire.receive, wire.send), 5)
        assert is_closed.is_set()

    asyncio.run(work())


def test_leaving_client_closes_the_generator() -> None:
    async def work() -> None:
        wire, is_closed = Wire(), asyncio.Event()

        async def waiting() -> AsyncGenerator[bytes, None]:
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                is_closed.set()

        task = asyncio.ensure_future(EventStream(b"a", waiting())({}, wire.receive, wire.send))
        await async_wait_until(lambda: wire.body == b"a", 5, "the first block")
        wire.leave.set()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(task, 5)
        assert is_closed.is_set()

    asyncio.run(work())


def test_error_of_the_work_is_raised_as_it_is() -> None:
    async def work() -> None:
        async def fails() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            await run_while_connected(fails(), wait_for_disconnect(Wire().receive))

    asyncio.run(work())
