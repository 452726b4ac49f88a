"""Starts the engine core, shakes hands with it, watches it and stops it: the only file that sees both processes.

The parent half (EngineProcess, EngineHandle) runs in the API server; engine_core_main is the child's entry. The two
meet over a ZeroMQ handshake in a private directory: Hello, EngineInit, LoadProgress..., then Ready or StartFailed.
The child dies with its parent: it holds the read end of a pipe whose write end only the parent has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from serve import __version__
from serve.checkpoint import Checkpoint
from serve.config import EngineConfig, Environment, child_environment, read_environment
from serve.engine.core_client import CoreClient
from serve.errors import ConfigError, ExitCode
from serve.log import decorate_process, setup_logging
from serve.wire import sockets
from serve.wire.frontend import EngineInit, HandshakeFromEngine, Hello, LoadProgress, Ready, StartFailed

log = logging.getLogger(__name__)

ENGINE_INDEX: Final = 0
POLL_SECONDS: Final = 0.1
PROGRESS_SECONDS: Final = 10.0
LAST_WORDS_SECONDS: Final = 0.3
STOP_SECONDS: Final = 5.0
# Must be set before the compute library loads; the user's own values win. By default idle OpenMP threads spin for
# milliseconds, which starves the threads that have work as soon as anything else runs on the machine.
ENGINE_ENVIRONMENT: Final = {"GOMP_SPINCOUNT": "2000"}
_PR_SET_PDEATHSIG: Final = 1
# The child finds the package its parent runs, also from a source tree; an installed one is on the path already.
_CHILD_CODE: Final = (
    "import sys; root = sys.argv[1]; root in sys.path or sys.path.insert(0, root); "
    "from serve.launch import engine_core_main; engine_core_main(sys.argv[2:])"
)


class StartCancelled(Exception):
    """The start was given up because the server was told to stop."""


class HandshakeLink:
    """The launcher's socket for the handshake, bound in a run's directory."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = sockets.ipc_endpoint(directory, "handshake")
        self._context = sockets.new_context()
        self.router = sockets.bind_router(self._context, self.endpoint)

    def close(self) -> None:
        """Close the socket; nothing unsent is waited for."""
        self.router.close(linger=0)
        self._context.term()


class EngineProcess:
    """An engine core process that was spawned and waits for its orders.

    Create it with spawn_engine. Its methods other than cancel and kill may block.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], directory: Path, link: HandshakeLink, *, death_pipe: int
    ) -> None:
        self.process = process
        self.directory = directory
        self._link = link
        self._death_pipe = death_pipe
        self._link_lock = threading.Lock()
        self._is_cancelled = threading.Event()
        self._is_released = False

    def cancel(self) -> None:
        """Make a handshake in progress raise StartCancelled."""
        self._is_cancelled.set()

    def shake_hands(self, init: EngineInit, timeout: float, on_progress: Callable[[str], None]) -> Ready:
        """Tell the engine core what to serve and wait until it can; timeout in seconds.

        Raises ConfigError with the engine's own message and exit code when it cannot start.
        """
        with self._link_lock:
            return self._shake_hands(init, timeout, on_progress)

    def _shake_hands(self, init: EngineInit, timeout: float, on_progress: Callable[[str], None]) -> Ready:
        deadline = time.monotonic() + timeout
        identity, hello = self._receive(deadline, timeout)
        if not isinstance(hello, Hello) or hello.version != __version__:
            raise ConfigError(f"the engine core is not of version {__version__}: {hello}; reinstall the server")
        self._link.router.send_multipart([identity, msgspec.msgpack.encode(init)])
        while True:
            _, message = self._receive(deadline, timeout)
            match message:
                case LoadProgress(stage=stage):
                    on_progress(stage)
                case StartFailed(message=text, exit_code=code):
                    raise ConfigError(text, ExitCode(code))
                case Ready():
                    return message
                case Hello():
                    raise ConfigError("the engine core said hello twice", ExitCode.ENGINE_DIED)

    def _receive(self, deadline: float, timeout: float) -> tuple[bytes, HandshakeFromEngine]:
        next_note = time.monotonic() + PROGRESS_SECONDS
        while not sockets.poll([self._link.router], POLL_SECONDS):
            now = time.monotonic()
            if self._is_cancelled.is_set():
                raise StartCancelled
            if self.process.poll() is not None and not sockets.poll([self._link.router], LAST_WORDS_SECONDS):
                raise ConfigError(
                    f"the engine core ended while starting: {describe_exit(self.process.returncode)}",
                    ExitCode.ENGINE_DIED,
                )
            if now > deadline:
                raise ConfigError(
                    f"the engine core was not ready after {timeout:g} s; raise SERVE_ENGINE_READY_TIMEOUT",
                    ExitCode.MODEL,
                )
            if now > next_note:
                next_note = now + PROGRESS_SECONDS
                log.info("waiting for the engine core: seconds_left=%.0f", deadline - now)
        identity, payload = self._link.router.recv_multipart()[:2]
        return identity, msgspec.msgpack.decode(payload, type=HandshakeFromEngine)

    def wait(self) -> int:
        """Block until the process has ended; give its exit code (negative: a signal)."""
        return self.process.wait()

    def stop(self, timeout: float) -> None:
        """Ask the process to end, kill it after timeout seconds, and remove what the run left on disk."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                log.warning("engine core did not stop in %.1f s; killing it", timeout)
        self.kill()

    def kill(self) -> None:
        """End the process at once and remove what the run left on disk."""
        self.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if not self._is_released:
            self._is_released = True
            with self._link_lock:  # a cancelled handshake leaves within a poll
                self._link.close()
            os.close(self._death_pipe)
            shutil.rmtree(self.directory, ignore_errors=True)


def describe_exit(code: int) -> str:
    """Say how a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def spawn_engine(environment: Environment, *, drain_seconds: float) -> EngineProcess:
    """Start the engine core; it loads its libraries while the caller finds the model.

    drain_seconds is how long a SIGTERM that reaches the engine itself lets running requests go on. Call it from the
    main thread: Linux ties the child's parent-death signal to the thread that made the child.
    """
    sockets.remove_stale_endpoint_dirs(environment.ipc_dir)
    directory = sockets.make_endpoint_dir(environment.ipc_dir)
    link = HandshakeLink(directory)
    read_end, write_end = os.pipe()
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", _CHILD_CODE, root, link.endpoint, str(ENGINE_INDEX), str(read_end)]
    try:
        process = subprocess.Popen(
            [*command, str(os.getpid()), str(drain_seconds)],
            stdin=subprocess.DEVNULL,
            pass_fds=(read_end,),
            env={**ENGINE_ENVIRONMENT, **child_environment()},
        )
    finally:
        os.close(read_end)
    return EngineProcess(process, directory, link, death_pipe=write_end)


class EngineHandle:
    """A serving engine core: its client, what it reported when ready, and the watch over its process.

    is_dead is set on the event loop as soon as the process ends without having been asked to; reason says how.
    """

    def __init__(self, process: EngineProcess, client: CoreClient, ready: Ready) -> None:
        self.core_client = client
        self.ready = ready
        self.is_dead = asyncio.Event()
        self.reason = ""
        self._process = process
        self._is_stopping = False
        self._may_end = False
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        threading.Thread(target=self._watch, name="EngineCoreMonitor", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.process.pid

    def expect_end(self) -> None:
        """From now on the process may end by itself with exit code 0: a signal to the process group reached it too."""
        self._may_end = True

    def _watch(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed when the server ends first
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        if self._is_stopping:
            return
        self.reason = describe_exit(code)
        is_expected = self._may_end and code == 0
        log.log(
            logging.INFO if is_expected else logging.ERROR,
            "engine core %d ended: %s uptime=%.1f s",
            ENGINE_INDEX,
            self.reason,
            time.monotonic() - self._started,
        )
        self.core_client.notify_dead(self.reason)
        self.is_dead.set()

    async def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the engine core without calling it dead; killed after timeout seconds."""
        self._is_stopping = True
        await asyncio.to_thread(self._process.stop, timeout)


async def start_engine(
    process: EngineProcess, config: EngineConfig, checkpoint: Checkpoint, *, ready_timeout: float
) -> EngineHandle:
    """Wire the client's sockets to a spawned engine core and wait until it serves.

    config is resolved. Raises ConfigError when the engine cannot start, StartCancelled when it was told not to.
    """
    loop = asyncio.get_running_loop()

    def on_progress(stage: str) -> None:
        log.info("engine core: %s", stage)

    with contextlib.ExitStack() as undo:
        client = CoreClient(process.directory)
        # A client that is dropped with open sockets would hold up the end of the process for ever.
        undo.callback(client.close)
        init = EngineInit(config, checkpoint, [client.input_address], [client.output_address])
        ready = await loop.run_in_executor(None, process.shake_hands, init, ready_timeout, on_progress)
        await client.wait_ready()
        undo.pop_all()
    return EngineHandle(process, client, ready)


def engine_core_main(arguments: Sequence[str]) -> None:
    """Run the engine-core process: handshake endpoint, engine index, death pipe, parent's pid, drain seconds.

    The imports are here because only this process may load core and worker (and with them the compute library).
    """
    endpoint, index, death_pipe, parent, drain_seconds = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(int(death_pipe), int(parent), endpoint)
    environment = read_environment()
    decorate_process("EngineCore", color=not environment.no_color, title=True)
    setup_logging(environment.log_level)
    context = sockets.new_context()
    link = sockets.connect_dealer(context, endpoint, engine_index=int(index), linger_ms=sockets.HANDSHAKE_LINGER_MS)
    link.send(msgspec.msgpack.encode(Hello(__version__, os.getpid())))
    code = ExitCode.ENGINE_DIED
    try:
        from serve.core.executor.uniproc import UniprocExecutor
        from serve.core.proc import EngineCoreProc
        from serve.worker.worker import Worker, load_registered_model

        load = functools.partial(load_registered_model, cache_folder=environment.cache_dir / "packed")
        init = msgspec.msgpack.decode(link.recv(), type=EngineInit)
        process = EngineCoreProc(
            init,
            UniprocExecutor(functools.partial(Worker, load=load), init.config, init.checkpoint),
            engine_index=int(index),
            report=lambda stage: link.send(msgspec.msgpack.encode(LoadProgress(stage))),
            drain_seconds=float(drain_seconds),
        )
        link.send(msgspec.msgpack.encode(process.ready))
        code = process.run()
    except ConfigError as error:
        code = error.exit_code
        link.send(msgspec.msgpack.encode(StartFailed(str(error), int(code))))
    except Exception as error:
        log.exception("engine core failed to start")
        text = f"the engine core failed to start: {type(error).__name__}: {error}"
        link.send(msgspec.msgpack.encode(StartFailed(text, int(code))))
    link.close()
    context.term()
    sys.exit(int(code))


def _die_with_parent(death_pipe: int, parent: int, endpoint: str) -> None:
    """End this process when its parent is gone, in whatever it is doing, and remove the run's sockets."""
    directory = Path(endpoint.removeprefix("ipc://")).parent

    def wait_for_death() -> None:
        # Nothing is ever written; the read ends when the parent's end of the pipe closes.
        os.read(death_pipe, 1)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(int(ExitCode.ENGINE_DIED))

    threading.Thread(target=wait_for_death, name="DeathPipeMonitor", daemon=True).start()
    if sys.platform == "linux":
        # Second line of defence; it needs the check for a parent that died before the call.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(int(ExitCode.ENGINE_DIED))
