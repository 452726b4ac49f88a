"""The first code that sees a request: host, key and size rules, request id, counters, and the answer to errors.

One plain ASGI layer, so a streamed chunk passes through a single extra call.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, cast

from serve.config import ServerConfig
from serve.entrypoints.app_state import AppState, HttpStats, request_id_of
from serve.entrypoints.asgi import AsgiApp, Message, Receive, Scope, Send, header, headers
from serve.entrypoints.http_errors import ClientGone, ErrorReply, HttpError, error_reply, unavailable
from serve.errors import EngineDead

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/live", "/health", "/ready", "/ping", "/version"})
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
METRICS_PATH: Final = "/metrics"
MAX_HEADERS: Final = 256
MAX_HEADER_BYTES: Final = 64 << 10
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_UNMEASURED: Final = OPEN_PATHS | {METRICS_PATH, "/load"}
_ROUTES: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/docs",
        "/openapi.json",
        "/pause",
        "/resume",
        "/is_paused",
        "/reset_prefix_cache",
    }
)
# Answering these is the server's main work; /load counts them.
_WORK: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})


class HttpGate:
    """Wraps the application; every request enters and every answer leaves through it."""

    def __init__(self, app: AsgiApp, *, state: AppState) -> None:
        self._app = app
        self._state = state
        server = state.config.server
        self._root_path = server.root_path.rstrip("/")
        self._keys = KeyCheck(server.api_key)
        self._open_paths = OPEN_PATHS if server.metrics_need_key else OPEN_PATHS | {METRICS_PATH}
        self._hosts = allowed_hosts(server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        exchange = _Exchange(scope, send)
        path = cast(str, scope["path"]).removeprefix(self._root_path)
        is_work = path in _WORK
        self._state.num_open_requests += is_work
        try:
            self._check(scope, path)
            exchange.was_admitted = True
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            exchange.status = 499
        except Exception as error:  # the HTTP error handler: every failure gets the one error shape
            await self._fail(exchange, error)
        finally:
            self._state.num_open_requests -= is_work
            if path not in _UNMEASURED:
                _measure(self._state.http, _route(path), exchange)

    def _check(self, scope: Scope, path: str) -> None:
        sent = headers(scope)
        if len(sent) > MAX_HEADERS or sum(len(k) + len(v) for k, v in sent) > MAX_HEADER_BYTES:
            raise HttpError(431, f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of headers")
        if self._hosts is not None:
            host = header(scope, b"host")
            if host is not None and host_name(host.decode("latin-1")) not in self._hosts:
                raise HttpError(421, "this server does not answer for that Host; see --allowed-host")
        if self._keys.is_needed and path not in self._open_paths:
            self._keys.check(header(scope, b"authorization"))
        if path.startswith("/v1/") or path in _WORK:
            self._state.serving()

    async def _fail(self, exchange: _Exchange, error: Exception) -> None:
        """Answer with the error; a stream that has begun gets it as its last event and no [DONE]."""
        reply = error_reply(error, exchange.request_id)
        if exchange.is_stream:
            event = b"data: " + reply.body() + b"\n\n"
            await exchange.send({"type": "http.response.body", "body": event, "more_body": False})
        elif exchange.status:
            # The status line is gone; a cut connection tells the client that the answer is not whole.
            log.error("answer cut: request_id=%s", exchange.request_id, exc_info=error)
        else:
            is_new = isinstance(error, EngineDead) and not exchange.was_admitted
            await send_error(exchange.send, unavailable(error) if is_new else reply)


class _Exchange:
    """One request and its answer: adds the request id header and remembers the status."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.method = cast(str, scope["method"])
        self.request_id = request_id_of(scope)
        self.status = 0
        self.is_stream = False
        self.was_admitted = False
        self.started = time.monotonic()
        self._send = send
        scope["serve.exchange"] = self

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = cast(int, message["status"])
            answer = cast(list[tuple[bytes, bytes]], message["headers"])
            self.is_stream = (b"content-type", EVENT_STREAM) in answer
            answer.append((b"x-request-id", self.request_id.encode()))
        await self._send(message)


def exchange_of(scope: Scope) -> _Exchange:
    """Give the exchange that the gate attached to a request."""
    return cast(_Exchange, scope["serve.exchange"])


async def send_error(send: Send, reply: ErrorReply) -> None:
    """Answer with an error body."""
    body = reply.body()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


class KeyCheck:
    """Compares bearer keys: always all of them, by digest, in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def is_needed(self) -> bool:
        """True when the server has keys."""
        return bool(self._digests)

    def check(self, authorization: bytes | None) -> None:
        """Raise HttpError 401 unless the Authorization header carries one of the keys."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise HttpError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def allowed_hosts(server: ServerConfig) -> frozenset[str] | None:
    """Give the Host values to answer, or None when the server is not bound to loopback."""
    if server.uds is not None or not is_loopback(server.host):
        return None
    return frozenset((*LOOPBACK_HOSTS, server.host.lower(), *(name.lower() for name in server.allowed_host)))


def is_loopback(host: str) -> bool:
    """Tell whether a bind address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """Give the name of a Host header without its port."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]


def _route(path: str) -> str:
    """Give a label from a closed set, whatever path a client made up."""
    if path in _ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def _measure(stats: HttpStats, route: str, exchange: _Exchange) -> None:
    method = exchange.method if exchange.method in _METHODS else "other"
    key = (route, method, str(exchange.status or 500))
    stats.requests[key] = stats.requests.get(key, 0) + 1
    seconds = time.monotonic() - exchange.started
    counts = stats.durations.setdefault(route, new_histogram(DURATION_BUCKETS))
    counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
    stats.duration_sums[route] = stats.duration_sums.get(route, 0.0) + seconds


def new_histogram(buckets: Sequence[float]) -> list[int]:
    """Give zero counts for each bucket and for what lies beyond the last."""
    return [0] * (len(buckets) + 1)
