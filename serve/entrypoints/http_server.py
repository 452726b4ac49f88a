"""uvicorn on our own socket, with our own signals and our own words for bytes that are no HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.config import ServerConfig
from serve.entrypoints.asgi import AsgiApp
from serve.entrypoints.http_errors import ErrorReply
from serve.errors import ConfigError
from serve.limits import HIGHEST_HEADER_BYTES, HIGHEST_NUM_HEADERS

# The gate refuses smaller floods once the whole head is there; a head without end must not be gathered for ever.
MAX_OPEN_HEAD_BYTES: Final = HIGHEST_HEADER_BYTES
MAX_OPEN_HEADERS: Final = HIGHEST_NUM_HEADERS
HEAD_SECONDS: Final = 60.0


class _TooManyHeaders(Exception):
    """Stops the parser in the middle of a head, or of the trailers that may follow a body."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 over one connection, with an end to the size of a request's head and to the wait for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._began_now = self._is_flooded = False
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the wait."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that is too large so far is refused."""
        self._began_now = False
        super().data_received(data)
        # The bytes that a head begins with may follow a body, so they are not counted.
        if self._head_timer is not None and not self._began_now:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_OPEN_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the head of the request is larger than {MAX_OPEN_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Start to count and to wait: a request's first bytes are here."""
        super().on_message_begin()
        self._began_now = True
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, up to a number of them."""
        super().on_header(name, value)
        if len(self.headers) > MAX_OPEN_HEADERS:
            self._is_flooded = True
            raise _TooManyHeaders

    def on_headers_complete(self) -> None:
        """Stop the wait: the request is known."""
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed with the one error shape, and close."""
        if self._is_flooded:
            self._refuse(431, f"more than {MAX_OPEN_HEADERS} headers")
        else:
            self._refuse(400, "this is not a valid HTTP/1.1 request")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._is_answering:  # the answer before it may take its time
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)
            return
        self._refuse(408, f"the request did not begin or its head did not arrive within {HEAD_SECONDS:g} s")

    def _refuse(self, status: int, message: str) -> None:
        body = ErrorReply(status, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self._is_answering:  # in the middle of an answer it would read as a part of that
            self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: run_server.py decides what signals mean."""
        yield


def new_http_server(app: AsgiApp, server: ServerConfig) -> HttpServer:
    """Configure uvicorn for an application."""
    return HttpServer(
        uvicorn.Config(
            app,
            loop="none",
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=not server.disable_uvicorn_access_log,
            proxy_headers=False,
            server_header=False,
            root_path=server.root_path,
            timeout_keep_alive=server.timeout_keep_alive,
            ssl_keyfile=server.ssl_keyfile,
            ssl_certfile=server.ssl_certfile,
            ssl_ca_certs=server.ssl_ca_certs,
            ssl_cert_reqs=server.ssl_cert_reqs,
        )
    )


def check_tls_files(server: ServerConfig) -> None:
    """Raise ConfigError when the certificate and key cannot be used together."""
    if server.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one, too
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and --ssl-keyfile {server.ssl_keyfile} cannot be used: "
            f"{error.strerror or error}"
        ) from error


def set_up_http_logging(server: ServerConfig) -> None:
    """Give uvicorn's loggers their level."""
    level = server.uvicorn_log_level
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if level == "trace" else level.upper())
    if level == "info":
        # Its start and stop lines say what ours say.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = server.disable_uvicorn_access_log
