"""The engine without HTTP: LLM(model).generate(prompts), in a script or a notebook.

The engine core is the same process that the server runs; its client lives on an event loop in a thread of its own, so
that the calls here are plain functions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TypeVar, cast

import msgspec
import uvloop

from serve.config import (
    DEFAULT_MODEL,
    CacheConfig,
    EngineConfig,
    Environment,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
    field_names,
    groups,
    read_environment,
    validate,
)
from serve.engine.async_llm import RequestStream
from serve.engine.outputs import PoolingOutput, RequestOutput
from serve.entrypoints.loading import Loaded, load_services, unload
from serve.entrypoints.model_argument import check_model_argument
from serve.entrypoints.progress import Progress
from serve.entrypoints.window import run_window, window_size
from serve.errors import ConfigError, InvalidRequest, RequestFailed, ServeError
from serve.launch import STOP_SECONDS, EngineProcess, spawn_engine
from serve.limits import RequestLimits
from serve.model_store import resolve_model
from serve.pooling_params import PoolingParams
from serve.renderers.renderer import ChatRenderRequest, RenderedPrompt, TokenizeParams
from serve.sampling_params import OutputKind, SamplingParams

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, object]]
_T = TypeVar("_T")
_R = TypeVar("_R")


class LLM:
    """A model in this program.

    settings are those of the command line by field name, for example max_model_len=4096. Make it in a thread that
    lives as long as it does: the engine core ends with that thread. Use it as a context manager, or call close();
    what is left open is closed when the program ends.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **settings: object) -> None:
        environment = read_environment()
        config = config_from_settings({"model": model, **settings})
        validate(config)
        check_model_argument(model, environment)
        self._engine = _EngineThread(config, environment)
        self._close = weakref.finalize(self, self._engine.close)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine core and wait for its end. May be called again."""
        self._close()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._engine.loaded.services.llm.max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """Give the parameters used when a call names none: the model's own defaults, 16 tokens."""
        defaults = dict(self._engine.loaded.services.llm.default_sampling)
        max_tokens = defaults.pop("max_new_tokens", None)
        if max_tokens is not None:
            defaults["max_tokens"] = int(max_tokens)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return msgspec.structs.replace(SamplingParams(), **defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt (text or token ids) or several; gives the results in the order of the prompts.

        One sampling_params serves all prompts, a list gives each its own. The first prompt that is refused or fails
        ends the call with its error, which carries a note with the prompt's index; the others are aborted.
        """
        listed = _as_prompts(prompts)
        params = self._params_for(len(listed), sampling_params)

        async def one(index: int) -> RequestOutput:
            return await self._generate(await self._render(listed[index]), params[index])

        return self._engine.run_all(one, len(listed), title="prompts", is_shown=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several with the model's chat template; otherwise like generate."""
        listed = _as_conversations(messages)
        params = self._params_for(len(listed), sampling_params)

        def rendering(conversation: Conversation) -> ChatRenderRequest:
            return ChatRenderRequest(
                messages=[dict(message) for message in conversation],
                tokenize=TokenizeParams(add_special_tokens=False, max_total_tokens=self.max_model_len),
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                chat_template_kwargs=None if chat_template_kwargs is None else dict(chat_template_kwargs),
            )

        async def one(index: int) -> RequestOutput:
            prompt = await self._engine.loaded.services.renderer.render_chat(rendering(listed[index]))
            return await self._generate(prompt, params[index])

        return self._engine.run_all(one, len(listed), title="chats", is_shown=use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = True
    ) -> list[PoolingOutput]:
        """Give the embedding of one prompt or several; the model must be an embedding model."""
        return self.encode(prompts, PoolingParams("embed", dimensions), use_tqdm=use_tqdm)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams, *, use_tqdm: bool = True
    ) -> list[PoolingOutput]:
        """Give what a pooling model makes of prompts; otherwise like generate."""
        listed = _as_prompts(prompts)

        async def one(index: int) -> PoolingOutput:
            prompt = await self._render(listed[index])
            llm = self._engine.loaded.services.llm
            return await llm.encode(prompt.token_ids, pooling_params, f"llm-{next(self._ids)}")

        return self._engine.run_all(one, len(listed), title="prompts", is_shown=use_tqdm)

    def _params_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [_checked(self.default_sampling_params())] * count
        if isinstance(sampling_params, SamplingParams):
            return [_checked(sampling_params)] * count
        if len(sampling_params) != count:
            raise InvalidRequest(
                f"there are {len(sampling_params)} sampling_params for {count} prompts; give one, or one for each"
            )
        return [_checked(params) for params in sampling_params]

    async def _render(self, prompt: Prompt) -> RenderedPrompt:
        renderer = self._engine.loaded.services.renderer
        params = TokenizeParams(add_special_tokens=True, max_total_tokens=self.max_model_len)
        if isinstance(prompt, str):
            return await renderer.render_text(prompt, params)
        return renderer.check_token_ids(list(prompt), params)

    async def _generate(self, prompt: RenderedPrompt, params: SamplingParams) -> RequestOutput:
        llm = self._engine.loaded.services.llm
        stream = await llm.add_request(prompt.token_ids, params, f"llm-{next(self._ids)}")
        output = await _final(stream)
        output.prompt = prompt.text
        return output


async def _final(stream: RequestStream) -> RequestOutput:
    try:
        async for output in stream:
            if output.finished:
                return output
    finally:
        await stream.aclose()
    raise RequestFailed("the request ended without an answer", cause="model_error")


class _EngineThread:
    """The engine core of one LLM, and the thread with the event loop that speaks to it."""

    def __init__(self, config: ServeConfig, environment: Environment) -> None:
        model = config.engine.model
        path = resolve_model(model.model, model.revision, environment)
        self._process: EngineProcess = spawn_engine(environment, drain_seconds=0.0)
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = (
            concurrent.futures.Future()
        )
        self._thread = threading.Thread(target=_run_loop, args=(started,), name="EngineClient", daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result()
        is_loaded = False
        try:
            timeout = environment.engine_ready_timeout
            self.loaded: Loaded = self._run(load_services(path, config, self._process, ready_timeout=timeout))
            is_loaded = True
        finally:
            if not is_loaded:
                self._end()

    def run_all(self, work: Callable[[int], Awaitable[_R]], count: int, *, title: str, is_shown: bool) -> list[_R]:
        """Give the results of work(0) to work(count - 1), a window of them under way at a time.

        The first error cancels the rest and carries a note with its index.
        """
        results: dict[int, _R] = {}

        async def one(index: int) -> None:
            try:
                results[index] = await work(index)
            except ServeError as error:
                error.add_note(f"request {index} of {count}, counted from 0")
                raise
            progress.advance()

        self._check_open()
        progress = Progress(count, title, unit="it", is_shown=is_shown)
        try:
            self._run(run_window(range(count), one, size=window_size(self.loaded.config)))
        finally:
            progress.close()
        return [results[index] for index in range(count)]

    def close(self) -> None:
        """End everything; called once.

        The wait for the process is in the caller's thread: while the program ends, executors take no more work.
        """
        self.loaded.handle.expect_end()
        try:
            self._process.stop(STOP_SECONDS)
            self._run(unload(None, self.loaded.services, timeout=STOP_SECONDS))
        finally:
            self._end()

    def _run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run work on the loop and wait; when the wait is interrupted, the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _check_open(self) -> None:
        if not self._thread.is_alive():
            raise ConfigError("this LLM was closed; make a new one")

    def _end(self) -> None:
        self._process.kill()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _run_loop(started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Run an event loop until its event is set; what is still going on then is cancelled."""

    async def until_stop() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stop())


def config_from_settings(settings: Mapping[str, object]) -> ServeConfig:
    """Build the settings from field names and values. Raises ConfigError for an unknown name or a wrong type."""
    known = {name for _, group in groups() for name in field_names(group)}
    for name in settings.keys() - known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        raise ConfigError(f"there is no setting {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
    return ServeConfig(
        engine=EngineConfig(
            model=_fill(ModelConfig, settings),
            cache=_fill(CacheConfig, settings),
            scheduler=_fill(SchedulerConfig, settings),
        ),
        server=_fill(ServerConfig, settings),
        limits=_fill(RequestLimits, settings),
    )


def _fill(group: type[_T], settings: Mapping[str, object]) -> _T:
    chosen = {name: settings[name] for name in field_names(group) if name in settings}
    for name, value in chosen.items():
        try:
            msgspec.convert({name: value}, type=group)
        except msgspec.ValidationError as error:
            raise ConfigError(f"setting {name}={value!r} has the wrong type: {error}") from None
    return msgspec.convert(chosen, type=group)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if len(messages) > 0 and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return list(cast(Sequence[Conversation], messages))


def _checked(params: SamplingParams) -> SamplingParams:
    """Give parameters as they go to the engine: types checked, lists as tuples, one hand-over at the end."""
    if isinstance(params.stop, str):
        params = msgspec.structs.replace(params, stop=(params.stop,))
    try:
        checked = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling_params has a value of the wrong type: {error}") from None
    return msgspec.structs.replace(checked, output_kind=OutputKind.FINAL_ONLY)
