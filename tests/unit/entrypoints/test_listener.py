"""Binding the HTTP address: ports, unix sockets, and what stands in the way."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from serve.config import ServerConfig
from serve.entrypoints.listener import bind_listener, close_listener
from serve.errors import ConfigError, ExitCode


def test_port_in_use_names_the_address_and_the_way_out() -> None:
    first = bind_listener(ServerConfig(port=0))
    taken = ServerConfig(port=first.getsockname()[1])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{taken.port}.*in use.*--port") as caught:
        bind_listener(taken)
    assert caught.value.exit_code is ExitCode.RESOURCES
    close_listener(first, taken)
    close_listener(bind_listener(taken), taken)


def test_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid") as caught:
        bind_listener(ServerConfig(host="no.such.host.invalid", port=0))
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_unix_socket_replaces_a_dead_one_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    config = ServerConfig(uds=str(path))
    listener = bind_listener(config)
    assert stat.S_ISSOCK(path.stat().st_mode)
    with pytest.raises(ConfigError, match="in use"):
        bind_listener(config)
    close_listener(listener, config)
    assert not path.exists()


def test_file_in_the_place_of_a_unix_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"):
        bind_listener(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"
