"""Assembles the HTTP application: routes, the gate around them, CORS when asked for, and the API description."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
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
from serve.entrypoints.openai.generate import create_generation
from serve.entrypoints.openai.render import render_chat, render_completion
from serve.entrypoints.openai.tokenize import detokenize, tokenize, tokenizer_info
from serve.entrypoints.pooling.embeddings import create_classification, create_embeddings, create_pooling
from serve.entrypoints.pooling.scores import create_ranking, create_scores
from serve.entrypoints.responses.responses import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)

OPENAPI_URL: Final = "/openapi.json"
HTTP_MESSAGES: Final = {
    404: "there is nothing at this path",
    405: "this path does not take the method {method}",
}
Handler = Callable[..., Awaitable[Response]]
# Gives a whole response, or what is written as its JSON body.
Answer = Callable[[AppState, Request], Awaitable[object]]
# What the server is there for: each path takes a POST with a JSON body.
WORK: Final[Mapping[str, Answer]] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/chat/completions/batch": create_chat_batch,
    "/v1/chat/completions/render": render_chat,
    "/v1/completions": create_completion,
    "/v1/completions/render": render_completion,
    "/inference/v1/generate": create_generation,
    "/v1/responses": create_response,
    "/v1/messages": create_message,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/embeddings": create_embeddings,
    "/pooling": create_pooling,
    "/classify": create_classification,
    **dict.fromkeys(("/score", "/v1/score"), create_scores),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), create_ranking),
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/invocations": invoke,
}


def build_app(state: AppState) -> AsgiApp:
    """Build the ASGI application over a shared state; it answers while the model still loads.

    The routes' descriptions take most of the time that assembling takes, so they are made when somebody asks for them.
    """
    app = _assemble(state, openapi_url=None)
    if not state.config.server.disable_fastapi_docs:
        app.openapi_url, app.docs_url = OPENAPI_URL, "/docs"
        app.openapi = functools.cache(lambda: _assemble(state, openapi_url=OPENAPI_URL).openapi())  # type: ignore[method-assign]
        app.setup()
    app.add_exception_handler(HTTPException, _on_http_exception)
    # Inside the framework's last-resort layer, so that layer never sees an error and never words one.
    app.add_middleware(HttpGate, state=state, work=frozenset(WORK))
    server = state.config.server
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
        )
    return app


def _assemble(state: AppState, *, openapi_url: str | None) -> FastAPI:
    """Give an application with every route; the routes are described when it has an openapi_url."""
    app = FastAPI(
        title="serve",
        version=__version__,
        summary="LLM inference with the OpenAI API",
        docs_url=None,
        redoc_url=None,
        openapi_url=openapi_url,
        redirect_slashes=False,
    )
    _add_work_routes(app, state)
    _add_responses_routes(app, state)
    _add_model_routes(app, state)
    _add_service_routes(app, state)
    if state.config.server.dev_mode:
        _add_dev_routes(app, state)
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


def _bound(state: AppState, answer: Answer) -> Handler:
    """Give the handler of a route out of the function that answers it."""

    async def handle(request: Request) -> Response:
        reply = await answer(state, request)
        return reply if isinstance(reply, Response) else _json(reply)

    # The description names an operation after its handler.
    handle.__name__ = answer.__name__
    return handle


def _add_work_routes(app: FastAPI, state: AppState) -> None:
    for path, answer in WORK.items():
        _add_route(app, "POST", path, _bound(state, answer))


def _add_model_routes(app: FastAPI, state: AppState) -> None:
    async def list_models(request: Request) -> Response:
        return _json(models.list_models(state, is_anthropic=models.ANTHROPIC_HEADER in request.headers))

    async def get_model(request: Request) -> Response:
        is_anthropic = models.ANTHROPIC_HEADER in request.headers
        return _json(models.get_model(state, request.path_params["model_id"], is_anthropic=is_anthropic))

    async def describe_tokenizer() -> Response:
        return _json(tokenizer_info(state))

    _add_route(app, "GET", "/v1/models", list_models)
    _add_route(app, "GET", "/v1/models/{model_id:path}", get_model)
    if state.config.server.enable_tokenizer_info_endpoint:
        _add_route(app, "GET", "/tokenizer_info", describe_tokenizer)


def _add_responses_routes(app: FastAPI, state: AppState) -> None:
    async def stored_response(request: Request) -> Response:
        return await get_response(state, request.path_params["response_id"], request)

    async def drop_response(request: Request) -> Response:
        return _json(await delete_response(state, request.path_params["response_id"]))

    async def stop_response(request: Request) -> Response:
        body = await cancel_response(state, request.path_params["response_id"])
        return Response(body, media_type="application/json")

    async def input_items(request: Request) -> Response:
        return _json(list_input_items(state, request.path_params["response_id"], request.query_params))

    _add_route(app, "GET", "/v1/responses/{response_id}", stored_response)
    _add_route(app, "DELETE", "/v1/responses/{response_id}", drop_response)
    _add_route(app, "POST", "/v1/responses/{response_id}/cancel", stop_response)
    _add_route(app, "GET", "/v1/responses/{response_id}/input_items", input_items)


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

    for path, probe in (("/live", live), ("/health", health), ("/ready", ready), ("/ping", ping)):
        _add_route(app, "GET", path, probe)
        # The HTTP server leaves out the body; a description of its own would say nothing new.
        app.add_api_route(path, probe, methods=["HEAD"], response_class=Response, include_in_schema=False)
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
