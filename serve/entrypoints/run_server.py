"""The life of the server process: bind, spawn the engine, answer at once, load, serve, drain, leave with a code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

import uvloop

from serve.config import Environment, ServeConfig
from serve.engine.async_llm import AsyncLLM
from serve.entrypoints.api_server import build_app
from serve.entrypoints.app_state import AppState, Phase
from serve.entrypoints.http_server import check_tls_files, new_http_server, set_up_http_logging
from serve.entrypoints.loading import load_services, unload
from serve.entrypoints.model_argument import needs_download
from serve.entrypoints.tasks import example_request
from serve.errors import ExitCode, ServeError
from serve.launch import STOP_SECONDS, EngineHandle, EngineProcess, StartCancelled
from serve.model_store import resolve_model
from serve.wire.frontend import Ready

log = logging.getLogger(__name__)

# After the engine's death: time for open requests to get their error, and for probes to see it.
DEATH_SECONDS: Final = 1.0
LAST_ANSWERS_SECONDS: Final = 2.0
ABORT_SECONDS: Final = 2.0
HURRIED_STOP_SECONDS: Final = 1.0


def run_server(
    config: ServeConfig, environment: Environment, listener: socket.socket, *, process: EngineProcess
) -> ExitCode:
    """Serve on a bound socket with a spawned engine until told to stop; gives the exit code.

    Raises ConfigError when the start fails. The caller ends the process and closes the socket.
    """
    check_tls_files(config.server)
    set_up_http_logging(config.server)
    _raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerRun(config, environment, listener, process=process).run())


def _raise_descriptor_limit() -> None:
    """Allow as many open files, and so connections, as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class FetchFailed(Exception):
    """`serve pull` could not fetch the model; it has said why on stderr."""

    def __init__(self, code: int) -> None:
        super().__init__(f"serve pull ended with code {code}")
        self.code = code


class ServerRun:
    """One run of the server, on one event loop."""

    def __init__(
        self, config: ServeConfig, environment: Environment, listener: socket.socket, *, process: EngineProcess
    ) -> None:
        model = config.engine.model
        self._config = config
        self._environment = environment
        self._process = process
        self._state = AppState(config, model.served_model_name or (model.model,), model_root=model.model)
        self._http = new_http_server(build_app(self._state), config.server)
        self._listener = listener
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = ExitCode.OK
        self._puller: asyncio.subprocess.Process | None = None
        self._handle: EngineHandle | None = None

    async def run(self) -> ExitCode:
        """Load, serve and leave; the HTTP server answers all the time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = loop.create_task(self._http.serve(sockets=[self._listener]))
        serving.add_done_callback(self._on_http_end)
        try:
            if not await self._until_stop(self._start()):
                log.info("stopped while loading")
                return self._exit_code
            return await self._serve()
        except FetchFailed as error:
            return ExitCode(error.code)
        except StartCancelled:
            return self._exit_code
        finally:
            await self._leave(serving)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("second signal: running requests are cut off")
            self._exit_code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.OK
            self._hurry.set()
        self._process.cancel()
        self._stop.set()

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        """Stop everything when the HTTP server ends by itself; nobody could reach us any more."""
        if self._http.should_exit:
            return
        log.error("the HTTP server ended", exc_info=None if serving.cancelled() else serving.exception())
        self._exit_code = ExitCode.RESOURCES
        self._process.cancel()
        self._stop.set()

    async def _until_stop(self, work: Coroutine[object, object, None]) -> bool:
        """Run work to its end; False when a signal came first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _start(self) -> None:
        """Find the model, load tokenizer and engine side by side, and open for requests."""
        model = self._config.engine.model
        path = await self._find_model()
        self._state.model_root = str(path) if model.model == str(path) else model.model
        loaded = await load_services(
            path, self._config, self._process, ready_timeout=self._environment.engine_ready_timeout
        )
        self._handle = loaded.handle
        self._state.config = loaded.config
        self._state.services = loaded.services
        self._state.phase = Phase.READY
        self._announce(loaded.handle.ready)
        # What lives now lives to the end: no later collection, which would hold up every stream, looks at it.
        gc.collect()
        gc.freeze()

    async def _find_model(self) -> Path:
        """Give the model's path; a download runs in a process of its own, which can be stopped."""
        model = self._config.engine.model
        if not needs_download(model.model, self._environment):
            return await asyncio.to_thread(resolve_model, model.model, model.revision, self._environment)
        revision = ["--revision", model.revision] if model.revision else []
        self._puller = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve", "pull", model.model, *revision,
            stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        output, _ = await self._puller.communicate()
        code = self._puller.returncode or 0
        self._puller = None
        if code != 0:
            raise FetchFailed(code if code > 0 else ExitCode.MODEL)
        return Path(output.decode().strip().splitlines()[-1])

    def _announce(self, ready: Ready) -> None:
        """Print what a person wants to know."""
        server = self._config.server
        scheme = "https" if server.ssl_certfile else "http"
        port = 0 if server.uds is not None else self._listener.getsockname()[1]
        host = f"[{server.host}]" if ":" in server.host else server.host
        address = server.uds if server.uds is not None else f"{scheme}://{host}:{port}"
        via = f"--unix-socket {server.uds} http://localhost" if server.uds is not None else address
        key = " -H 'Authorization: Bearer KEY'" if server.api_key else ""
        name = self._state.model_names[0]
        log.info("model %s: dtype=%s device=%s max_model_len=%d", name, ready.dtype, ready.device, ready.max_model_len)
        if ready.kv_cache_size_tokens:
            log.info(
                "kv cache: %s tokens, %s MiB once all are in use, room for %.1f requests of %d tokens at once",
                f"{ready.kv_cache_size_tokens:,}",
                f"{ready.kv_cache_size_bytes >> 20:,}",
                ready.kv_cache_max_concurrency,
                ready.max_model_len,
            )
        log.info("serving at %s", address)
        services = self._state.services
        path, body = example_request(name, None if services is None else services.llm.pooling)
        log.info("try: curl %s%s%s -H 'Content-Type: application/json' -d '%s'", via, path, key, body)

    async def _serve(self) -> ExitCode:
        """Serve until a signal or the engine's death; finish what runs."""
        assert self._handle is not None, "the engine has started"
        stop, death = asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._handle.is_dead.wait())
        await asyncio.wait((stop, death), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (stop, death):
            waiter.cancel()
        if self._handle.is_dead.is_set() and not self._stop.is_set():
            await self._mourn()
            return ExitCode.ENGINE_DIED
        await self._drain()
        return self._exit_code

    async def _mourn(self) -> None:
        """Let open requests get their error and probes see the state, then end."""
        self._state.phase = Phase.DEAD
        await asyncio.sleep(DEATH_SECONDS)
        await self._wait_for_answers(LAST_ANSWERS_SECONDS)

    async def _drain(self) -> None:
        """Refuse new work, let running requests end within the limit, then cut the rest with an error."""
        services = self._state.services
        assert services is not None, "draining follows serving"
        assert self._handle is not None, "draining follows serving"
        llm, seconds = services.llm, self._config.server.shutdown_timeout
        self._state.phase = Phase.DRAINING
        self._handle.expect_end()
        llm.begin_drain()
        log.info("drain started: requests=%d limit=%.0f s; a second signal stops at once", llm.num_unfinished, seconds)
        started = asyncio.get_running_loop().time()
        if not await self._drained_in_time(llm, seconds):
            log.warning("requests cut off: %d", llm.num_unfinished)
            with contextlib.suppress(TimeoutError, ServeError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await llm.pause("abort", clear_cache=False)
                    await llm.wait_drained(ABORT_SECONDS)
        await self._wait_for_answers(LAST_ANSWERS_SECONDS)
        log.info("drained in %.1f s", asyncio.get_running_loop().time() - started)

    async def _drained_in_time(self, llm: AsyncLLM, seconds: float) -> bool:
        """Wait for running requests; False at the limit, or when a second signal asks for no more patience."""
        drained = asyncio.ensure_future(llm.wait_drained(seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((drained, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if drained.done():
            return drained.result()
        drained.cancel()
        return False

    async def _wait_for_answers(self, seconds: float) -> None:
        """Give answers that are complete a moment to reach their clients."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._state.num_open_requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    async def _leave(self, serving: asyncio.Task[None]) -> None:
        """Stop the HTTP server, the engine client and the engine core."""
        # A start that failed must not wait until the engine core has loaded the model.
        self._process.cancel()
        if self._puller is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._puller.pid, signal.SIGKILL)
        self._http.should_exit = True
        self._http.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        limit = HURRIED_STOP_SECONDS if self._hurry.is_set() else STOP_SECONDS
        await unload(self._handle, self._state.services, timeout=limit)
