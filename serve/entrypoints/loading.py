"""From a model's path to what answers requests: checkpoint, tokenizer and engine, the last two side by side."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from serve.checkpoint import Checkpoint
from serve.checkpoint.runner import describe_model
from serve.config import ServeConfig, ServerConfig
from serve.engine.async_llm import AsyncLLM
from serve.entrypoints.app_state import Services
from serve.errors import InvalidRequest
from serve.heap import return_free_memory
from serve.launch import EngineHandle, EngineProcess, start_engine
from serve.renderers.answer_format import AnswerFormat, choose_answer_format
from serve.renderers.chat_template import load_chat_template, resolve_template
from serve.renderers.renderer import ChatRenderer, TemplateSettings
from serve.renderers.tokenizer import Tokenizer, load_tokenizer

_TextSide = tuple[Tokenizer, TemplateSettings, AnswerFormat]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that serves. config is resolved."""

    config: ServeConfig
    handle: EngineHandle
    services: Services


async def load_services(path: Path, config: ServeConfig, process: EngineProcess, *, ready_timeout: float) -> Loaded:
    """Load the model at a path into a spawned engine core and give what answers requests.

    Raises ConfigError when the pieces do not fit, StartCancelled when the process was cancelled.
    """
    checkpoint, engine = await asyncio.to_thread(describe_model, path, config.engine)
    config = replace(config, engine=engine)
    text_task = asyncio.ensure_future(asyncio.to_thread(_load_text_side, checkpoint, config))
    engine_task = asyncio.ensure_future(start_engine(process, engine, checkpoint, ready_timeout=ready_timeout))
    text_side = await _both(text_task, engine_task)
    handle = engine_task.result()
    services: Services | None = None
    try:
        services = await _open(checkpoint, config, handle, text_side)
    finally:
        if services is None:
            await handle.stop()
    return Loaded(config, handle, services)


async def _open(checkpoint: Checkpoint, config: ServeConfig, handle: EngineHandle, text_side: _TextSide) -> Services:
    tokenizer, settings, answer_format = text_side
    ready = handle.ready
    llm = AsyncLLM(handle.core_client, tokenizer, checkpoint=checkpoint, config=config, ready=ready)
    llm.start()
    renderer = ChatRenderer(
        tokenizer,
        max_model_len=ready.max_model_len,
        settings=settings,
        num_workers=config.server.renderer_num_workers,
    )
    await renderer.warm_up(expects_chat=llm.pooling is None)
    return_free_memory()
    return Services(llm, renderer, tokenizer, ready, answer_format)


async def unload(handle: EngineHandle | None, services: Services | None, *, timeout: float) -> None:
    """Stop the engine core, killed after timeout seconds, then the client and the renderer's threads."""
    if handle is not None:
        await handle.stop(timeout)
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
    """Give the tokenizer and the choices about templates and answers; what is not there is found out here."""
    tokenizer = load_tokenizer(checkpoint, config.engine.model.tokenizer)
    settings = template_settings(config.server, tokenizer)
    return tokenizer, settings, answer_format_of(config.server, tokenizer, settings)


def answer_format_of(server: ServerConfig, tokenizer: Tokenizer, settings: TemplateSettings) -> AnswerFormat:
    """Give how answers are read: as the flags say, else as the chat template's own marks show."""
    try:
        template: str | None = resolve_template(settings.chat_template, tokenizer.chat_template, has_tools=True)
    except InvalidRequest:
        template = None  # no template: requests with messages are refused, one by one
    return choose_answer_format(
        tokenizer, template, tool_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser
    )


def template_settings(server: ServerConfig, tokenizer: Tokenizer) -> TemplateSettings:
    """Give the operator's choices about chat templates; --chat-template may name a file."""
    return TemplateSettings(
        chat_template=load_chat_template(server.chat_template, tokenizer.chat_template),
        content_format=server.chat_template_content_format,
        default_kwargs=server.default_chat_template_kwargs,
        trust_request_template=server.trust_request_chat_template,
        response_role=server.response_role,
    )
