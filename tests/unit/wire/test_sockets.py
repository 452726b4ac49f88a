"""Socket directories, identities and the delivery rules that the rest relies on."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from serve.errors import ConfigError
from serve.wire.sockets import (
    PullReader,
    SocketError,
    bind_pull,
    bind_router,
    bind_router_async,
    connect_dealer,
    connect_push,
    engine_identity,
    ipc_endpoint,
    make_endpoint_dir,
    new_async_context,
    new_context,
    poll,
    remove_stale_endpoint_dirs,
)


def test_the_socket_directory_is_the_owners_alone(tmp_path: Path) -> None:
    first, second = make_endpoint_dir(tmp_path), make_endpoint_dir(tmp_path)
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert first != second
    assert first.name.startswith(f"serve-{os.getpid()}-")


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match="SERVE_IPC_DIR"):
        make_endpoint_dir(base)
    assert list(base.iterdir()) == []


def test_an_unwritable_base_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="SERVE_IPC_DIR"):
        make_endpoint_dir(tmp_path / "file" / "below")


def test_only_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = make_endpoint_dir(tmp_path)
    stale = tmp_path / f"serve-{gone.pid}-abc"
    stale.mkdir()
    (stale / "input0").touch()
    other = tmp_path / "serve-other"
    other.mkdir()
    link = tmp_path / f"serve-{gone.pid}-link"
    link.symlink_to(other)
    assert remove_stale_endpoint_dirs(tmp_path) == 1
    assert own.exists()
    assert not stale.exists()
    assert other.exists()
    assert link.is_symlink()


@pytest.mark.parametrize(("index", "identity"), [(0, b"\0\0"), (1, b"\1\0"), (258, b"\2\1")])
def test_the_identity_is_the_index_in_two_little_endian_bytes(index: int, identity: bytes) -> None:
    assert engine_identity(index) == identity


def test_a_router_reaches_a_dealer_that_has_spoken(tmp_path: Path) -> None:
    context, endpoint = new_context(), ipc_endpoint(make_endpoint_dir(tmp_path), "handshake")
    router = bind_router(context, endpoint)
    dealer = connect_dealer(context, endpoint, engine_index=3)
    dealer.send_multipart([b"hello"])
    assert poll([router], 5) == [router]
    assert router.recv_multipart() == [b"\3\0", b"hello"]
    router.send_multipart([b"\3\0", b"answer", b"aux"])
    assert poll([dealer], 5) == [dealer]
    assert dealer.recv_multipart() == [b"answer", b"aux"]
    assert poll([router, dealer], 0) == []
    for socket in (router, dealer):
        socket.close()
    context.term()


def test_sending_to_an_unknown_engine_is_an_error_not_a_loss(tmp_path: Path) -> None:
    async def body() -> None:
        context = new_async_context()
        router = bind_router_async(context, ipc_endpoint(make_endpoint_dir(tmp_path), "input0"))
        with pytest.raises(SocketError):
            await router.send_multipart([b"\0\0", b"request"])
        router.close()
        context.term()

    asyncio.run(body())


def test_outputs_sent_before_the_sender_closes_arrive_in_order(tmp_path: Path) -> None:
    context, endpoint = new_context(), ipc_endpoint(make_endpoint_dir(tmp_path), "output0")
    pull = bind_pull(context, endpoint)
    push = connect_push(context, endpoint)
    for number in range(200):
        push.send_multipart([b"%d" % number])
    push.close()
    received = []
    while len(received) < 200 and poll([pull], 5):
        received.append(int(pull.recv_multipart()[0]))
    assert received == list(range(200))
    pull.close()
    context.term()


def test_a_reader_in_a_loop_gives_every_message_in_order_whoever_is_first(tmp_path: Path) -> None:
    async def read(reader: PullReader) -> list[bytes]:
        while (frames := reader.receive_nowait()) is None:
            await reader.readable()
        return frames

    async def body() -> None:
        endpoint = ipc_endpoint(make_endpoint_dir(tmp_path), "output0")
        async_context, context = new_async_context(), new_context()
        reader, push = PullReader(async_context, endpoint), connect_push(context, endpoint)

        def send(first: int, last: int) -> None:
            for number in range(first, last):
                push.send_multipart([b"%d" % number, b"aux"])

        async with asyncio.timeout(20):
            # The reader waits first.
            reading = asyncio.ensure_future(read(reader))
            await asyncio.sleep(0)
            send(0, 1)
            assert await reading == [b"0", b"aux"]
            # The messages are first, and come while nobody reads and while somebody does.
            for first in range(1, 301, 100):
                await asyncio.to_thread(send, first, first + 50)
                sending = asyncio.ensure_future(asyncio.to_thread(send, first + 50, first + 100))
                assert [(await read(reader))[0] for _ in range(100)] == [b"%d" % (first + i) for i in range(100)]
                await sending
        assert reader.receive_nowait() is None
        reader.close()
        assert reader.receive_nowait() is None
        push.close()
        async_context.term()
        context.term()

    asyncio.run(body())
