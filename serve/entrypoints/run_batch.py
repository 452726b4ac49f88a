"""`serve run-batch`: answers a file of requests through the same application that the server runs, then ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from serve.config import Environment, ServeConfig
from serve.entrypoints.api_server import build_app
from serve.entrypoints.app_state import AppState, Phase
from serve.entrypoints.asgi_caller import Answer, AsgiCaller
from serve.entrypoints.batch_file import (
    BAD_LINE,
    BatchError,
    BatchLine,
    BatchOutput,
    BatchRequest,
    BatchResponse,
    InputLine,
    count_lines,
    read_lines,
)
from serve.entrypoints.loading import Loaded, load_services, unload
from serve.entrypoints.progress import Progress
from serve.entrypoints.window import run_window, window_size
from serve.errors import EngineDead, ExitCode
from serve.launch import STOP_SECONDS, EngineProcess, StartCancelled

log = logging.getLogger(__name__)

# The window bounds what waits; a request with many choices may fill more of the queue than a server would allow.
_NO_LIMIT: Final = 1 << 40
_BUSY_STATUS: Final = 503
_BUSY_SECONDS: Final = 1.0


class _ErrorObject(msgspec.Struct):
    code: str | int = ""
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject


def run_batch(
    config: ServeConfig,
    environment: Environment,
    process: EngineProcess,
    *,
    model_path: Path,
    source: Path,
    target: Path,
) -> ExitCode:
    """Answer the requests of source that target has no line for; gives the exit code.

    0 means that every line of source has its line in target, an answer or an error.
    """
    output = BatchOutput(target)
    scheduler = replace(config.engine.scheduler, max_waiting=_NO_LIMIT, max_waiting_tokens=_NO_LIMIT)
    config = replace(config, engine=replace(config.engine, scheduler=scheduler))
    run = BatchRun(config, process, source, output=output)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run.run(model_path, ready_timeout=environment.engine_ready_timeout))
    finally:
        output.close()


class BatchRun:
    """One run over an input file, on one event loop."""

    def __init__(self, config: ServeConfig, process: EngineProcess, source: Path, *, output: BatchOutput) -> None:
        self._config = config
        self._process = process
        self._source = source
        self._output = output
        self._progress = Progress(count_lines(source), "batch", unit="req", is_shown=sys.stderr.isatty())
        self._is_stopped = False

    async def run(self, model_path: Path, *, ready_timeout: float) -> ExitCode:
        """Load the model, answer the lines, leave."""
        task = asyncio.current_task()
        assert task is not None, "run inside a task"
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, task)
        loaded: Loaded | None = None
        try:
            loaded = await load_services(model_path, self._config, self._process, ready_timeout=ready_timeout)
            await self._answer_all(loaded)
        except EngineDead as error:
            log.error("%s; run again to go on", error)
            return ExitCode.ENGINE_DIED
        except (asyncio.CancelledError, StartCancelled):
            if not self._is_stopped:
                raise
            task.uncancel()
            log.warning("stopped with %d lines written; run again to go on", self._output.num_done)
            return ExitCode.INTERRUPTED
        finally:
            self._progress.close()
            if loaded is not None:
                await unload(loaded.handle, loaded.services, timeout=STOP_SECONDS)
        log.info("batch complete: lines=%d errors_now=%d", self._output.num_done, self._output.num_errors)
        return ExitCode.OK

    def _on_signal(self, task: asyncio.Task[ExitCode]) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._process.cancel()
            task.cancel()

    async def _answer_all(self, loaded: Loaded) -> None:
        config, model = loaded.config, loaded.config.engine.model
        names = model.served_model_name or (model.model,)
        state = AppState(config, names, model_root=model.model, phase=Phase.READY, services=loaded.services)
        key = config.server.api_key[:1]
        headers = tuple((b"authorization", b"Bearer " + value.encode()) for value in key)
        caller = AsgiCaller(build_app(state), root_path=config.server.root_path.rstrip("/"), headers=headers)

        async def answer(line: InputLine) -> None:
            if not self._output.has(line):
                self._output.add(await _answer_line(caller, line))
            self._progress.advance()

        lines = read_lines(self._source, max_bytes=config.server.max_body_bytes)
        await run_window(lines, answer, size=window_size(config))


async def _answer_line(caller: AsgiCaller, line: InputLine) -> BatchLine:
    line_id = f"batch_req_{uuid.uuid4().hex}"
    if line.request is None:
        return BatchLine(line_id, line.custom_id, error=BatchError(BAD_LINE, line.problem))
    request: BatchRequest = line.request
    body = bytes(request.body)
    while (answer := await caller.post(request.url, body)).status == _BUSY_STATUS:
        _check_alive(answer)
        await asyncio.sleep(_BUSY_SECONDS)
    response = BatchResponse(
        answer.status, answer.headers.get(b"x-request-id", b"").decode("latin-1"), msgspec.Raw(bytes(answer.body))
    )
    return BatchLine(line_id, request.custom_id, response, _error_of(answer))


def _error_of(answer: Answer) -> BatchError | None:
    """Give the error that an answer reports, None for a good one."""
    if answer.status == 200:
        return None
    error = _check_alive(answer)
    return BatchError(error.code, error.message)


def _check_alive(answer: Answer) -> _ErrorObject:
    """Give the error in an answer. Raises EngineDead for the engine's own end."""
    error = msgspec.json.decode(answer.body, type=_ErrorBody).error
    if error.code == "engine_dead":
        raise EngineDead(error.message)
    return error
