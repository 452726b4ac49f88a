"""Binds the HTTP address first of all, so that a port in use is known before anything slow begins."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Final

from serve.config import ServerConfig
from serve.errors import ConfigError, ExitCode

BACKLOG: Final = 2048


def bind_listener(server: ServerConfig) -> socket.socket:
    """Bind the HTTP address before anything slow happens. Raises ConfigError when it cannot be had."""
    if server.uds is not None:
        return _bind_unix(server.uds)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(server, error) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(server, error) from error
    listener.setblocking(False)
    return listener


def _cannot_listen(server: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {server.host}:{server.port}: {error.strerror}; choose another --port or --host",
        ExitCode.RESOURCES,
    )


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror}", ExitCode.RESOURCES) from error
    listener.setblocking(False)
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def close_listener(listener: socket.socket, server: ServerConfig) -> None:
    """Close the listening socket and remove the file of a unix one."""
    listener.close()
    if server.uds is not None:
        Path(server.uds).unlink(missing_ok=True)
