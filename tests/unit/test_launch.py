"""The launcher's half of the handshake, against a child that a test plays, and the end of a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from serve import __version__
from serve.config import EngineConfig
from serve.errors import ConfigError, ExitCode
from serve.launch import EngineProcess, HandshakeLink, StartCancelled, describe_exit, start_engine
from serve.wire import sockets
from serve.wire.frontend import EngineInit, Hello, LoadProgress, Ready, StartFailed
from tests.fakes import byte_checkpoint, ready_message
from tests.waiting import wait_until

INIT = EngineInit(EngineConfig(), byte_checkpoint(), ["ipc:///in"], ["ipc:///out"])
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


class Launch:
    """A launcher's end with a real but idle process, and the child's end in the test's hands."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        link = HandshakeLink(folder)
        self.endpoint = link.endpoint
        child = subprocess.Popen(command)
        read_end, self.death_pipe = os.pipe()
        os.close(read_end)
        self.process = EngineProcess(child, folder, link, death_pipe=self.death_pipe)
        self.stages: list[str] = []

    def shake_hands(self, timeout: float = 10.0) -> Ready:
        return self.process.shake_hands(INIT, timeout, self.stages.append)

    def play(self, script: Callable[[sockets.Socket], None]) -> None:
        """Run the child's side in a thread."""

        def run() -> None:
            context = sockets.new_context()
            link = sockets.connect_dealer(context, self.endpoint, engine_index=0, linger_ms=2000)
            script(link)
            link.close()
            context.term()

        threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    folder = tmp_path / "run"
    folder.mkdir()
    made = Launch(folder, SLEEPER)
    yield made
    made.process.kill()


def send(link: sockets.Socket, message: object) -> None:
    link.send(msgspec.msgpack.encode(message))


def test_child_gets_what_to_serve_and_its_report_is_returned(launch: Launch) -> None:
    received: list[EngineInit] = []

    def child(link: sockets.Socket) -> None:
        send(link, Hello(__version__, 1))
        received.append(msgspec.msgpack.decode(link.recv(), type=EngineInit))
        send(link, LoadProgress("loading weights"))
        send(link, LoadProgress("warming up"))
        send(link, ready_message(64))

    launch.play(child)
    assert launch.shake_hands() == ready_message(64)
    assert received == [INIT]
    assert launch.stages == ["loading weights", "warming up"]


def test_failed_start_has_the_engines_words_and_exit_code(launch: Launch) -> None:
    def child(link: sockets.Socket) -> None:
        send(link, Hello(__version__, 1))
        link.recv()
        send(link, StartFailed("no room for a KV cache", int(ExitCode.RESOURCES)))

    launch.play(child)
    with pytest.raises(ConfigError, match="no room for a KV cache") as caught:
        launch.shake_hands()
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_child_of_another_version_is_refused(launch: Launch) -> None:
    launch.play(lambda link: send(link, Hello("0.0.0", 1)))
    with pytest.raises(ConfigError, match=r"not of version .*0\.0\.0"):
        launch.shake_hands()


def test_child_that_never_speaks_is_given_up_with_the_way_out(launch: Launch) -> None:
    with pytest.raises(ConfigError, match="SERVE_ENGINE_READY_TIMEOUT"):
        launch.shake_hands(timeout=0.2)


def test_child_that_dies_silently_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    launch = Launch(folder, [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(ConfigError, match="exit code 7") as caught:
        launch.shake_hands()
    assert caught.value.exit_code is ExitCode.ENGINE_DIED
    launch.process.kill()


def test_cancel_ends_a_handshake(launch: Launch) -> None:
    threading.Timer(0.1, launch.process.cancel).start()
    with pytest.raises(StartCancelled):
        launch.shake_hands()


def test_start_that_is_cancelled_while_the_engine_connects_lets_go_of_its_sockets(launch: Launch) -> None:
    is_ready = threading.Event()

    def child(link: sockets.Socket) -> None:
        send(link, Hello(__version__, 1))
        link.recv()
        send(link, ready_message(64))
        is_ready.set()

    async def start_and_cancel() -> None:
        start = start_engine(launch.process, EngineConfig(), byte_checkpoint(), ready_timeout=10.0)
        task = asyncio.ensure_future(start)
        await asyncio.to_thread(is_ready.wait, 10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    launch.play(child)
    # A context with an open socket blocks for ever when it is collected.
    ended = threading.Thread(target=lambda: asyncio.run(start_and_cancel()), daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()


def test_kill_ends_the_process_and_removes_its_folder_and_may_be_called_again(launch: Launch) -> None:
    launch.process.kill()
    launch.process.kill()
    assert launch.process.process.returncode == -9
    assert not launch.folder.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(launch.death_pipe)


def test_stop_kills_a_process_that_does_not_listen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    flag = tmp_path / "deaf"
    deaf = (
        "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(flag)!r}).touch(); signal.pause()"
    )
    launch = Launch(folder, [sys.executable, "-c", deaf])
    wait_until(flag.exists, 10, "the process ignores SIGTERM")
    launch.process.stop(0.2)
    assert launch.process.process.returncode == -9


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL (out of memory?)"), (-11, "killed by SIGSEGV")],
)
def test_ends_of_processes_are_put_into_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
