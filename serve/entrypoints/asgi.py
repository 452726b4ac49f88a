"""The ASGI types and the reading side of a request: body, JSON, and watching for a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Final, TypeVar, cast

import msgspec

from serve.entrypoints.http_errors import ClientGone, HttpError
from serve.errors import InvalidRequest

Scope = MutableMapping[str, object]
Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
JsonObject = dict[str, object]

MAX_JSON_DEPTH: Final = 200  # where no flag says otherwise
# A body that makes the server build millions of small objects would hold up all other requests. What opens objects,
# arrays and strings is counted before anything is built, so inside strings too; no context holds a prompt with as many.
MAX_JSON_BRACKETS: Final = 1 << 18
MAX_JSON_QUOTES: Final = 1 << 20
MAX_FIELDS: Final = 1024
BODY_SECONDS: Final = 60.0

_T = TypeVar("_T")


def headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Give the request headers, names in lower case."""
    return cast(list[tuple[bytes, bytes]], scope["headers"])


def header(scope: Scope, name: bytes) -> bytes | None:
    """Give the first value of a request header, or None; name in lower case."""
    for key, value in headers(scope):
        if key == name:
            return value
    return None


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int, max_depth: int = MAX_JSON_DEPTH) -> JsonObject:
    """Read a request body that must be one JSON object.

    Raises HttpError for a body that is too large (413), encoded (415) or late (408), InvalidRequest for one that is
    not JSON, ClientGone when the client left.
    """
    content_type = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        shown = content_type.decode("latin-1")[:80] or "missing"
        raise InvalidRequest(f"the content type is {shown!a}; send application/json")
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise HttpError(415, "Content-Encoding is not supported; send the body as it is")
    return parse_json(await _read_body(scope, receive, max_bytes), max_depth)


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _receive_all(receive, max_bytes)
    except TimeoutError:
        raise HttpError(408, f"the request body did not arrive within {BODY_SECONDS:g} s") from None


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += cast(bytes, message.get("body", b""))
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> HttpError:
    # The rest of the body is unread, so the connection cannot serve another request.
    return HttpError(
        413,
        f"the request body is larger than {max_bytes} bytes; send less or raise --max-body-bytes",
        headers=((b"connection", b"close"),),
    )


def parse_json(body: bytes, max_depth: int = MAX_JSON_DEPTH) -> JsonObject:
    """Decode a JSON object. NaN, Infinity, invalid UTF-8 and deep nesting are InvalidRequest."""
    num_brackets, num_quotes = body.count(b"[") + body.count(b"{"), body.count(b'"')
    if num_brackets > MAX_JSON_BRACKETS:
        raise InvalidRequest(f"the body holds {num_brackets} opening brackets, the limit is {MAX_JSON_BRACKETS}")
    if num_quotes > MAX_JSON_QUOTES:
        raise InvalidRequest(f"the body holds {num_quotes} quotation marks, the limit is {MAX_JSON_QUOTES}")
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(value)} fields, the limit is {MAX_FIELDS}")
    if num_brackets > max_depth and _is_too_deep(value, max_depth):
        raise _too_deep(max_depth)
    return value


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body nests deeper than {max_depth} levels; send a flatter one or raise --max-json-depth"
    )


def _is_too_deep(value: object, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(container: object) -> list[object]:
    if isinstance(container, dict):
        return [child for child in container.values() if isinstance(child, (dict, list))]
    assert isinstance(container, list), "only containers are walked"
    return [child for child in container if isinstance(child, (dict, list))]


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(work: Coroutine[object, object, _T], *enders: Coroutine[object, object, None]) -> _T:
    """Run work; when one of enders returns first, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(ender) for ender in enders]
    try:
        await asyncio.wait((task, *watchers), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, *watchers):
            pending.cancel()
        # The work's own clean-up, an abort in both processes, is part of the request.
        await asyncio.gather(task, *watchers, return_exceptions=True)
