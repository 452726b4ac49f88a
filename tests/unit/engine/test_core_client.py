"""The client's end of the sockets when the engine is silent, slow, gone or talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from serve.engine.core_client import CoreClient
from serve.errors import EngineDead, Overloaded
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, IsPaused
from serve.wire.sockets import make_endpoint_dir
from tests.fakes import FakeCore, ready_message
from tests.waiting import async_wait_until

REQUEST = EngineCoreRequest("r", [1], SamplingParams(), 0.0)


def run(tmp_path: Path, test: Callable[[CoreClient], Awaitable[None]]) -> None:
    client = CoreClient(make_endpoint_dir(tmp_path))

    async def body() -> None:
        async with asyncio.timeout(60):
            await test(client)

    try:
        asyncio.run(body())
    finally:
        client.close()


def test_the_first_message_is_the_engines_ready(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        waiting = [asyncio.create_task(client.wait_ready()) for _ in range(3)]
        await asyncio.sleep(0)
        core = FakeCore(client.input_address, client.output_address, ready_message(77))
        assert [(await w).max_model_len for w in waiting] == [77] * 3
        core.close()

    run(tmp_path, test)


def test_a_silent_engine_is_dead_after_the_limit(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        with pytest.raises(EngineDead, match="did not report ready within"):
            await client.wait_ready(timeout=0.01)
        assert client.is_dead
        with pytest.raises(EngineDead):
            await client.add_request(REQUEST)

    run(tmp_path, test)


def test_an_engine_that_dies_before_it_is_ready_ends_the_wait(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0)
        await asyncio.to_thread(client.notify_dead, "exit code 3")
        with pytest.raises(EngineDead, match="exit code 3"):
            await asyncio.wait_for(waiting, 1)

    run(tmp_path, test)


def test_a_death_that_was_noticed_before_the_loop_ran_is_not_lost(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        client.notify_dead("killed by signal 9")
        client.notify_dead("later reason")
        for call in (client.wait_ready(), client.get_output(), client.control(IsPaused()), client.add_request(REQUEST)):
            with pytest.raises(EngineDead, match="signal 9"):
                await asyncio.wait_for(call, 1)
        await client.abort(["r"])

    run(tmp_path, test)


def test_a_broken_ready_message_is_fatal(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        core = FakeCore(client.input_address, client.output_address, "not ready")  # type: ignore[arg-type]
        with pytest.raises(EngineDead, match="first message is broken"):
            await client.wait_ready()
        core.close()

    run(tmp_path, test)


def test_an_engine_that_closed_its_socket_is_dead(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        core = FakeCore(client.input_address, client.output_address)
        await client.wait_ready()
        core.close()

        async def send_until_dead() -> None:
            while True:
                await client.add_request(REQUEST)
                await asyncio.sleep(0)

        with pytest.raises(EngineDead, match="not connected"):
            await asyncio.wait_for(send_until_dead(), 5)

    run(tmp_path, test)


def test_an_engine_that_does_not_read_makes_requests_fail_in_time_and_aborts_wait(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        core = FakeCore(client.input_address, client.output_address)
        core.is_paused.set()

        sent = 0

        async def send_until_full() -> None:
            nonlocal sent
            while True:
                await client.add_request(REQUEST)
                sent += 1

        with pytest.raises(Overloaded) as caught:
            await asyncio.wait_for(send_until_full(), 30)
        # Not "overloaded", which HTTP answers with 429: the client did nothing wrong.
        assert caught.value.code == "engine_busy"
        assert sent > 0
        await client.abort(["x"])
        core.is_paused.clear()
        await core.wait_requests(sent)
        await client.abort(["y"])
        await async_wait_until(lambda: bool(core.aborts), 5, "aborts at the core")
        assert core.aborts == [["x", "y"]]
        assert len(core.requests) == sent
        core.close()

    run(tmp_path, test)


def test_cancelling_a_read_loses_no_message(tmp_path: Path) -> None:
    async def test(client: CoreClient) -> None:
        core = FakeCore(client.input_address, client.output_address)
        reading = asyncio.create_task(client.get_output())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        core.send(EngineCoreOutput("r", [5]))
        message = await client.get_output()
        assert message.outputs[0].new_token_ids == [5]
        core.close()

    run(tmp_path, test)
