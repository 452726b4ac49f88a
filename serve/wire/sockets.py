"""ZeroMQ sockets of a run: private endpoints, finite queues, bounded frames. The only file that imports zmq.

Requests go ROUTER (API server, binds) to DEALER (engine core, connects); outputs come PUSH to PULL. An engine's
identity is its index in two little-endian bytes. All sockets live in a directory that only the owner can enter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio

from serve.errors import ConfigError, ExitCode

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
AsyncContext = zmq.asyncio.Context
AsyncSocket = zmq.asyncio.Socket
SocketError = zmq.ZMQError
QueueFull = zmq.Again

REQUEST_QUEUE: Final = 4096  # messages either side may hold before a sender has to wait
OUTPUT_QUEUE: Final = 16384
MAX_REQUEST_FRAME: Final = 64 << 20
# A prompt's logprobs over the whole vocabulary are one array; they come from our own child process.
MAX_OUTPUT_FRAME: Final = 4 << 30
REQUEST_LINGER_MS: Final = 0
OUTPUT_LINGER_MS: Final = 4000  # time for last outputs and the death notice to leave a stopping engine core
HANDSHAKE_LINGER_MS: Final = 5000

_PREFIX: Final = "serve-"
_MAX_IPC_PATH: Final = 100  # sun_path holds 108 bytes on Linux, 104 on macOS


def engine_identity(engine_index: int) -> bytes:
    """Give the ZeroMQ identity of an engine core."""
    return engine_index.to_bytes(2, "little")


def make_endpoint_dir(base: Path) -> Path:
    """Create a fresh directory for this run's sockets, open to the owner only; its name tells the pid.

    Raises ConfigError when the directory cannot be made or its path is too long for a unix socket.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise ConfigError(
            f"no socket directory under {base}: {error.strerror}; set SERVE_IPC_DIR to a writable directory",
            ExitCode.RESOURCES,
        ) from error
    if len(os.fsencode(path)) + 16 > _MAX_IPC_PATH:
        path.rmdir()
        raise ConfigError(f"socket directory {path} has too long a path; set SERVE_IPC_DIR to a shorter one")
    return path


def remove_stale_endpoint_dirs(base: Path) -> int:
    """Remove socket directories of runs whose process is gone; give their number."""
    removed = 0
    for path in base.glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def ipc_endpoint(directory: Path, name: str) -> str:
    """Give the address of a socket file, for example ipc_endpoint(dir, "input0")."""
    return f"ipc://{directory / name}"


def new_context() -> Context:
    """Create a context for blocking sockets; one IO thread."""
    return zmq.Context(io_threads=1)


def new_async_context() -> AsyncContext:
    """Create a context for the sockets of an event loop."""
    return zmq.asyncio.Context(io_threads=1)


def bind_router(context: Context, endpoint: str) -> Socket:
    """Bind a blocking ROUTER (the launcher's side of the handshake)."""
    socket = context.socket(zmq.ROUTER)
    _set_up_router(socket, HANDSHAKE_LINGER_MS)
    socket.bind(endpoint)
    return socket


def bind_router_async(context: AsyncContext, endpoint: str) -> AsyncSocket:
    """Bind the ROUTER of requests. Sending to an engine that is not connected raises SocketError."""
    socket = context.socket(zmq.ROUTER)
    _set_up_router(socket, REQUEST_LINGER_MS)
    socket.bind(endpoint)
    return socket


def bind_pull(context: Context, endpoint: str) -> Socket:
    """Bind a blocking PULL of outputs."""
    socket = context.socket(zmq.PULL)
    _limit(socket, OUTPUT_QUEUE, MAX_OUTPUT_FRAME)
    socket.bind(endpoint)
    return socket


def connect_dealer(context: Context, endpoint: str, *, engine_index: int, linger_ms: int = REQUEST_LINGER_MS) -> Socket:
    """Connect an engine core's DEALER; it must speak first, a ROUTER cannot address a silent peer."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, engine_identity(engine_index))
    socket.setsockopt(zmq.LINGER, linger_ms)
    _limit(socket, REQUEST_QUEUE, MAX_REQUEST_FRAME)
    socket.connect(endpoint)
    return socket


def connect_push(context: Context, endpoint: str) -> Socket:
    """Connect an engine core's PUSH of outputs. A full queue makes send wait, so nothing is lost."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, OUTPUT_LINGER_MS)
    _limit(socket, OUTPUT_QUEUE, MAX_OUTPUT_FRAME)
    socket.connect(endpoint)
    return socket


class PullReader:
    """Messages of a PULL inside an event loop, without a future and a wake-up for each, as zmq.asyncio has them."""

    def __init__(self, context: AsyncContext, endpoint: str) -> None:
        """Bind the PULL of outputs; the loop is known with the first call of readable."""
        self._socket = bind_pull(zmq.Context.shadow(context.underlying), endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def receive_nowait(self) -> list[bytes] | None:
        """Give a message that has arrived, or None."""
        if self._socket.closed:
            return None
        try:
            return self._socket.recv_multipart(flags=zmq.DONTWAIT)
        except zmq.Again:
            return None

    def readable(self) -> asyncio.Future[None]:
        """Give a future that is done when there may be a message; call it only after receive_nowait gave None.

        The descriptor tells of changes since the last receive, so a message that came before it would not wake.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._on_readable)
        if self._waiter is None or self._waiter.done():
            self._waiter = self._loop.create_future()
        return self._waiter

    def _on_readable(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif not self._socket.closed:
            # Nobody waits: acknowledge, or the loop would call again at once.
            self._socket.getsockopt(zmq.EVENTS)

    def close(self) -> None:
        """Stop reading; what was not received is dropped."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._socket.close()


def poll(sockets: Sequence[Socket], timeout: float | None) -> list[Socket]:
    """Wait until at least one blocking socket can be read; give those that can. timeout in seconds, None = forever."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    ready = dict(poller.poll(None if timeout is None else int(timeout * 1000)))
    return [socket for socket in sockets if socket in ready]


def _set_up_router(socket: zmq.Socket[bytes] | AsyncSocket, linger_ms: int) -> None:
    # Without MANDATORY a ROUTER drops what it cannot route, and a request would vanish.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.LINGER, linger_ms)
    _limit(socket, REQUEST_QUEUE, MAX_REQUEST_FRAME)


def _limit(socket: zmq.Socket[bytes] | AsyncSocket, queue: int, frame_bytes: int) -> None:
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
