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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_UNMEASURED: Final = OPEN_PATHS | {METRICS_PATH, "/load"}
# Answering these is the server's main work; /load counts them.
_WORK: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/inference/v1/generate",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/invocations",
    }
)
# The routes that the metrics tell apart.
_ROUTES: Final = _WORK | {
    "/v1/models",
    "/tokenizer_info",
    "/docs",
    "/openapi.json",
    "/pause",
    "/resume",
    "/is_paused",
    "/reset_prefix_cache",
}


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
        path = cast(str, scope["path"]).removeprefix(self._root_path)
        exchange = _Exchange(scope, send, is_anthropic=is_anthropic_path(path))
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
        limits = self._state.config.limits
        if len(sent) > limits.max_num_headers or sum(len(k) + len(v) for k, v in sent) > limits.max_header_bytes:
            raise HttpError(
                431,
                f"more than {limits.max_num_headers} headers or {limits.max_header_bytes} bytes of headers; send less "
                "or raise --max-num-headers or --max-header-bytes",
            )
        if self._hosts is not None:
            host = header(scope, b"host")
            if host is not None and host_name(host.decode("latin-1")) not in self._hosts:
                raise HttpError(421, "this server does not answer for that Host; see --allowed-host")
        if self._keys.is_needed and path not in self._open_paths:
            key = header(scope, b"x-api-key") if is_anthropic_path(path) else None
            self._keys.check(header(scope, b"authorization"), key)
        if path.startswith("/v1/") or path in _WORK:
            self._state.serving()

    async def _fail(self, exchange: _Exchange, error: Exception) -> None:
        """Answer with the error; a stream that has begun gets it as its last event and no [DONE]."""
        reply = error_reply(error, exchange.request_id)
        if exchange.is_stream:
            event = exchange.error_event(reply)
            await exchange.send({"type": "http.response.body", "body": event, "more_body": False})
        elif exchange.status:
            # The status line is gone; a cut connection tells the client that the answer is not whole.
            log.error("answer cut: request_id=%s", exchange.request_id, exc_info=error)
        else:
            is_new = isinstance(error, EngineDead) and not exchange.was_admitted
            await exchange.send_error(unavailable(error) if is_new else reply)


class _Exchange:
    """One request and its answer: adds the request id header, remembers the status, and knows the shape of errors.

    error_event words the error that ends a stream; who answers with a stream of another API sets it.
    """

    def __init__(self, scope: Scope, send: Send, *, is_anthropic: bool) -> None:
        self.method = cast(str, scope["method"])
        self.request_id = request_id_of(scope)
        self.status = 0
        self.is_stream = False
        self.was_admitted = False
        self.started = time.monotonic()
        self.error_event: Callable[[ErrorReply], bytes] = ErrorReply.event
        if is_anthropic:
            self.error_event = partial(ErrorReply.anthropic_event, request_id=self.request_id)
        self._is_anthropic = is_anthropic
        self._send = send
        scope["serve.exchange"] = self

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = cast(int, message["status"])
            answer = cast(list[tuple[bytes, bytes]], message["headers"])
            self.is_stream = (b"content-type", EVENT_STREAM) in answer
            answer.append((b"x-request-id", self.request_id.encode()))
            if self._is_anthropic:
                answer.append((b"request-id", self.request_id.encode()))
        await self._send(message)

    def error_body(self, reply: ErrorReply) -> bytes:
        """Give the body of an error in the shape that the clients of this path read."""
        return reply.anthropic_body(self.request_id) if self._is_anthropic else reply.body()

    async def send_error(self, reply: ErrorReply) -> None:
        """Answer with an error body."""
        body = self.error_body(reply)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *reply.headers]
        await self.send({"type": "http.response.start", "status": reply.status, "headers": head})
        await self.send({"type": "http.response.body", "body": body})


def exchange_of(scope: Scope) -> _Exchange:
    """Give the exchange that the gate attached to a request."""
    return cast(_Exchange, scope["serve.exchange"])


def is_anthropic_path(path: str) -> bool:
    """Tell whether a path belongs to the Messages API, whose clients read errors in their own shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class KeyCheck:
    """Compares keys: always all of them, by digest, in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def is_needed(self) -> bool:
        """True when the server has keys."""
        return bool(self._digests)

    def check(self, authorization: bytes | None, bare_key: bytes | None = None) -> None:
        """Raise HttpError 401 unless the Authorization header, or a header with only the key, has one of the keys."""
        scheme, _, key = (authorization or b"").partition(b" ")
        is_known = self._is_known(key) and scheme.lower() == b"bearer"
        if not is_known and (bare_key is None or not self._is_known(bare_key)):
            raise HttpError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    def _is_known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


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
    for prefix in ("/v1/models/", "/v1/responses/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    return "other"


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
