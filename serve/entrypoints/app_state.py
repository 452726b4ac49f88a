"""What the HTTP handlers share: settings, the engine client once it is there, and the phase of the server."""

from __future__ import annotations

import enum
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Final

from serve.config import ServeConfig
from serve.engine.async_llm import AsyncLLM
from serve.entrypoints.asgi import Scope, header
from serve.entrypoints.openai.responses_store import ResponseStore
from serve.errors import EngineDead, InvalidRequest, NotFound, Overloaded
from serve.renderers.answer_format import AnswerFormat
from serve.renderers.renderer import ChatRenderer
from serve.renderers.tokenizer import Tokenizer
from serve.wire.frontend import Ready

LOADING_RETRY_SECONDS: Final = 5
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Phase(enum.Enum):
    """Life of the server, in order."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Services:
    """What exists once the engine is ready."""

    llm: AsyncLLM
    renderer: ChatRenderer
    tokenizer: Tokenizer
    ready: Ready
    answer_format: AnswerFormat


@dataclass(slots=True)
class HttpStats:
    """Counts of answers by (route, method, status), and their durations by route, in seconds.

    tool_parsers counts the answers that were searched for tool calls, by (mode, outcome, request_type).
    """

    requests: dict[tuple[str, str, str], int] = field(default_factory=dict)
    durations: dict[str, list[int]] = field(default_factory=dict)
    duration_sums: dict[str, float] = field(default_factory=dict)
    tool_parsers: dict[tuple[str, str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class AppState:
    """Shared by all handlers; only the event loop's thread touches it."""

    config: ServeConfig
    model_names: tuple[str, ...]
    model_root: str = ""
    phase: Phase = Phase.LOADING
    services: Services | None = None
    death: str = ""
    num_open_requests: int = 0
    http: HttpStats = field(default_factory=HttpStats)
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        server = self.config.server
        self.responses = ResponseStore(server.max_stored_responses, server.max_stored_response_bytes)

    def serving(self) -> Services:
        """Give the services, or raise what a request gets while there are none."""
        if self.phase is Phase.DEAD:
            raise EngineDead
        if self.services is None:
            raise Overloaded(
                "loading: the model is not loaded yet; try again soon",
                code="loading",
                retry_after=LOADING_RETRY_SECONDS,
            )
        return self.services

    def admitting(self) -> Services:
        """Give the services for new work; a draining server takes none."""
        if self.phase is Phase.DRAINING:
            raise Overloaded(
                "draining: the server is shutting down and takes no new requests",
                code="draining",
                retry_after=max(1, int(self.config.server.shutdown_timeout)),
            )
        return self.serving()

    def check_model(self, name: str | None) -> str:
        """Give the name to echo, which is always the first; no name means it too, an unknown one is NotFound."""
        if name and name not in self.model_names:
            shown = name if len(name) <= 200 else name[:200] + "..."
            raise NotFound(
                f"the model {shown!r} does not exist; this server has: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return self.model_names[0]


def request_id_of(scope: Scope) -> str:
    """Give the id of a request: the client's X-Request-Id when it is well formed, else a random one."""
    sent = (header(scope, b"x-request-id") or b"").decode("latin-1")
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def check_request_id(request_id: str) -> str:
    """Check the body field request_id."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            "request_id must be 1 to 128 characters of letters, digits and _ - . :", param="request_id"
        )
    return request_id
