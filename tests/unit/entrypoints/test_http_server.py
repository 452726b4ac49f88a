"""The HTTP server on a real port: bytes that are no request, and connections kept and closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from serve.config import ServerConfig
from serve.entrypoints import http_server
from serve.entrypoints.api_server import build_app
from serve.entrypoints.http_server import check_tls_files, new_http_server
from serve.entrypoints.listener import bind_listener, close_listener
from serve.errors import ConfigError
from tests.unit.entrypoints.app_client import make_app
from tests.waiting import async_wait_until


def with_server(work: Callable[[int], Awaitable[None]]) -> None:
    """Run work(port) against a served application."""

    async def run() -> None:
        config = ServerConfig(port=0)
        listener = bind_listener(config)
        port = listener.getsockname()[1]
        server = new_http_server(build_app(make_app().state), config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await async_wait_until(lambda: server.started, 5, "the server has started")
            await asyncio.wait_for(work(port), 10)
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)
            close_listener(listener, config)

    asyncio.run(run())


async def exchange(port: int, *sent: bytes) -> bytes:
    """Send bytes and give what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in sent:
        writer.write(piece)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_bytes_that_are_no_request_get_the_error_shape_and_the_connection_closes() -> None:
    async def work(port: int) -> None:
        for junk in (b"\x16\x03\x01 hello\r\n\r\n", b"B?D / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
            head, _, body = (await exchange(port, junk)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["type"] == "BadRequestError"

    with_server(work)


def test_a_head_without_end_is_cut_off_with_431() -> None:
    line = b"x: " + b"y" * 60_000 + b"\r\n"

    async def work(port: int) -> None:
        for flood in ([line] * 10, [b"x: " + b"y" * 600_000], [b"x: y\r\n" * 3000]):
            head, _, body = (await exchange(port, b"GET /version HTTP/1.1\r\n", *flood)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert json.loads(body)["error"]["type"] == "HeaderTooLargeError"

    with_server(work)


def test_a_large_body_before_the_next_head_counts_not_as_head() -> None:
    async def work(port: int) -> None:
        large = (
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\n\r\n" + b" " * 999_998 + b"{}"
        )
        last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        answer = await exchange(port, large + last[:20], last[20:])
        assert b'{"version":' in answer
        assert b"HTTP/1.1 431 " not in answer

    with_server(work)


def test_a_head_that_does_not_arrive_is_408_and_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)

    async def work(port: int) -> None:
        for begin in (b"", b"GET /version HTTP/1.1\r\nhost: localh"):
            head, _, body = (await exchange(port, begin)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["error"]["type"] == "RequestTimeoutError"

    with_server(work)


def test_request_in_pieces_is_answered() -> None:
    async def work(port: int) -> None:
        request = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        answer = await exchange(port, *[request[i : i + 7] for i in range(0, len(request), 7)])
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'{"version":' in answer

    with_server(work)


def test_streamed_answer_over_a_real_connection_ends_with_done() -> None:
    async def work(port: int) -> None:
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = await exchange(port, head.encode(), body)
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in answer
        assert b'"text":"o"' in answer
        assert b"data: [DONE]\n\n" in answer

    with_server(work)


def test_unusable_tls_files_are_named_before_anything_starts(tmp_path: Path) -> None:
    missing = ServerConfig(ssl_certfile=str(tmp_path / "c.pem"), ssl_keyfile=str(tmp_path / "k.pem"))
    with pytest.raises(ConfigError, match=r"c\.pem .*No such file"):
        check_tls_files(missing)
    for name in ("c.pem", "k.pem"):
        (tmp_path / name).write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"c\.pem .* cannot be used"):
        check_tls_files(missing)
    check_tls_files(ServerConfig())
