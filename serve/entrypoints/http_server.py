"""uvicorn on our own socket, with our own signals and our own words for bytes that are no HTTP request."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.config import ServerConfig
from serve.entrypoints.asgi import AsgiApp
from serve.entrypoints.http_errors import ErrorReply
from serve.errors import ConfigError


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 over one connection."""

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed with the one error shape, and close."""
        body = ErrorReply(400, "this is not a valid HTTP/1.1 request").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
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
