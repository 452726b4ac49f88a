"""Calls an ASGI application from inside its own process, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

from serve.entrypoints.asgi import AsgiApp, Message, Scope


@dataclass(slots=True)
class Answer:
    """A whole answer; header names are in lower case."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class AsgiCaller:
    """Posts JSON bodies to an application. headers go with every request."""

    def __init__(self, app: AsgiApp, *, root_path: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._app = app
        self._root_path = root_path
        self._headers = headers

    async def post(self, path: str, body: bytes) -> Answer:
        """Give the answer to one POST; cancelling the call tells the application that its client left."""
        answer = Answer()
        unread = [body]
        gone = asyncio.Event()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = cast(int, message["status"])
                answer.headers = dict(cast(list[tuple[bytes, bytes]], message["headers"]))
            else:
                answer.body += cast(bytes, message.get("body", b""))

        try:
            await self._app(self._scope(path, len(body)), receive, send)
        finally:
            gone.set()
        return answer

    def _scope(self, path: str, num_bytes: int) -> Scope:
        full_path = self._root_path + path
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": full_path,
            "raw_path": full_path.encode(),
            "query_string": b"",
            "root_path": self._root_path,
            "scheme": "http",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(num_bytes).encode()),
                *self._headers,
            ],
            "client": None,
            "server": ("localhost", None),
        }
