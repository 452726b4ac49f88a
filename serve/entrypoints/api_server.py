"""Assembles the HTTP application: routes, the gate around them, CORS when asked for, and the API description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from serve import __version__
from serve.entrypoints import dev, metrics, service
from serve.entrypoints.anthropic.messages import count_tokens, create_message
from serve.entrypoints.api_description import ROUTES
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import AsgiApp
from serve.entrypoints.gate import HttpGate, exchange_of
from serve.entrypoints.http_errors import HttpError, error_reply
from serve.entrypoints.invocations import invoke
from serve.entrypoints.openai import models
from serve.entrypoints.openai.chat import create_chat_completion
from serve.entrypoints.openai.chat_batch import create_chat_batch
from serve.entrypoints.openai.completions import create_completion
from serve.entrypoints.openai.embeddings import create_classification, create_embeddings, create_pooling
from serve.entrypoints.openai.generate import create_generation
from serve.entrypoints.openai.render import render_chat, render_completion
from serve.entrypoints.openai.responses import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from serve.entrypoints.openai.scores import create_ranking, create_scores
from serve.entrypoints.openai.tokenize import detokenize, tokenize, tokenizer_info

HTTP_MESSAGES: Final = {
    404: "there is nothing at this path",
    405: "this path does not take the method {method}",
}
Handler = Callable[..., Awaitable[Response]]


def build_app(state: AppState) -> AsgiApp:
    """Build the ASGI application over a shared state; it answers while the model still loads."""
    server = state.config.server
    has_docs = not server.disable_fastapi_docs
    app = FastAPI(
        title="serve",
        version=__version__,
        summary="LLM inference with the OpenAI API",
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        redirect_slashes=False,
    )
    _add_openai_routes(app, state)
    _add_pooling_routes(app, state)
    _add_responses_routes(app, state)
    _add_anthropic_routes(app, state)
    _add_vllm_routes(app, state)
    _add_token_routes(app, state)
    _add_service_routes(app, state)
    if server.dev_mode:
        _add_dev_routes(app, state)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # Inside the framework's last-resort layer, so that layer never sees an error and never words one.
    app.add_middleware(HttpGate, state=state)
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
        )
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Word the framework's own refusals (unknown path, wrong method) like ours."""
    assert isinstance(error, HTTPException), f"registered for HTTPException only, got {error!r}"
    message = HTTP_MESSAGES.get(error.status_code, str(error.detail)).format(method=request.method)
    if error.status_code == 404 and request.app.docs_url is not None:
        message += f"; see {request.app.docs_url} for the API"
    own = dict(error.headers or {}) if error.status_code != 405 else {"Allow": _allowed_methods(request)}
    headers = tuple((name.lower().encode(), value.encode()) for name, value in own.items())
    refusal = HttpError(error.status_code, message, headers=headers)
    exchange = exchange_of(request.scope)
    reply = error_reply(refusal, exchange.request_id)
    sent = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(exchange.error_body(reply), reply.status, sent, media_type="application/json")


def _allowed_methods(request: Request) -> str:
    """Name the methods of a path over all its routes; the framework names those of the first route only."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _add_route(app: FastAPI, method: str, path: str, handler: Handler) -> None:
    """Add a route with its description; the handlers give whole responses, so the framework adds nothing to them."""
    if app.openapi_url is None:
        # Nobody can ask for the descriptions, which take most of the time that assembling the application takes.
        app.add_api_route(path, handler, methods=[method], response_class=Response)
        return
    known = path.replace(":path}", "}")
    described = ROUTES[f"{method} {known}"] if f"{method} {known}" in ROUTES else ROUTES[known]
    app.add_api_route(
        path,
        handler,
        methods=[method],
        summary=described.summary,
        response_class=Response,
        response_description=described.answer,
        responses=described.responses(),
        openapi_extra=described.extra(),
    )


def _add_openai_routes(app: FastAPI, state: AppState) -> None:
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(state, request)

    async def completions(request: Request) -> Response:
        return await create_completion(state, request)

    async def list_models() -> Response:
        return _json(models.list_models(state))

    async def get_model(request: Request) -> Response:
        return _json(models.get_model(state, request.path_params["model_id"]))

    async def tokenize_prompt(request: Request) -> Response:
        return _json(await tokenize(state, request))

    async def detokenize_ids(request: Request) -> Response:
        return _json(await detokenize(state, request))

    _add_route(app, "POST", "/v1/chat/completions", chat_completions)
    _add_route(app, "POST", "/v1/completions", completions)
    _add_route(app, "POST", "/tokenize", tokenize_prompt)
    _add_route(app, "POST", "/detokenize", detokenize_ids)
    _add_route(app, "GET", "/v1/models", list_models)
    _add_route(app, "GET", "/v1/models/{model_id:path}", get_model)


def _add_pooling_routes(app: FastAPI, state: AppState) -> None:
    async def embeddings(request: Request) -> Response:
        return await create_embeddings(state, request)

    async def pooling(request: Request) -> Response:
        return await create_pooling(state, request)

    async def classify(request: Request) -> Response:
        return await create_classification(state, request)

    async def score(request: Request) -> Response:
        return await create_scores(state, request)

    async def rerank(request: Request) -> Response:
        return await create_ranking(state, request)

    _add_route(app, "POST", "/v1/embeddings", embeddings)
    _add_route(app, "POST", "/pooling", pooling)
    _add_route(app, "POST", "/classify", classify)
    for path in ("/score", "/v1/score"):
        _add_route(app, "POST", path, score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        _add_route(app, "POST", path, rerank)


def _add_responses_routes(app: FastAPI, state: AppState) -> None:
    async def responses(request: Request) -> Response:
        return await create_response(state, request)

    async def stored_response(request: Request) -> Response:
        return await get_response(state, request.path_params["response_id"], request)

    async def drop_response(request: Request) -> Response:
        return _json(await delete_response(state, request.path_params["response_id"]))

    async def stop_response(request: Request) -> Response:
        body = await cancel_response(state, request.path_params["response_id"])
        return Response(body, media_type="application/json")

    async def input_items(request: Request) -> Response:
        return _json(list_input_items(state, request.path_params["response_id"], request.query_params))

    _add_route(app, "POST", "/v1/responses", responses)
    _add_route(app, "GET", "/v1/responses/{response_id}", stored_response)
    _add_route(app, "DELETE", "/v1/responses/{response_id}", drop_response)
    _add_route(app, "POST", "/v1/responses/{response_id}/cancel", stop_response)
    _add_route(app, "GET", "/v1/responses/{response_id}/input_items", input_items)


def _add_anthropic_routes(app: FastAPI, state: AppState) -> None:
    async def messages(request: Request) -> Response:
        return await create_message(state, request)

    async def count_message_tokens(request: Request) -> Response:
        return _json(await count_tokens(state, request))

    _add_route(app, "POST", "/v1/messages", messages)
    _add_route(app, "POST", "/v1/messages/count_tokens", count_message_tokens)


def _add_vllm_routes(app: FastAPI, state: AppState) -> None:
    """Add what vLLM serves beside OpenAI's paths."""

    async def chat_batch(request: Request) -> Response:
        return await create_chat_batch(state, request)

    async def invocations(request: Request) -> Response:
        return await invoke(state, request)

    async def describe_tokenizer() -> Response:
        return _json(tokenizer_info(state))

    _add_route(app, "POST", "/v1/chat/completions/batch", chat_batch)
    _add_route(app, "POST", "/invocations", invocations)
    if state.config.server.enable_tokenizer_info_endpoint:
        _add_route(app, "GET", "/tokenizer_info", describe_tokenizer)


def _add_token_routes(app: FastAPI, state: AppState) -> None:
    async def chat_render(request: Request) -> Response:
        return _json(await render_chat(state, request))

    async def completions_render(request: Request) -> Response:
        return _json(await render_completion(state, request))

    async def generate(request: Request) -> Response:
        return await create_generation(state, request)

    _add_route(app, "POST", "/v1/chat/completions/render", chat_render)
    _add_route(app, "POST", "/v1/completions/render", completions_render)
    _add_route(app, "POST", "/inference/v1/generate", generate)


def _add_service_routes(app: FastAPI, state: AppState) -> None:
    async def live() -> Response:
        return _json(service.describe_phase(state))

    async def health() -> Response:
        service.check_health(state)
        return Response()

    async def ping() -> Response:
        service.check_health(state)
        return Response()

    async def post_ping() -> Response:
        service.check_health(state)
        return Response()

    async def ready() -> Response:
        service.check_ready(state)
        return Response()

    async def version() -> Response:
        return _json(service.version())

    async def load() -> Response:
        return _json(service.load(state))

    async def scrape() -> Response:
        return Response(metrics.render(state), media_type=metrics.CONTENT_TYPE)

    _add_route(app, "GET", "/live", live)
    _add_route(app, "GET", "/health", health)
    _add_route(app, "GET", "/ready", ready)
    _add_route(app, "GET", "/ping", ping)
    _add_route(app, "POST", "/ping", post_ping)
    _add_route(app, "GET", "/version", version)
    _add_route(app, "GET", "/load", load)
    _add_route(app, "GET", "/metrics", scrape)


def _add_dev_routes(app: FastAPI, state: AppState) -> None:
    async def pause(request: Request) -> Response:
        return _json(await dev.pause(state, request.query_params))

    async def resume() -> Response:
        return _json(await dev.resume(state))

    async def is_paused() -> Response:
        return _json(await dev.is_paused(state))

    async def reset_prefix_cache(request: Request) -> Response:
        return _json(await dev.reset_prefix_cache(state, request.query_params))

    _add_route(app, "POST", "/pause", pause)
    _add_route(app, "POST", "/resume", resume)
    _add_route(app, "GET", "/is_paused", is_paused)
    _add_route(app, "POST", "/reset_prefix_cache", reset_prefix_cache)
