"""The life of the server process: bind, spawn the engine, answer at once, load, serve, drain, leave with a code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from serve.checkpoint import Checkpoint, load_checkpoint
from serve.config import Environment, ServeConfig, ServerConfig, resolve
from serve.engine.async_llm import AsyncLLM
from serve.entrypoints.api_server import build_app
from serve.entrypoints.app_state import AppState, Phase, Services
from serve.entrypoints.http_server import check_tls_files, new_http_server, set_up_http_logging
from serve.entrypoints.model_argument import needs_download
from serve.errors import ExitCode, ServeError
from serve.launch import STOP_SECONDS, EngineHandle, EngineProcess, StartCancelled, start_engine
from serve.model_store import resolve_model
from serve.renderers.chat_template import load_chat_template
from serve.renderers.renderer import ChatRenderer, TemplateSettings
from serve.renderers.tokenizer import Tokenizer, load_tokenizer
from serve.wire.frontend import Ready

log = logging.getLogger(__name__)

# After the engine's death: time for open requests to get their error, and for probes to see it.
DEATH_SECONDS: Final = 1.0
LAST_ANSWERS_SECONDS: Final = 2.0
ABORT_SECONDS: Final = 2.0
HURRIED_STOP_SECONDS: Final = 1.0
_TextSide = tuple[Tokenizer, TemplateSettings]


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
        checkpoint = await asyncio.to_thread(
            load_checkpoint, path, name=model.model, need_weights=model.load_format != "dummy"
        )
        self._state.model_root = str(path) if model.model == str(path) else model.model
        engine = resolve(self._config.engine, checkpoint.arch.max_position_embeddings)
        config = replace(self._config, engine=engine)
        self._state.config = config
        text_task = asyncio.ensure_future(asyncio.to_thread(_load_text_side, checkpoint, config))
        engine_task = asyncio.ensure_future(
            start_engine(self._process, engine, checkpoint, ready_timeout=self._environment.engine_ready_timeout)
        )
        tokenizer, settings = await _both(text_task, engine_task)
        self._handle = engine_task.result()
        await self._open(checkpoint, tokenizer, config, settings=settings)

    async def _open(
        self, checkpoint: Checkpoint, tokenizer: Tokenizer, config: ServeConfig, *, settings: TemplateSettings
    ) -> None:
        assert self._handle is not None, "the engine has started"
        ready = self._handle.ready
        llm = AsyncLLM(self._handle.core_client, tokenizer, checkpoint=checkpoint, config=config, ready=ready)
        llm.start()
        renderer = ChatRenderer(
            tokenizer,
            max_model_len=ready.max_model_len,
            settings=settings,
            num_workers=config.server.renderer_num_workers,
        )
        await renderer.warm_up()
        self._state.services = Services(llm, renderer, tokenizer, ready)
        self._state.phase = Phase.READY
        self._announce(ready)

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
        messages = '"messages": [{"role": "user", "content": "Hello!"}]'
        body = f'{{"model": "{name}", {messages}, "max_tokens": 64, "temperature": 0}}'
        log.info("model %s: dtype=%s device=%s max_model_len=%d", name, ready.dtype, ready.device, ready.max_model_len)
        log.info(
            "kv cache: %s tokens, room for %.1f requests of %d tokens at once",
            f"{ready.kv_cache_size_tokens:,}",
            ready.kv_cache_max_concurrency,
            ready.max_model_len,
        )
        log.info("serving at %s", address)
        log.info("try: curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '%s'", via, key, body)

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
        if self._handle is not None:
            await self._handle.stop(HURRIED_STOP_SECONDS if self._hurry.is_set() else STOP_SECONDS)
        services = self._state.services
        if services is not None:
            services.llm.shutdown()
            services.renderer.close()


async def _both(text_side: asyncio.Future[_TextSide], engine: asyncio.Future[EngineHandle]) -> _TextSide:
    """Wait for both; the first failure ends the other."""
    try:
        await asyncio.wait((text_side, engine), return_when=asyncio.FIRST_EXCEPTION)
        if engine.done():
            engine.result()
        return text_side.result()
    finally:
        engine.cancel()
        text_side.cancel()


def _load_text_side(checkpoint: Checkpoint, config: ServeConfig) -> _TextSide:
    """Give the tokenizer and the choices about templates; a template that is not there is found out here."""
    tokenizer = load_tokenizer(checkpoint, config.engine.model.tokenizer)
    return tokenizer, template_settings(config.server, tokenizer)


def template_settings(server: ServerConfig, tokenizer: Tokenizer) -> TemplateSettings:
    """Give the operator's choices about chat templates; --chat-template may name a file."""
    return TemplateSettings(
        chat_template=load_chat_template(server.chat_template, tokenizer.chat_template),
        content_format=server.chat_template_content_format,
        default_kwargs=server.default_chat_template_kwargs,
        trust_request_template=server.trust_request_chat_template,
        response_role=server.response_role,
    )
